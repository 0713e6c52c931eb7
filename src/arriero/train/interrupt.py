"""Being told to stop or to save: Ctrl-C, the SIGTERM a batch system sends before it kills, SIGUSR1."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


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

    before = {each: signal.signal(each, stop) for each in STOPPING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Requests:
    """While entered, a first SIGINT or SIGTERM asks to save and stop, and a second one stops at once; SIGUSR1
    asks to save. They are granted between two steps."""

    def __init__(self) -> None:
        self.stop = 0
        self.save = False

    def _hear(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
        elif self.stop:
            raise Interrupted(number)
        else:
            self.stop = number

    def __enter__(self) -> "Requests":
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            wanted = (*STOPPING, signal.SIGUSR1)
            self._before = {each: signal.signal(each, self._hear) for each in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
