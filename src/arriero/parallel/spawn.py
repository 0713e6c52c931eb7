"""Several processes of one run on this machine: forked together, torn down together."""

import ctypes
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from arriero.errors import UserError
from arriero.interrupt import HEARD, STOPPING, Interrupted
from arriero.parallel.world import RENDEZVOUS

Result = TypeVar("Result")

_FAILED = 1
_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 30.0
# after a second signal, for ranks that do not answer even that
_LAST_SECONDS = 4.0
_REAPED_LATE = 0.5


class RankFailed(Exception):
    """A rank crashed; the text is its own last words."""


def run_ranks(work: Callable[[], Result], ranks: int, leader_prints: bool = True) -> Result:
    """Run `work` in so many processes; what rank 0 returns. When one fails all end, and its error is raised.

    Forked, not started anew: torch is imported once. The caller must not have used torch's threads or a GPU.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="arriero-ranks-") as name:
        folder = Path(name)
        children: dict[int, int] = {}
        with _passing_signals_on(children) as passing:
            for rank in range(ranks):
                if (pid := os.fork()) == 0:
                    _be_rank(work, rank, ranks, folder, leader_prints)
                children[pid] = rank
            passing.begin()
            killed, failed = _wait(children, passing.passed)
        stops = [number for number in passing.passed if number in STOPPING]
        if failed:
            _raise_first_failure(folder, killed, stops[0] if stops else 0)
        return pickle.loads((folder / "result").read_bytes())


def _be_rank(work: Callable[[], Any], rank: int, ranks: int, folder: Path, leader_prints: bool) -> None:
    code = _FAILED
    try:
        for number, action in _IN_A_NEW_RANK.items():
            signal.signal(number, action)
        _die_with_parent()
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks)
        )
        os.environ[RENDEZVOUS] = f"file://{folder}/meeting"
        if rank or not leader_prints:
            with (folder / f"output-{rank}").open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        _share_cores(ranks)
        result = work()
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException as error:
        _leave_word(folder, rank, error)
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """Also when it is killed outright. And a Ctrl-C comes once: from it, not from the terminal too."""
    os.setpgrp()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _share_cores(ranks: int) -> None:
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def _leave_word(folder: Path, rank: int, error: BaseException) -> None:
    """Written whole before it gets its name, so that the parent never reads half a word."""
    try:
        carried = pickle.dumps(error)
        pickle.loads(carried)
    except Exception:
        carried = None
    trace = "".join(traceback.format_exception(error))
    word = pickle.dumps((time.time(), carried, trace))
    (folder / f"word-{rank}.tmp").write_bytes(word)
    (folder / f"word-{rank}.tmp").rename(folder / f"word-{rank}")


def _wait(children: dict[int, int], passed: list[int]) -> tuple[dict[int, tuple[float, int]], bool]:
    """Returns the ranks that were killed, not by us, with time and signal; and whether any rank failed.

    Ranks that were passed a signal end by themselves; a second one would stop them before they have saved.
    """
    left, killed, told, deadline, failed = dict(children), {}, {signal.SIGTERM, *passed}, None, False
    try:
        while left:
            ended = [(pid, status) for pid, status in (os.waitpid(each, os.WNOHANG) for each in left) if pid]
            for pid, status in ended:
                rank, failed = left.pop(pid), failed or status != 0
                if os.WIFSIGNALED(status) and (deadline is None or os.WTERMSIG(status) not in told):
                    killed[rank] = (time.time(), os.WTERMSIG(status))
            stops = sum(number in STOPPING for number in passed)
            if deadline is None and (failed or stops > 1):
                deadline = time.monotonic() + (_GRACE_SECONDS if stops < 2 else _LAST_SECONDS)
                if not stops:
                    _tell(left, signal.SIGTERM)
            elif deadline is not None and time.monotonic() > deadline:
                told.add(signal.SIGKILL)
                _tell(left, signal.SIGKILL)
            if left and not ended:
                time.sleep(0.02)
    except BaseException:
        _tell(left, signal.SIGKILL)
        raise
    return killed, failed


def _tell(children: Iterable[int], number: int) -> None:
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _raise_first_failure(folder: Path, killed: dict[int, tuple[float, int]], stop: int) -> None:
    """A killed rank's peers fail within moments, often before its end is seen here.

    After the signal `stop` ranks may end in any way, and only an error for the user is reported as such.
    """
    words = {int(path.name[5:]): pickle.loads(path.read_bytes()) for path in folder.glob("word-*[0-9]")}
    first_word = min((when for when, _, _ in words.values()), default=float("inf"))
    for rank, (when, number) in sorted(killed.items(), key=lambda item: item[1]):
        if stop or when - _REAPED_LATE > first_word:
            continue
        todo = "the system does so when memory runs out" if number == signal.SIGKILL else ""
        name = signal.Signals(number).name
        raise UserError(
            f"rank {rank} was killed ({name}){_last_line(folder, rank)}; the others were stopped", todo
        )
    if not words:
        raise Interrupted(stop) if stop else RankFailed("a rank ended without a word")
    rank = min(words, key=lambda r: words[r][0])
    _, carried, trace = words[rank]
    error = pickle.loads(carried) if carried else None
    mine = isinstance(error, UserError | BrokenPipeError)
    if error is not None and (mine or not isinstance(error, Exception | SystemExit)):
        raise error
    if stop:
        raise Interrupted(stop)
    raise RankFailed(f"rank {rank} failed first:\n{trace}")


def _last_line(folder: Path, rank: int) -> str:
    """What a rank that crashed below Python had to say."""
    output = folder / f"output-{rank}"
    lines = output.read_text(errors="replace").split("\n") if output.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    return f", its last line: {said[-1][:300]}" if said else ""


_IN_A_NEW_RANK = dict.fromkeys(STOPPING, signal.SIG_DFL) | {signal.SIGUSR1: signal.SIG_IGN}


class _passing_signals_on:
    """Signals to this process go on to its ranks, which end by them; those that come before all ranks are
    forked wait until `begin`."""

    def __init__(self, children: dict[int, int]) -> None:
        self._children = children
        self._begun = False
        self.passed: list[int] = []

    def begin(self) -> None:
        self._begun = True
        for number in list(self.passed):
            _tell(self._children, number)

    def _hear(self, number: int, _: object) -> None:
        self.passed.append(number)
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{signal.Signals(number).name}: passed on to the ranks\n")
            sys.stderr.flush()
        if self._begun:
            _tell(self._children, number)

    def __enter__(self) -> "_passing_signals_on":
        # this process answers promptly by itself, and its thread for signals does not survive a fork
        self._woken = signal.set_wakeup_fd(-1)
        self._before = {each: signal.signal(each, self._hear) for each in HEARD}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._woken)
