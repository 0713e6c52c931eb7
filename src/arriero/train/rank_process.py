"""What the process of a rank does in addition to training: log file, stack dumps, garbage collection."""

import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from arriero.errors import EXIT_RESTART, NodeError, UserError
from arriero.events import warn
from arriero.files import publish_file
from arriero.interrupt import Interrupted
from arriero.parallel.rendezvous import RanksMissing
from arriero.parallel.world import World
from arriero.train.hooks import Hook

if TYPE_CHECKING:
    from arriero.train.metrics import StepMetrics
    from arriero.train.saving import Outcome
    from arriero.train.session import Session

LOGS = "logs"
STACKS_SIGNAL = signal.SIGUSR2


def rank_log_path(run_dir: Path, rank: int) -> Path:
    return run_dir / LOGS / f"rank-{rank:05d}.log"


def failure_path(run_dir: Path, rank: int) -> Path:
    return run_dir / LOGS / f"failed-{rank:05d}.json"


def node_name() -> str:
    """Return Slurm's name of this node, which `--exclude` takes, or the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def report_failure(run_dir: Path, world: World, error: BaseException) -> None:
    """Write why this rank ends, for a supervisor that cannot see its exception."""
    if isinstance(error, Interrupted) or not run_dir.is_dir():
        return
    record = {
        "time": time.time(),
        "rank": world.rank,
        "node": node_name(),
        "error": type(error).__name__,
        "message": str(error),
        "can_restart": getattr(error, "exit_code", EXIT_RESTART) == EXIT_RESTART,
        "is_of_node": isinstance(error, NodeError),
        "todo": getattr(error, "todo", ""),
    }
    if isinstance(error, RanksMissing):
        record["blamed"] = error.node
    with suppress(OSError):
        path = failure_path(run_dir, world.rank)
        path.parent.mkdir(exist_ok=True)
        publish_file(path, json.dumps(record).encode(), is_durable=False)


class RankLog(Hook):
    """Write logs/rank-00012.log: the output of a rank, its errors, and its stacks when it gets SIGUSR2.

    Rank 0 keeps the terminal. A rank of its own, without others, has no log file.
    """

    on_all_ranks = True

    def __init__(self, run_dir: Path, world: World) -> None:
        self._path, self._world = rank_log_path(run_dir, world.rank), world
        self._file: TextIO | None = None
        self._streams: dict[int, int] = {}

    def on_start(self, session: "Session") -> None:
        if self._world.size == 1:
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._path.open("a", buffering=1)
        except OSError as error:
            warn(f"{self._path} cannot be written ({error.strerror}); training continues without it")
            return
        faulthandler.enable(self._file)
        faulthandler.register(STACKS_SIGNAL, self._file, all_threads=True, chain=False)
        about = f"rank {self._world.rank} of {self._world.size} on {node_name()}, process {os.getpid()}"
        self._write(f"{about}, {session.device.name}: start after step {session.record.outcome.steps}")
        if not self._world.is_leader:
            self._redirect(self._file)

    def on_metrics(self, session: "Session", metrics: "StepMetrics") -> None:
        self._write(f"step {metrics.step}: loss {metrics.loss:.6g}, {metrics.step_s:.4g} s per step")

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self._write(f"end at step {outcome.steps}")
        self._close()

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        self._write(f"step {step}: {type(error).__name__}: {error}")
        if self._file is not None and not isinstance(error, Interrupted | UserError):
            with suppress(OSError):
                traceback.print_exception(error, file=self._file)
        self._close()

    def _write(self, text: str) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _redirect(self, file: TextIO) -> None:
        _flush_output()
        for number in (1, 2):
            self._streams[number] = os.dup(number)
            os.dup2(file.fileno(), number)

    def _close(self) -> None:
        """Give output back to its streams, so that the error that ends the process is printed there."""
        if self._file is None:
            return
        _flush_output()
        for number, before in self._streams.items():
            os.dup2(before, number)
            os.close(before)
        self._streams.clear()
        faulthandler.disable()
        faulthandler.register(STACKS_SIGNAL, sys.__stderr__ or 2, all_threads=True, chain=False)
        self._file.close()
        self._file = None


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


class GarbageCollection(Hook):
    """Collect Python's garbage every `every` steps, on all ranks at the same step, and at no other time.

    An automatic collection stops one rank at a time, and all others wait for it. What exists at the start is
    never garbage and is not looked at again; what was frozen before stays so.
    """

    on_all_ranks = True

    def __init__(self, every: int) -> None:
        self._every = every
        self._stays_frozen = False

    def on_start(self, session: "Session") -> None:
        self._stays_frozen = gc.get_freeze_count() > 0
        gc.collect()
        gc.freeze()
        gc.disable()

    def on_step(self, session: "Session", step: int, tokens: int) -> None:
        if step % self._every == 0:
            gc.collect()

    def on_stop(self) -> None:
        if not self._stays_frozen:
            gc.unfreeze()
        gc.enable()
