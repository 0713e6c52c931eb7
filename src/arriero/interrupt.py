"""Signals of a run: SIGINT and SIGTERM stop it, SIGUSR1 makes it save, and stop if so configured."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from arriero.events import say

STOPPING = (signal.SIGINT, signal.SIGTERM)
HEARD = (*STOPPING, signal.SIGUSR1)
# Slurm and the supervisor of a job may both send SIGTERM: one request, not two
_ECHO_S = 3.0
# seconds that an Interrupted may take to end the process before the process is killed
_GRACE_S = 2.0


class Interrupted(BaseException):
    """Raised when a signal ends a run. `saved`: a checkpoint of the step it stopped at is on the disk."""

    def __init__(self, number: int, saved: bool = False) -> None:
        self.number, self.saved = number, saved
        self.name = signal.Signals(number).name
        super().__init__(self.name)

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int, bool]]:
        return Interrupted, (self.number, self.saved)

    @property
    def exit_code(self) -> int:
        """Return 0 if a signal of the job system was obeyed and nothing is lost."""
        obeyed = self.saved and self.number != signal.SIGINT
        return 0 if obeyed else 128 + self.number


class Requests:
    """A context in which signals are recorded as requests, and a thread prints the response at once.

    Python runs signal handlers in the main thread, which may wait in native code for minutes. The thread that
    prints is woken by the C-level handler and does not depend on it. Outside the main thread the context does
    nothing.

    SIGINT and SIGTERM raise Interrupted. After `answer_with(..., deferred=True)` the first one only sets
    `stop`, which the run obeys at the next safe point, and a second one raises. If the `with` block has not
    ended two seconds after an Interrupted, the process is killed; with `final`, the process must have ended.
    SIGUSR1 sets `save`. With `usr1_stops` it stops like SIGTERM, except that repeating it changes nothing.
    """

    def __init__(self, prints: bool = True, final: bool = False, usr1_stops: bool = False) -> None:
        self.stop = 0
        self.agreed = 0
        self.save = False
        self._prints, self._final, self._usr1_stops = prints, final, usr1_stops
        self._insistence = _Insistence()
        self._deferred, self._message = False, lambda: "no step was taken yet"
        self._stopping = False

    def answer_with(self, message: Callable[[], str], deferred: bool) -> None:
        """Print `message()` at the next signal, and set whether it is deferred to a safe point.

        A stop that was deferred is raised before a phase that does not defer.
        """
        self._deferred, self._message = deferred, message
        if self.stop and not deferred:
            raise Interrupted(self.stop)

    def __enter__(self) -> "Requests":
        self._before = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        if _entered:
            self.save, self._prints = _entered[-1].save, self._prints and _entered[-1]._prints
        if self._usr1_stops and self.save:
            self.save, self.stop = False, signal.SIGUSR1
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._respond, args=(reader,), name="signals", daemon=True)
        self._thread.start()
        self._before = {each: signal.signal(each, self._record) for each in HEARD}
        self._outer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        for each, handler in self._before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._outer)
        must_end = any(each._final for each in _entered)
        _entered.remove(self)
        if self._stopping and must_end:
            return
        self._ended.set()
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._writer)

    def _record(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1 and not self._usr1_stops:
            self.save = True
        elif self._insistence.hear(number) or not self._deferred:
            raise Interrupted(number)
        else:
            self.stop = self.stop or number

    def _respond(self, reader: int) -> None:
        # the main thread may see a signal much later, and then only once
        insistence = _Insistence()
        while number := os.read(reader, 1)[0]:
            if number not in HEARD:
                continue
            name = signal.Signals(number).name
            if number == signal.SIGUSR1 and not self._usr1_stops:
                self._print(f"{name}: saving after the current step")
                continue
            if not insistence.hear(number) and self._deferred:
                again = "; send it again to stop now" if number in STOPPING else ""
                self._print(f"{name}: {self._message()}{again}")
                continue
            self._stopping = True
            self._print(f"{name}: stopping now" + ("" if self._deferred else f"; {self._message()}"))
            if not self._ended.wait(_GRACE_S):
                _end_process(128 + number)
        os.close(reader)

    def _print(self, text: str) -> None:
        if self._prints:
            say(text)


class _Insistence:
    """Recognises a signal that repeats a request to stop, and so asks to stop at once."""

    def __init__(self) -> None:
        self._first: float | None = None

    def hear(self, number: int) -> bool:
        if number not in STOPPING:
            return False
        if self._first is None:
            self._first = time.monotonic()
            return False
        is_echo = number == signal.SIGTERM and "SLURM_STEP_ID" in os.environ
        return not is_echo or time.monotonic() - self._first > _ECHO_S


_entered: list[Requests] = []


def _end_process(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            # a progress bar has hidden the cursor
            stream.write("\x1b[?25h" if stream.isatty() else "")
            stream.flush()
    os._exit(code)


def _forget_in_child() -> None:
    """Reset signals in a forked child, which shares the parent's pipe but not its thread."""
    if _entered:
        _entered.clear()
        signal.set_wakeup_fd(-1)
        for each in STOPPING:
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


os.register_at_fork(after_in_child=_forget_in_child)
