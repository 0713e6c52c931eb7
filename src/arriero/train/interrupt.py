"""Being told to stop: Ctrl-C, or the SIGTERM a batch system sends before it kills."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number
        self.name = signal.Signals(number).name
        super().__init__(self.name)

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int]]:
        return Interrupted, (self.number,)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM end what runs inside with an Interrupted."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Interrupted(number)

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
