"""Goodput: the share of allocated device time spent on steps that were kept, and where the rest went.

Everything comes from events.jsonl and metrics.jsonl. Times are seconds of one device, summed over devices.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from arriero.events import EVENTS, METRICS, START_OVER, events_since, read_records
from arriero.ui import Table
from arriero.units import human_time

CAUSES = {
    "preflight": "checking the nodes",
    "start-up": "imports, rendezvous, data, loading the checkpoint",
    "compile": "the first step of a process, beyond the median step",
    "evaluation": "validation loss",
    "save": "training waited for a checkpoint",
    "repeated work": "steps that were lost and taken again",
    "hang": "no step ended until the watchdog acted",
    "idle": "between steps and restarts, the end of a process, spare nodes",
}
_NEEDED = {"step", "step_s", "time"}
_ENDS = ("end", "signal", "fault", "hang")


@dataclass(frozen=True)
class Goodput:
    """Device-seconds. `queue_s` is the wall time that jobs waited, which is not allocated to them."""

    allocated_s: float
    kept_s: float
    lost_s: Mapping[str, float]
    queue_s: float
    starts: int

    @property
    def share(self) -> float:
        return self.kept_s / self.allocated_s if self.allocated_s else 0.0

    def describe(self) -> dict[str, Any]:
        """Return plain data for --json."""
        return {
            "goodput": round(self.share, 4),
            "allocated_device_s": round(self.allocated_s, 1),
            "kept_device_s": round(self.kept_s, 1),
            "lost_device_s": {cause: round(seconds, 1) for cause, seconds in self.lost_s.items()},
            "queue_s": round(self.queue_s, 1),
            "starts": self.starts,
        }


@dataclass
class _Attempt:
    """One start of the ranks, with the lines of metrics.jsonl that it wrote."""

    began: float
    ended: float
    devices: int
    first_step: int
    startup_s: float
    lines: list[dict[str, Any]] = field(default_factory=list)
    first_evaluation_s: float = 0.0
    hang_s: float = 0.0
    rollbacks: Sequence[int] = ()

    def losses(self, kept_until: int) -> tuple[float, dict[str, float]]:
        """Return the seconds of steps up to `kept_until` that were kept, and of everything else by cause."""
        step_s = [line["step_s"] for line in self.lines]
        median = statistics.median(step_s[1:] or step_s) if step_s else 0.0
        from_start = bool(step_s) and self.lines[0]["step"] == self.first_step + 1
        compiled = max(0.0, step_s[0] - median) if from_start else 0.0
        kept, repeated = -compiled, 0.0
        for first, last, seconds, until in self._segments(kept_until):
            share = max(0, min(until, last) - first) / max(1, last - first)
            kept, repeated = kept + share * seconds, repeated + (1 - share) * seconds
        lost = {
            "start-up": self.startup_s,
            "compile": compiled,
            "evaluation": self.first_evaluation_s + sum(line.get("eval_s") or 0.0 for line in self.lines),
            "save": sum(line.get("save_s") or 0.0 for line in self.lines),
            "repeated work": max(0.0, repeated + min(0.0, kept)),
            "hang": self.hang_s,
        }
        return max(0.0, kept), lost

    def _segments(self, until: int) -> Iterator[tuple[int, int, float, int]]:
        """Yield per line its steps (first, last], their seconds, and up to which step they were kept."""
        targets = list(self.rollbacks)
        for i in range(len(self.lines) - 1, -1, -1):
            line, before = self.lines[i], self.lines[i - 1]["step"] if i else self.first_step
            is_rolled_back = before >= line["step"]
            target = targets.pop() if is_rolled_back and targets else 0
            first = target if is_rolled_back else before
            yield first, line["step"], (line["step"] - first) * line["step_s"], until
            until = min(until, target) if is_rolled_back else until


def goodput(run_dir: Path) -> Goodput | None:
    """Return the goodput of a run over all its jobs and restarts; None if it has not started."""
    events = events_since(run_dir / EVENTS, START_OVER)
    lines = [line for line in read_records(run_dir / METRICS) if line.keys() >= _NEEDED]
    attempts = _attempts(events, lines)
    if not attempts:
        return None
    kept, lost = 0.0, dict.fromkeys(CAUSES, 0.0)
    for attempt, after in zip(attempts, [*attempts[1:], None], strict=True):
        until = after.first_step if after is not None else max((x["step"] for x in attempt.lines), default=0)
        steps, by_cause = attempt.losses(until)
        kept += attempt.devices * steps
        for cause, seconds in by_cause.items():
            lost[cause] += attempt.devices * seconds
    jobs = [_Job(event) for event in events if event.get("decision") == "job"]
    allocated, queue = _allocated(jobs, attempts, events)
    for event in events:
        if event.get("decision") == "preflight":
            lost["preflight"] += event.get("seconds", 0.0) * (
                jobs[0].devices if jobs else attempts[0].devices
            )
    lost["idle"] = max(0.0, allocated - kept - sum(lost.values()))
    return Goodput(allocated, kept, lost, queue, len(attempts))


class _Job:
    def __init__(self, event: Mapping[str, Any]) -> None:
        self.began = float(event.get("started", event["time"]))
        self.waited = max(0.0, self.began - float(event.get("submitted", self.began)))
        self.devices = len(event.get("nodes", [""])) * int(event.get("tasks_per_node", 1))


def _allocated(
    jobs: Sequence[_Job], attempts: Sequence[_Attempt], events: Sequence[Mapping[str, Any]]
) -> tuple[float, float]:
    """Return the allocated device-seconds, and the seconds in the queue. Without a supervisor, only the
    time of the processes is known."""
    if not jobs:
        return sum(each.devices * (each.ended - each.began) for each in attempts), 0.0
    total = 0.0
    for job, after in zip(jobs, [*jobs[1:], None], strict=True):
        until = float("inf") if after is None else after.began
        mine = [event["time"] for event in events if job.began <= event["time"] <= until]
        total += job.devices * (max(mine, default=job.began) - job.began)
    early = [each for each in attempts if each.began < jobs[0].began]
    total += sum(each.devices * (each.ended - each.began) for each in early)
    return total, sum(job.waited for job in jobs)


def _attempts(events: Sequence[Mapping[str, Any]], lines: Sequence[dict[str, Any]]) -> list[_Attempt]:
    """Cut the history at the starts; a process that was killed ends with the last thing it wrote."""
    begins = [i for i, event in enumerate(events) if event["event"] == "start"]
    attempts = []
    for begin, end in pairwise([*begins, len(events)]):
        start, own = events[begin], events[begin + 1 : end]
        until = events[end]["time"] if end < len(events) else float("inf")
        mine = [line for line in lines if start["time"] <= line.get("time", 0) < until]
        ends = [event["time"] for event in own if event["event"] in _ENDS]
        last = ends or [
            *(event["time"] for event in own if "decision" not in event),
            *(x["time"] for x in mine),
        ]
        startup = float(start.get("startup_s", 0.0))
        attempts.append(
            _Attempt(
                began=start["time"] - startup,
                ended=max(last, default=start["time"]),
                devices=int(start.get("ranks", 1)),
                first_step=int(start.get("step", 0)),
                startup_s=startup,
                lines=mine,
                first_evaluation_s=next(
                    (e["time"] - start["time"] for e in own if _is_first_evaluation(e, start)), 0.0
                ),
                hang_s=sum(
                    e.get("waited_s", 0.0) + _ended_after(e, own) for e in own if e["event"] == "hang"
                ),
                rollbacks=[int(e["to_step"]) for e in own if e["event"] == "rollback"],
            )
        )
    return attempts


def _ended_after(hang: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds from the report of a hang until the supervisor saw the step end."""
    ends = [event["time"] for event in events if event.get("decision") == "failure"]
    return max(0.0, min(ends) - hang["time"]) if ends else 0.0


def _is_first_evaluation(event: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    return event["event"] == "evaluation" and event.get("step") == start.get("step", 0)


def goodput_table(report: Goodput) -> Table:
    """Return a table of where the allocated device time went."""
    table = Table("device time", ">share", ">", "")
    whole = max(report.allocated_s, 1e-9)
    table.row("steps that were kept", f"{report.share:.1%}", human_time(report.kept_s), "goodput")
    for cause, seconds in sorted(report.lost_s.items(), key=lambda item: -item[1]):
        if seconds > 0:
            table.row(cause, f"{seconds / whole:.1%}", human_time(seconds), CAUSES[cause])
    starts = f"{report.starts} start{'s' if report.starts > 1 else ''}"
    waited = f"; {human_time(report.queue_s)} in the queue" if report.queue_s else ""
    table.caption = f"{human_time(report.allocated_s)} allocated, {starts}{waited}"
    return table
