"""The state of a run on Slurm: its jobs, its progress, its checkpoints."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arriero import slurm
from arriero.checkpoint.directory import find_checkpoints
from arriero.config.schema import RunConfig
from arriero.config.timeline import total_steps
from arriero.events import EVENTS, START_OVER, events_since, metrics_of
from arriero.launch.jobs import is_finished, launch_folder
from arriero.report.goodput import goodput
from arriero.train.rundir import run_directory
from arriero.ui import Console, Table, facts
from arriero.units import counted, human_count, human_time

_RECENT = 20
_SHOWN = 8
_FAILURES = ("failure", "exclude", "shrink", "kill", "resubmit", "give up")
_RUNNING = ("RUNNING", "COMPLETING")


@dataclass(frozen=True)
class Status:
    """What is known about a run. `jobs` are those submitted from its folder, the newest last; `failures` are
    the last decisions of the supervisor after one."""

    run_dir: Path
    finished: bool
    jobs: list[dict[str, Any]]
    last: dict[str, Any]
    steps: int | None
    tokens_per_s: float | None
    ends_in_s: float | None
    checkpoints: list[int]
    restarts: int
    goodput: dict[str, Any] | None
    last_event: dict[str, Any]
    failures: list[dict[str, Any]]

    def describe(self) -> dict[str, Any]:
        """Return plain data for --json."""
        return {**vars(self), "run_dir": str(self.run_dir)}


def read_status(config: RunConfig) -> Status:
    """Collect what the run directory, the launch folder and Slurm say."""
    run_dir, steps = run_directory(config), total_steps(config)
    lines = metrics_of(run_dir)
    last = lines[-1] if lines else {}
    rates = sorted(line["tokens_per_s"] for line in lines[-_RECENT:] if line.get("tokens_per_s"))
    rate = rates[len(rates) // 2] if rates else None
    history = events_since(run_dir / EVENTS, START_OVER)
    finished, stored = is_finished(config), find_checkpoints(run_dir, report_unreadable=True)
    ends_in = None
    if rate and steps and last.get("tokens") and not finished:
        per_step = last["tokens"] / last["step"]
        ends_in = max(0.0, (steps - last["step"]) * per_step / rate)
    return Status(
        run_dir=run_dir,
        finished=finished,
        jobs=_jobs(launch_folder(config)),
        last={key: last[key] for key in ("step", "tokens", "loss", "tokens_per_s") if key in last},
        steps=steps,
        tokens_per_s=rate,
        ends_in_s=ends_in,
        checkpoints=[saved.step for saved in stored if saved.problem is None],
        restarts=max(0, sum(event["event"] == "start" for event in history) - 1),
        goodput=report.describe() if (report := goodput(run_dir)) is not None else None,
        last_event=history[-1] if history else {},
        failures=[e for e in history if e.get("decision") in _FAILURES][-_SHOWN:],
    )


def _jobs(folder: Path) -> list[dict[str, Any]]:
    """Return the submitted jobs with their state; 'UNKNOWN' for those that Slurm has forgotten."""
    records = slurm.submitted(folder)[-_RECENT:]
    found = []
    for record in records:
        said = slurm.job_facts(record["job"])
        shown = {
            "job": record["job"],
            "state": said.get("JobState", slurm.UNKNOWN),
            "reason": said.get("Reason"),
            "nodes": said.get("NodeList"),
            "run_time": said.get("RunTime"),
            "time_limit": said.get("TimeLimit"),
            "start": said.get("StartTime"),
            "requeued": int(said["Restarts"]) if said.get("Restarts", "").isdigit() else None,
            "log": str(folder / f"job-{record['job']}.log"),
        }
        found.append({key: value for key, value in shown.items() if value not in (None, "(null)", "None")})
    return found


def show_status(console: Console, status: Status) -> None:
    """Print a panel of facts and a table of the jobs."""
    rows: list[tuple[str, ...]] = [("run", str(status.run_dir))]
    step = status.last.get("step", 0)
    of = f" of {status.steps:,}" if status.steps else ""
    state = "finished" if status.finished else ("not started" if not status.last else "in progress")
    rows.append(("state", state, _event_text(status.last_event)))
    if status.last:
        share = f"{step / status.steps:.1%}" if status.steps else ""
        rows.append(
            ("step", f"{step:,}{of}", f"{human_count(status.last.get('tokens', 0))} tokens {share}".strip())
        )
        loss = status.last.get("loss")
        rows.append(("loss", "not finite" if loss is None else f"{loss:.4f}"))
    if status.tokens_per_s:
        rows.append(
            ("speed", f"{human_count(status.tokens_per_s)} tok/s", f"median of the last {_RECENT} lines")
        )
    if status.ends_in_s is not None:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + status.ends_in_s))
        rows.append(("predicted end", at, f"{human_time(status.ends_in_s)} of training at this speed"))
    newest = f"newest step {status.checkpoints[-1]:,}" if status.checkpoints else ""
    rows.append(("checkpoints", f"{len(status.checkpoints)}", newest))
    rows.append(("restarts", f"{status.restarts}"))
    if status.goodput is not None:
        lost = sorted(status.goodput["lost_device_s"].items(), key=lambda item: -item[1])[:3]
        total = status.goodput["allocated_device_s"] or 1.0
        causes = ", ".join(f"{cause} {seconds / total:.1%}" for cause, seconds in lost if seconds)
        rows.append(("goodput", f"{status.goodput['goodput']:.1%}", f"lost: {causes}" if causes else ""))
    console.print(facts(rows))
    if status.failures:
        table = Table("when", "decision", "node", "reason", no_wrap=("when", "decision"))
        for each in status.failures:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["time"]))
            table.row(when, each["decision"], each.get("node", ""), each.get("reason", ""))
        console.print(table)
    if not status.jobs:
        console.plain("no job was submitted with `arriero launch submit` or `chain`")
        return
    table = Table("job", "state", "nodes", "run time", "limit", "remark", no_wrap=("job", "state"))
    for job in status.jobs:
        requeued = f"requeued {counted(job['requeued'], 'time')}" if job.get("requeued") else ""
        waits = job.get("reason", "") if job["state"] == "PENDING" else ""
        keys = ("job", "state", "nodes", "run_time", "time_limit")
        table.row(*(job.get(key, "") for key in keys), waits or requeued)
    console.print(table)
    running = [job for job in status.jobs if job["state"] in _RUNNING] or status.jobs[-1:]
    console.plain(f"log: {running[-1]['log']}")


def _event_text(event: dict[str, Any]) -> str:
    if not event:
        return ""
    ago = human_time(max(0.0, time.time() - event.get("time", time.time())))
    return f"last event: {event.get('decision') or event['event']}, {ago} ago"
