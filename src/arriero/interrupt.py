"""Signals: SIGINT and SIGTERM stop a run, SIGUSR1 makes it save."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)
HEARD = (*STOPPING, signal.SIGUSR1)
# how long an Interrupted may take to end the process before the process is ended without it
_GRACE_S = 2.0


class Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number
        self.name = signal.Signals(number).name
        super().__init__(self.name)

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int]]:
        return Interrupted, (self.number,)


class Requests:
    """While entered, signals become requests; a thread prints at once what will be done about each.

    Python runs signal handlers between two bytecodes of the main thread, which may wait in a native call for
    minutes. The thread is woken by the C-level handler and does not depend on the main thread.

    At first SIGINT and SIGTERM raise Interrupted. After `expect(..., deferred=True)` the first one only sets
    `stop`, to be granted at the next safe point, and a second one raises. An Interrupted that has not ended
    the `with` block after two seconds ends the process; with `final`, it must have ended the process by then.
    """

    def __init__(self, speaks: bool = True, final: bool = False) -> None:
        self.stop = 0
        self.agreed = 0
        self.save = False
        self._speaks, self._final = speaks, final
        self._deferred, self._plan = False, lambda: "no step was taken yet"
        self._stopping = False

    def expect(self, plan: Callable[[], str], deferred: bool) -> None:
        """From now on a signal is answered by `plan()`. A stop that is still open is granted before a phase
        that does not defer."""
        self._deferred, self._plan = deferred, plan
        if self.stop and not deferred:
            raise Interrupted(self.stop)

    def __enter__(self) -> "Requests":
        self._before = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        if _entered:
            self.save, self._speaks = _entered[-1].save, self._speaks and _entered[-1]._speaks
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, args=(reader,), name="signals", daemon=True)
        self._thread.start()
        self._before = {each: signal.signal(each, self._hear) for each in HEARD}
        self._outer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        for each, handler in self._before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._outer)
        lasting = any(each._final for each in _entered)
        _entered.remove(self)
        if self._stopping and lasting:
            return
        self._ended.set()
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._writer)

    def _hear(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
        elif self.stop or not self._deferred:
            raise Interrupted(number)
        else:
            self.stop = number

    def _answer(self, reader: int) -> None:
        heard = 0
        while number := os.read(reader, 1)[0]:
            if number not in HEARD:
                continue
            name = signal.Signals(number).name
            if number == signal.SIGUSR1:
                self._say(f"{name}: saving after the current step")
                continue
            heard += 1
            if heard == 1 and self._deferred:
                self._say(f"{name}: {self._plan()}; send it again to stop now")
                continue
            self._stopping = True
            self._say(f"{name}: stopping now" + ("" if self._deferred else f"; {self._plan()}"))
            if not self._ended.wait(_GRACE_S):
                _end_process(128 + number)
        os.close(reader)

    def _say(self, text: str) -> None:
        if self._speaks:
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()


_entered: list[Requests] = []


def interruptible() -> Requests:
    """SIGINT and SIGTERM end what runs inside with an Interrupted."""
    return Requests()


def _end_process(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            # a progress bar hides the cursor
            stream.write("\x1b[?25h" if stream.isatty() else "")
            stream.flush()
    os._exit(code)


def _forget_in_child() -> None:
    """A forked child must not answer for its parent: it shares the pipe, but not the thread."""
    if _entered:
        _entered.clear()
        signal.set_wakeup_fd(-1)
        for each in STOPPING:
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


os.register_at_fork(after_in_child=_forget_in_child)
