"""The Slurm job of a training run: its script, its layout, and when Slurm must send the signal to save."""

import json
import math
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero import slurm
from arriero.config.fields import to_toml
from arriero.config.schema import RunConfig
from arriero.config.site import Site, Variable
from arriero.config.timeline import total_steps
from arriero.errors import UserError
from arriero.events import EVENTS, START_OVER, end_of, events_since, metrics_of
from arriero.plan.layout import AXES
from arriero.plan.rules import spec_of
from arriero.train.rundir import run_directory
from arriero.units import counted, human_count, human_time

if TYPE_CHECKING:
    from arriero.plan.candidates import Plan

RUN_FILE = "resolved.toml"
PLAN = "plan.json"
# Slurm checks time limits every 30 s and may send a signal up to 60 s early
_SLACK_S = 90
_LEAST_S = 120
# assumed for the first save: fp32 master weights and two moments, at 1 GB/s per node
_BYTES_PER_PARAMETER, _BYTES_PER_S = 12, 1e9
_STEP_S = 30.0
_OWN_CLUSTER = "name the cluster file in site.toml (cluster = '8xh100', or a path)"


@dataclass(frozen=True)
class JobRequest:
    """How a run is started. `is_chained`: the next job of a chain continues it, so it is not requeued."""

    nodes: int = 1
    tasks_per_node: int | None = None
    spares: int = 0
    restarts: int = 3
    is_chained: bool = False
    plans: bool = True
    preflight: bool = True
    save_s: int | None = None


@dataclass(frozen=True)
class Job:
    """A rendered job. `reasons` say how what was not given was decided."""

    script: Path
    config: RunConfig
    plan: "Plan | None"
    signal_s: int
    reasons: tuple[tuple[str, str, str], ...]

    @property
    def folder(self) -> Path:
        return self.script.parent


def launch_folder(config: RunConfig) -> Path:
    """Return the folder of a run's scripts, logs and job ids, beside the run directory."""
    directory = run_directory(config)
    return directory.with_name(f"{directory.name}.launch").absolute()


def render(config: RunConfig, site: Site, request: JobRequest, folder: Path | None = None) -> Job:
    """Write script, variables and run file of a job; plan its layout if the run file sets no degree.

    Raises UserError if the layout is illegal or does not fit, or if the site needs an account.
    """
    site.require_account()
    tasks = request.tasks_per_node or site.slurm.gpus_per_node or 1
    config, plan, layout = _laid_out(config, site, request, request.nodes * tasks)
    step_s = plan.best.time.seconds if plan is not None else None
    signal_s, why = signal_seconds(config, request, step_s)
    if signal_s > site.time_limit_s / 2:
        raise UserError(
            f"a save needs the signal {signal_s} s before the end ({why}), and the time limit is "
            f"{site.slurm.time}",
            "give a longer --time, or --save-seconds if a save is faster",
        )
    folder = folder or launch_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_text(to_toml(config))
    if plan is None:
        # that of an earlier job would be taken for the plan of this one
        (folder / PLAN).unlink(missing_ok=True)
    else:
        (folder / PLAN).write_text(json.dumps(_prediction(plan), indent=1) + "\n")
    script = _script(config, site, request, tasks, signal_s, folder)
    signal = f"SIGTERM {signal_s} s before the time limit"
    reasons = (layout, ("signal", signal, why), ("time limit", site.slurm.time, f"site {site.name}"))
    return Job(script.write(site, folder), config, plan, signal_s, reasons)


def _script(
    config: RunConfig, site: Site, request: JobRequest, tasks: int, signal_s: int, folder: Path
) -> slurm.JobScript:
    run_file, name = shlex.quote(str(folder / RUN_FILE)), config.run.name
    words = [
        f"exec {slurm.program()} launch supervise {run_file}",
        f"--nodes {request.nodes} --tasks-per-node {tasks}",
        f"--restarts {request.restarts} --spares {request.spares}",
    ]
    if request.is_chained:
        words.append("--on-time-limit exit")
    if not request.preflight:
        words.append("--no-preflight")
    words += [f"--check {shlex.quote(command)}" for command in site.checks]
    if wrap := site.container.command():
        words.append(f"--wrap {shlex.quote(shlex.join(wrap))}")
    commands = [" \\\n    ".join(words)]
    if request.is_chained:
        check = f"if {slurm.program()} launch status {run_file} --is-finished > /dev/null; then"
        commands = [
            "# a job of the chain after the end of the run has nothing to do",
            check,
            "    exit 0",
            "fi",
            *commands,
        ]
    cpus = site.slurm.cpus_per_task
    threads = Variable(value=str(cpus or 1), reason="threads of one rank: the CPU cores of its task")
    return slurm.JobScript(
        name=name,
        title=f"Run {name} on {counted(request.nodes, 'node')} of {site.name}, {tasks} ranks per node.",
        log=folder / "job-%j.log",
        commands=commands,
        nodes=request.nodes + request.spares,
        tasks_per_node=tasks,
        gpus_per_node=site.slurm.gpus_per_node,
        # the supervisor continues without a node that fails
        options=["--no-kill", f"--signal=B:TERM@{signal_s}"],
        variables={"OMP_NUM_THREADS": threads},
    )


