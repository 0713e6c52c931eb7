"""Start the ranks of a run on this machine by forking, and end them together."""

import ctypes
import gc
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from arriero.errors import EXIT_RESTART, NodeError, UserError
from arriero.interrupt import HEARD, STOPPING, Interrupted
from arriero.parallel.world import RENDEZVOUS

Result = TypeVar("Result")

_FAILED, _STOPPED = 1, 3
_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 30.0
# seconds after a second signal, for ranks that do not end
_LAST_SECONDS = 4.0
_REAPED_LATE = 0.5


class RankKilled(NodeError):
    """A rank was killed from outside: nothing is wrong with the run itself."""


class RankFailed(Exception):
    """A rank crashed; the text is its traceback."""


def run_ranks(
    work: Callable[[], Result],
    ranks: int,
    leader_prints: bool = True,
    log_of: Callable[[int], Path] | None = None,
) -> Result:
    """Run `work` in `ranks` forked processes and return rank 0's result; if one fails, all end and its error
    is raised. `log_of` names the log files that ranks write themselves: the error of a killed rank quotes it.

    Forked processes share the import of torch. The caller must not have used torch's threads or a GPU.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="arriero-ranks-") as name:
        folder, began = Path(name), time.time()
        children: dict[int, int] = {}
        with _forward_signals(children) as passing:
            for rank in range(ranks):
                if (pid := os.fork()) == 0:
                    _be_rank(work, rank, ranks, folder, leader_prints)
                children[pid] = rank
            passing.begin()
            killed, codes = _wait(children, passing.passed)
        stops = [number for number in passing.passed if number in STOPPING]
        if codes - {0}:

            def output_of(rank: int) -> list[Path]:
                log = [log_of(rank)] if log_of else []
                found = [*(each for each in log if each.exists() and each.stat().st_mtime >= began)]
                return [*found, folder / f"output-{rank}"]

            _raise_first_failure(folder, killed, stops[0] if stops else 0, output_of, EXIT_RESTART in codes)
        return pickle.loads((folder / "result").read_bytes())


def _be_rank(work: Callable[[], Any], rank: int, ranks: int, folder: Path, leader_prints: bool) -> None:
    code = _FAILED
    # a collection would look at every object of the parent and so copy its memory
    gc.freeze()
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
        _write_error(folder, rank, error)
        code = _STOPPED if isinstance(error, Interrupted) and error.saved else _FAILED
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """End this rank when the parent is killed, and take Ctrl-C from the parent, not from the terminal."""
    os.setpgrp()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _share_cores(ranks: int) -> None:
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def _write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Write the error of this rank for the parent, atomically."""
    try:
        carried = pickle.dumps(error)
        pickle.loads(carried)
    except Exception:
        carried = None
    trace = "".join(traceback.format_exception(error))
    record = pickle.dumps((time.time(), carried, trace))
    (folder / f"error-{rank}.tmp").write_bytes(record)
    (folder / f"error-{rank}.tmp").rename(folder / f"error-{rank}")


def _wait(children: dict[int, int], passed: list[int]) -> tuple[dict[int, tuple[float, int]], set[int]]:
    """Wait for all ranks; return those that others killed, with time and signal, and all exit codes.

    Ranks that got a forwarded signal end by themselves; another one would stop them before they have saved.
    """
    left, killed, sent, deadline = dict(children), {}, {signal.SIGTERM, *passed}, None
    codes: set[int] = set()
    try:
        while left:
            ended = [(pid, status) for pid, status in (os.waitpid(each, os.WNOHANG) for each in left) if pid]
            for pid, status in ended:
                rank = left.pop(pid)
                codes.add(os.waitstatus_to_exitcode(status))
                if os.WIFSIGNALED(status) and (deadline is None or os.WTERMSIG(status) not in sent):
                    killed[rank] = (time.time(), os.WTERMSIG(status))
            stops = sum(number in STOPPING for number in passed)
            if deadline is None and (codes - {0} or stops > 1):
                deadline = time.monotonic() + (_GRACE_SECONDS if stops < 2 else _LAST_SECONDS)
                # all ranks stop after an agreed save; a signal would interrupt those that still write
                if not stops and _STOPPED not in codes:
                    _send_signal(left, signal.SIGTERM)
            elif deadline is not None and time.monotonic() > deadline:
                sent.add(signal.SIGKILL)
                _send_signal(left, signal.SIGKILL)
            if left and not ended:
                time.sleep(0.02)
    except BaseException:
        _send_signal(left, signal.SIGKILL)
        raise
    return killed, codes


