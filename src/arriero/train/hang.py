"""A watchdog in every rank: if no step ends any more, report where each rank is, and end the process.

A collective waits for ever for a rank that is stopped, stuck or gone. Each rank writes its own report. The
ranks that write none, or that are elsewhere than the others, are those the others wait for.
"""

import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from arriero.config.schema import GuardSection
from arriero.errors import EXIT_RESTART
from arriero.events import EVENTS, HEARTBEAT, EventLog
from arriero.files import publish_file
from arriero.parallel.world import World
from arriero.train.hooks import Hook
from arriero.train.rank_process import LOGS, rank_log_path

if TYPE_CHECKING:
    from arriero.train.session import Session

_MEDIAN_OF = 50
_FEW_STEPS = 3
# compilation, evaluation, export and blocking saves have no known length
_LONG_PHASE_S = 1800.0
_LONG_PHASES = {"_evaluate", "_export", "_evaluate_initial_model", "save", "wait", "roll_back"}
_HEARTBEAT_S = 10.0
_GRACE_S = 6.0
_PACKAGE = str(Path(__file__).parents[1])


class HangWatch(Hook):
    """Ends the process with code 75 if no step ends within `hang_factor` times the median step.

    The thread needs the main thread only for its position, so it works while that waits in a collective.
    """

    on_all_ranks = True

    def __init__(self, run_dir: Path, world: World, section: GuardSection) -> None:
        self._run_dir, self._world, self._section = run_dir, world, section
        self._steps: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._step, self._taken = 0, 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, session: "Session") -> None:
        self._report_path(self._world.rank).unlink(missing_ok=True)
        self._nodes = list(session.record.nodes)
        self._main, self._last = threading.get_ident(), time.monotonic()
        self._step = session.record.outcome.steps
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def on_step(self, session: "Session", step: int, tokens: int) -> None:
        now = time.monotonic()
        if self._taken:
            self._steps.append(now - self._last)
        self._last, self._step, self._taken = now, step, self._taken + 1
        if session.timeline.at(step) != session.timeline.at(step - 1):
            # the first step of a phase compiles again, and its steps take another time
            self._steps.clear()
            self._taken = 0

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        self._last = time.monotonic()

    def on_stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _limit(self, phases: set[str]) -> float:
        """Return the seconds after which a step counts as hung."""
        assert self._section.hang_factor
        if len(self._steps) < _FEW_STEPS or phases & _LONG_PHASES:
            return max(_LONG_PHASE_S, self._section.hang_min_s)
        median = statistics.median(list(self._steps))
        return max(self._section.hang_min_s, self._section.hang_factor * median)

    def _watch(self) -> None:
        beaten, was_long = 0.0, False
        while not self._ended.wait(min(1.0, self._section.hang_min_s / 4)):
            doing, phases = _position(sys._current_frames().get(self._main))
            limit, now, is_long = self._limit(phases), time.monotonic(), bool(phases & _LONG_PHASES)
            if was_long and not is_long:
                # a save or evaluation has just ended: its time is not part of the next step
                self._last = now
            was_long = is_long
            if self._world.is_leader and now - beaten > _HEARTBEAT_S:
                beaten = now
                self._beat(limit)
            if now - self._last > limit:
                self._report(doing, now - self._last)

    def _beat(self, limit: float) -> None:
        step_s = statistics.median(list(self._steps)) if self._steps else None
        beat = {"time": time.time(), "step": self._step, "limit_s": limit, "step_s": step_s}
        path = self._run_dir / HEARTBEAT
        with suppress(OSError):
            publish_file(path, json.dumps(beat).encode(), is_durable=False)

    def _report_path(self, rank: int) -> Path:
        return self._run_dir / LOGS / f"hang-{rank:05d}.json"

    def _report(self, doing: str, waited: float) -> None:
        """Write where this rank is and its stacks; the first rank also reports who is missing. Then exit."""
        mine = {"rank": self._world.rank, "step": self._step, "doing": doing, "waited_s": round(waited, 1)}
        with suppress(OSError):
            self._report_path(0).parent.mkdir(exist_ok=True)
            publish_file(self._report_path(self._world.rank), json.dumps(mine).encode(), is_durable=False)
            with rank_log_path(self._run_dir, self._world.rank).open("a") as log:
                log.write(f"hang: no step for {waited:.0f} s; stacks of all threads:\n")
                log.flush()
                faulthandler.dump_traceback(log, all_threads=True)
        try:
            self._report_together(mine, waited)
        finally:
            os._exit(EXIT_RESTART)

    def _report_together(self, mine: dict[str, Any], waited: float) -> None:
        if self._world.size > 1:
            dump_flight_recorder(self._run_dir / LOGS / f"flight-{self._world.rank:05d}.pickle")
            time.sleep(_GRACE_S)
        reports = [mine, *self._reports_of_others()]
        if self._world.rank == min(report["rank"] for report in reports):
            self._name_missing(reports, waited)
        else:
            # rank 0 of those that answer must write the event before Slurm kills the step
            time.sleep(_GRACE_S)

    def _reports_of_others(self) -> list[dict[str, Any]]:
        """Return the reports of the other ranks; files of ranks that a smaller world has not are old."""
        found = []
        for rank in set(range(self._world.size)) - {self._world.rank}:
            with suppress(OSError, ValueError):
                found.append(json.loads(self._report_path(rank).read_bytes()))
        return found

    def _name_missing(self, reports: list[dict[str, Any]], waited: float) -> None:
        message, ranks = describe_hang(reports, self._nodes)
        nodes = sorted({self._nodes[rank] for rank in ranks})
        events = EventLog(self._run_dir / EVENTS)
        events.write(
            "hang", step=self._step, waited_s=round(waited, 1), ranks=ranks, nodes=nodes, message=message,
            reports=reports[:64],
        )  # fmt: skip
        events.close()
        with suppress(OSError):
            os.write(2, f"hang: no step for {waited:.0f} s after step {self._step}: {message}\n".encode())