def _laid_out(
    config: RunConfig, site: Site, request: JobRequest, ranks: int
) -> tuple[RunConfig, "Plan | None", tuple[str, str, str]]:
    """Return the run with its degrees; the planner decides them if the run file sets none."""
    from arriero.plan.hardware import load_cluster
    from arriero.plan.resolve import resolve

    degrees = {
        axis: getattr(config.parallel, axis) for axis in AXES if axis in config.parallel.model_fields_set
    }
    given = [axis for axis, degree in degrees.items() if degree != "auto"]
    cluster, assumed = load_cluster(site.cluster) if site.cluster else None, ""
    if cluster is not None and "cluster" in site.from_memory:
        assumed = f"; assumes {cluster.name}: {_OWN_CLUSTER}"
        cluster = cluster if cluster.devices_per_node == site.slurm.gpus_per_node else None
    if cluster is None:
        return (
            config,
            None,
            ("layout", "not checked", f"the devices of {site.name} are unknown: {_OWN_CLUSTER}"),
        )
    if (given and "auto" not in degrees.values()) or not request.plans:
        layout = resolve(config, cluster.machine, ranks).layout
        why = f"{', '.join(f'parallel.{axis}' for axis in given)} in the run file" if given else "--no-plan"
        return config, None, ("layout", str(layout), f"{why}; it is legal and fits{assumed}")
    from arriero.plan.search import plan_run

    plan = plan_run(config, cluster, ranks, keep=5)
    if not plan.candidates:
        reasons = "; ".join(each.reason for each in plan.rejections[:3])
        raise UserError(
            f"no layout of this run fits {ranks} devices of {cluster.name}: {reasons}",
            f"use more nodes, or see `arriero plan --cluster {site.cluster}`",
        )
    best = plan.best
    speed = f"predicted {best.time.tokens_per_s * ranks:,.0f} tok/s, {best.time.seconds:.3g} s per step"
    chosen = config.with_values(best.choice.keys)
    return chosen, plan, ("layout", str(best.choice), f"planned: {speed}{assumed}")


def _prediction(plan: "Plan") -> dict[str, Any]:
    """Return the best candidates of a plan as data; tok/s of all devices."""
    shown = [
        {
            "choice": str(each.choice),
            "layout": {axis: getattr(each.choice.layout, axis) for axis in AXES},
            "tokens_per_s": round(each.time.tokens_per_s * plan.devices, 1),
            "step_s": each.time.seconds,
            "mfu": each.time.mfu,
            "memory_gib": round(each.memory / 2**30, 2),
            "free_gib": round(each.free / 2**30, 2),
        }
        for each in plan.candidates
    ]
    return {
        "cluster": plan.cluster.name,
        "devices": plan.devices,
        "considered": plan.considered,
        "best": shown,
    }


def signal_seconds(config: RunConfig, request: JobRequest, step_s: float | None = None) -> tuple[int, str]:
    """Return how many seconds before the time limit Slurm must send the signal, and why."""
    run_dir = run_directory(config)
    saves = [event for event in events_since(run_dir / EVENTS, START_OVER) if event["event"] == "save"]
    steps = [line["step_s"] for line in metrics_of(run_dir) if line.get("step_s")][-100:]
    step = statistics.median(steps) if steps else (step_s or _STEP_S)
    if request.save_s is not None:
        save, why = float(request.save_s), "--save-seconds"
    elif saves:
        save = max(event.get("blocked_s", 0.0) + event.get("written_s", 0.0) for event in saves[-20:])
        why = f"the slowest of the last {counted(len(saves[-20:]), 'save')}"
    else:
        parameters = spec_of(config).parameters
        save = parameters * _BYTES_PER_PARAMETER / (_BYTES_PER_S * request.nodes)
        why = f"estimated: {human_count(parameters)} parameters, 1 GB/s per node"
    seconds = max(_LEAST_S, math.ceil(1.5 * save + 3 * step + _SLACK_S))
    return seconds, f"a save takes {human_time(save)} ({why}), a step {step:.3g} s"


def is_finished(config: RunConfig) -> bool:
    """Whether the last event of training is its end, at the horizon of this config."""
    if (end := end_of(run_directory(config))) is None:
        return False
    steps = total_steps(config)
    if steps is None:
        return end.get("seconds", 0.0) >= config.train.horizon.amount
    return end.get("steps", 0) >= steps


def submit_chain(job: Job, slots: int) -> list[str]:
    """Submit a job for each time slot; each starts when the one before it has ended, however it ended."""
    jobs: list[str] = []
    for _ in range(slots):
        after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
        jobs.append(slurm.submit(job.script, *after))
    return jobs
