"""Run checks in a process of their own, each within its time bound, and collect what they found."""

import multiprocessing
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Literal

Status = Literal["pass", "warn", "fail"]
_ORDER: tuple[Status, ...] = ("pass", "warn", "fail")
_COMMAND_S = 20.0


@dataclass(frozen=True)
class Finding:
    """The result of a check: what was found and, unless it passed, what to do. `facts` are its numbers.

    The name of the check and the seconds that it took are set by `run_checks`.
    """

    status: Status
    found: str
    todo: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Check:
    """A named function that returns what it found within `bound_s` seconds."""

    name: str
    function: Callable[[], Finding]
    bound_s: float = 10.0


def worst(statuses: Sequence[Status]) -> Status:
    return max(statuses, key=_ORDER.index, default="pass")


def verdict(found: str, fails: Sequence[str], warns: Sequence[str], todo: str, **facts: Any) -> Finding:
    """Return the finding of a check that looked for several problems; without one it passes with `found`."""
    status: Status = "fail" if fails else "warn" if warns else "pass"
    problems = "; ".join([*fails, *warns])
    return Finding(status, problems or found, todo if problems else "", facts)


def run_checks(checks: Sequence[Check], until: float | None = None) -> Iterator[Finding]:
    """Run the checks one after the other in a forked process and yield each result.

    A check that exceeds its bound, or the monotonic time `until`, is killed and fails; the checks after it
    run in a new process. The caller must not have used a GPU or torch's threads.
    """
    left = list(checks)
    while left:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        worker = multiprocessing.get_context("fork").Process(target=_work, args=(left, sender), daemon=True)
        worker.start()
        sender.close()
        try:
            while left:
                check = left.pop(0)
                result = _received(check, receiver, until)
                yield result or _lost(check, worker, until)
                if result is None:
                    break
        finally:
            # with the commands that it started; it may not lead a process group yet
            worker.kill()
            assert worker.pid
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            # a process that waits for a device or a file system in the kernel cannot be killed at once
            worker.join(0.2)
            receiver.close()


def _work(checks: Sequence[Check], sender: Connection) -> None:
    os.setpgrp()
    for check in checks:
        start = time.monotonic()
        try:
            found = check.function()
        except Exception as error:
            trace = traceback.format_exc().strip().splitlines()
            place = trace[-2].strip() if len(trace) > 1 else ""
            found = Finding("fail", f"{type(error).__name__}: {error}"[:400], place)
        sender.send(replace(found, name=check.name, seconds=round(time.monotonic() - start, 3)))


def _received(check: Check, receiver: Connection, until: float | None) -> Finding | None:
    """Return the result of a check, or None if its process ends or exceeds the bound."""
    left = check.bound_s if until is None else max(0.0, min(check.bound_s, until - time.monotonic()))
    try:
        return receiver.recv() if receiver.poll(left) else None
    except EOFError:
        return None


def _lost(check: Check, worker: multiprocessing.process.BaseProcess, until: float | None) -> Finding:
    """Return the failure of a check whose process has ended or does not answer."""
    worker.join(0.5)
    code = worker.exitcode
    if code is not None:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        found = Finding("fail", f"the process of the check ended with {how}", "look for it in `dmesg`")
    else:
        late = until is not None and time.monotonic() >= until
        bound = "the time for all checks of the node" if late else f"{check.bound_s:.0f} s"
        todo = "a device, a file system or a driver does not answer: leave the node out and report it"
        found = Finding("fail", f"did not finish within {bound}", todo)
    return replace(found, name=check.name, seconds=0.0 if code is not None else check.bound_s)


def user_check(command: str) -> Check:
    """Return the check that runs a shell command of the site; an exit code other than 0 fails the node."""
    return Check(f"command {command}"[:60], lambda: _run_command(command), _COMMAND_S + 5)


def _run_command(command: str) -> Finding:
    try:
        done = subprocess.run(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_S,
        )
    except subprocess.TimeoutExpired:
        return Finding("fail", f"did not finish within {_COMMAND_S:.0f} s", "see the command")
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    said = f": {lines[-1][:200]}" if lines else ""
    if done.returncode:
        return Finding("fail", f"exit code {done.returncode}{said}", "see the command")
    return Finding("pass", f"exit code 0{said}")