def _send_signal(children: Iterable[int], number: int) -> None:
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _raise_first_failure(
    folder: Path,
    killed: dict[int, tuple[float, int]],
    stop: int,
    output_of: Callable[[int], list[Path]],
    is_hung: bool,
) -> None:
    """Raise the error of the rank that failed first.

    The peers of a killed rank fail within moments, often before its end is noticed here. After the signal
    `stop`, ranks may end in any way, and only a UserError is reported as one.
    """
    errors = {int(path.name[6:]): pickle.loads(path.read_bytes()) for path in folder.glob("error-*[0-9]")}
    first_error = min((when for when, _, _ in errors.values()), default=float("inf"))
    for rank, (when, number) in sorted(killed.items(), key=lambda item: item[1]):
        # nothing here sends SIGKILL before the first failure, so it is the cause however late it is noticed
        if stop or (number != signal.SIGKILL and when - _REAPED_LATE > first_error):
            continue
        todo = "the system does so when memory runs out" if number == signal.SIGKILL else ""
        name = signal.Signals(number).name
        raise RankKilled(
            f"rank {rank} was killed ({name}){_last_lines(output_of(rank))}; the others were stopped", todo
        )
    if not errors and is_hung:
        raise SystemExit(EXIT_RESTART)
    if not errors:
        raise Interrupted(stop) if stop else RankFailed("a rank ended without an error message")
    rank = min(errors, key=lambda r: errors[r][0])
    _, carried, trace = errors[rank]
    error = pickle.loads(carried) if carried else None
    reported = isinstance(error, UserError | BrokenPipeError)
    if error is not None and (reported or not isinstance(error, Exception | SystemExit)):
        raise error
    if stop:
        raise Interrupted(stop)
    raise RankFailed(f"rank {rank} failed first:\n{trace}")


def last_lines(path: Path, count: int = 3) -> list[str]:
    """Return the last lines of a log file that are not empty, each cut to 300 characters."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
        lines = file.read().decode(errors="replace").splitlines()
        return [line.strip()[:300] for line in lines if line.strip()][-count:]
    return []


def _last_lines(outputs: list[Path]) -> str:
    """Quote what a rank that crashed below Python printed last."""
    said = next((lines for path in outputs if (lines := last_lines(path))), [])
    return f", its last line{'s' if len(said) > 1 else ''}: {' | '.join(said)}" if said else ""


_IN_A_NEW_RANK = dict.fromkeys(STOPPING, signal.SIG_DFL) | {signal.SIGUSR1: signal.SIG_IGN}


class _forward_signals:
    """Forward signals to the ranks; those that arrive before all ranks are forked are sent by `begin`.

    Outside the main thread, which Python does not let handle signals, the context does nothing.
    """

    def __init__(self, children: dict[int, int]) -> None:
        self._children = children
        self._begun = False
        self.passed: list[int] = []

    def begin(self) -> None:
        self._begun = True
        for number in list(self.passed):
            _send_signal(self._children, number)

    def _hear(self, number: int, _: object) -> None:
        self.passed.append(number)
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{signal.Signals(number).name}: forwarded to the ranks\n")
            sys.stderr.flush()
        if self._begun:
            _send_signal(self._children, number)

    def __enter__(self) -> "_forward_signals":
        self._before = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        # the thread that handles signals does not survive a fork
        self._woken = signal.set_wakeup_fd(-1)
        self._before = {each: signal.signal(each, self._hear) for each in HEARD}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        for each, handler in self._before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._woken)