def describe_hang(reports: list[dict[str, Any]], nodes: list[str]) -> tuple[str, list[int]]:
    """Return a sentence and the ranks that the others wait for: the silent ones, else those elsewhere."""
    silent = sorted(set(range(len(nodes))) - {report["rank"] for report in reports})
    places = Counter((report["step"], report["doing"]) for report in reports)
    (step, doing), count = places.most_common(1)[0]
    waiting = f"{count} of {len(nodes)} ranks wait in {doing} after step {step}"
    if silent:
        return f"{_named(silent, nodes)} did not answer; {waiting}", silent
    elsewhere = [r for r in reports if (r["step"], r["doing"]) != (step, doing)]
    if not elsewhere or len(elsewhere) * 2 >= len(reports):
        return f"all ranks answered; {waiting}", []
    where = "; ".join(
        f"{_named([r['rank']], nodes)} is in {r['doing']} after step {r['step']}" for r in elsewhere
    )
    return f"{where}; {waiting}", [r["rank"] for r in elsewhere]


def _named(ranks: list[int], nodes: list[str]) -> str:
    shown = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in ranks[:8])
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _position(frame: FrameType | None) -> tuple[str, set[str]]:
    """Return the innermost place of this package in a stack, and the names of all its functions there."""
    where, names = "", set()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            names.add(code.co_name)
            relative = code.co_filename.removeprefix(_PACKAGE).lstrip("/")
            where = where or f"{code.co_name} ({relative}:{frame.f_lineno})"
        frame = frame.f_back
    return where or "code outside Arriero", names


def dump_flight_recorder(path: Path) -> None:
    """Write the last collectives of this process, if torch recorded them: read by torchfrtrace."""
    from torch._C import _distributed_c10d as c10d

    # NCCL's own recorder, and since torch 2.12 or so one for every backend
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        with suppress(Exception):
            path.write_bytes(getattr(c10d, name)())
            return
