"""Keep a run going inside its allocation: pre-flight, restarts, spare nodes, the time limit.

The batch script of a job runs this on its first node. It starts the ranks as a job step, and decides what to
do when the step ends. Every decision is an event with its reason.
"""

import enum
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from arriero.config.options import Sets
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline
from arriero.errors import UserError
from arriero.events import EVENTS, STOPPED, EventLog, events_since, say
from arriero.launch.allocation import Allocation, Local, Step, StepResult
from arriero.launch.failures import USER_ERROR, Failures, Heartbeat, Nodes
from arriero.plan.layout import AXES
from arriero.report.goodput import goodput, goodput_table
from arriero.ui import make_console
from arriero.units import counted

SUPERVISE = "supervise"
PREFLIGHT = "preflight"


class OnTimeLimit(enum.StrEnum):
    requeue = "requeue"
    exit = "exit"


@dataclass(frozen=True)
class Size:
    """Ranks of a step, and the --set options that make the run fit them."""

    nodes: int
    ranks: int
    sets: Sequence[str] = ()


def smaller_size(config: RunConfig, wanted: Size, usable: int, tasks_per_node: int) -> Size | None:
    """Return the size with as many replicas of the model as fit on the usable nodes; None if none fits.

    Only parallel.dp_replicate changes. The global batch is kept: each rank accumulates more micro-batches.
    Degrees that are "auto" are not known here, and None is returned.
    """
    degrees = {axis: getattr(config.parallel, axis) for axis in AXES}
    if "auto" in degrees.values():
        return None
    rest = wanted.ranks // prod(degree for degree in degrees.values() if degree != -1)
    degrees = {name: rest if degree == -1 else degree for name, degree in degrees.items()}
    per_replica = wanted.ranks // degrees["dp_replicate"]
    sequences = min(phase.sequences for phase in Timeline.of(config).phases)
    most = min(usable * tasks_per_node // per_replica, degrees["dp_replicate"] - 1)
    for replicas in range(most, 0, -1):
        if sequences % (replicas * degrees["dp_shard"]) == 0:
            ranks = replicas * per_replica
            return Size(-(-ranks // tasks_per_node), ranks, [f"parallel.dp_replicate={replicas}"])
    return None


@dataclass
class Supervisor:
    """Runs the steps of one job. `preflight` returns the nodes that fail with their reasons."""

    config: RunConfig
    run_dir: Path
    allocation: Allocation | Local
    command: Sequence[str]
    wanted: Size
    tasks_per_node: int
    restarts: int
    on_time_limit: str
    preflight: Callable[[], dict[str, str]]
    say: Callable[[str], None]
    _stop: int = 0
    _forward: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Supervise until the run ends, is stopped, or cannot continue; return the exit code."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._events = EventLog(self.run_dir / EVENTS)
        handlers = {n: signal.signal(n, self._hear) for n in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
        try:
            return self._supervise()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._decide("end of job", "", **self.allocation.describe())
            self._events.close()

    def _supervise(self) -> int:
        nodes = Nodes(self.allocation.nodes, self.wanted.nodes)
        self._decide("job", "", **self.allocation.describe(), ranks=self.wanted.ranks)
        begin = time.monotonic()
        for node, reason in self.preflight().items():
            self._exclude(nodes, node, f"pre-flight: {reason}")
        seconds = round(time.monotonic() - begin, 3)
        self._decide("preflight", f"{len(nodes.bad)} of {len(nodes.all)} nodes fail", seconds=seconds)
        if len(nodes.usable) < self.wanted.nodes:
            return self._resubmit(nodes, "too few nodes passed the pre-flight check")
        attempt, failures = 0, Failures(self.run_dir)
        while not self._stop:
            for node, reason in self.allocation.unavailable(nodes.usable).items():
                self._exclude(nodes, node, reason)
            size = self._size(nodes)
            if size is None:
                return self._resubmit(nodes, "too few nodes are left, and fewer replicas do not fit")
            if attempt:
                self._decide("restart", f"{attempt} of {self.restarts}, from the newest valid checkpoint")
            begin = time.time()
            failures.clear()
            result = self._run_step(nodes, size)
            if (code := self._ended(result, begin)) is not None:
                return code
            failure = failures.of(result, begin)
            self._decide("failure", failure.reason, node=failure.node, code=result.code, log=failure.log)
            if not failure.can_restart:
                return USER_ERROR
            if attempt == self.restarts:
                self._decide("give up", f"{attempt} restarts were made, as many as --restarts allows")
                return 1
            attempt += 1
            if (bad := nodes.charge(failure)) is not None:
                self._exclude(nodes, bad, nodes.bad[bad])
        return self._stopped("a signal came before the step started")

    def _exclude(self, nodes: Nodes, node: str, reason: str) -> None:
        nodes.bad[node] = reason
        self._decide("exclude", reason, node=node)

    def _size(self, nodes: Nodes) -> Size | None:
        if len(nodes.usable) >= self.wanted.nodes:
            return self.wanted
        size = smaller_size(self.config, self.wanted, len(nodes.usable), self.tasks_per_node)
        if size is not None:
            why = f"{len(nodes.usable)} of {self.wanted.nodes} nodes are usable and no spare is left"
            kept = "the global batch is kept by gradient accumulation"
            self._decide("shrink", f"{why}; {kept}", ranks=size.ranks, sets=list(size.sets))
        return size

    def _run_step(self, nodes: Nodes, size: Size) -> StepResult:
        chosen = nodes.usable[: size.nodes]
        sets = [word for each in size.sets for word in ("--set", each)]
        self._decide("start", f"{size.ranks} ranks", nodes=chosen, idle=len(nodes.all) - len(chosen))
        step = self.allocation.start([*self.command, *sets], size.nodes, size.ranks, chosen)
        heartbeat = Heartbeat(self.run_dir)
        while (code := step.wait(1.0)) is None:
            self._forward_signals(step)
            if (silence := heartbeat.silence()) is not None:
                self._decide("kill", f"no rank has reported for {silence:.0f} s: the step hangs")
                step.kill()
        return StepResult(code, step.output())

    def _forward_signals(self, step: Step) -> None:
        """Send the signals of this process on; one that Slurm did not take is sent again a second later."""
        while self._forward:
            if not step.send(number := self._forward[0]):
                return
            self._forward.pop(0)
            self._decide("forward", f"{signal.Signals(number).name} to the ranks")

    def _hear(self, number: int, _: object) -> None:
        saves_only = number == signal.SIGUSR1 and self.config.checkpoint.on_usr1 == "continue"
        self._stop = self._stop if saves_only else self._stop or number
        self._forward.append(number)

    def _ended(self, result: StepResult, begin: float) -> int | None:
        """Return the exit code of the job if the step ended as it should, else None."""
        marker = self._marker(begin)
        if marker is not None and marker["saved"]:
            return self._stopped(
                f"{marker['signal']} stopped the run, which is saved at step {marker['step']}"
            )
        if self._stop and result.code != 0:
            return self._stopped("stopped by a signal before anything new could be saved")
        if result.code == 0:
            self._decide("finish", "the run is finished")
            return 0
        return None

    def _stopped(self, reason: str) -> int:
        """Continue after the time limit: requeue the job, unless a chain of jobs continues it."""
        self._decide("stop", reason)
        if self.on_time_limit == "requeue":
            problem = self.allocation.requeue()
            if problem is None:
                self._decide("requeue", "the job continues in a new time slot")
            else:
                self._decide("exit", f"the job is not requeued: {problem}")
        return 0

    def _resubmit(self, nodes: Nodes, reason: str) -> int:
        """Submit the job again without its bad nodes: a requeued job would get the same ones.

        Not if all of several nodes are bad, because others would fail for the same reason, and not more often
        than --restarts without a save in between.
        """
        bad = sorted(nodes.bad)
        before = [e for e in events_since(self.run_dir / EVENTS, "save") if e.get("decision") == "resubmit"]
        if len(bad) == len(nodes.all) > 1:
            problem = f"all {len(bad)} nodes fail, {bad[0]} because: {nodes.bad[bad[0]]}"
        elif len(before) >= max(1, self.restarts):
            problem = f"the job was submitted again {len(before)} times without a save in between"
        else:
            problem = self.allocation.resubmit(bad)
        if problem is not None:
            self._decide("give up", f"{reason}; {problem}", excluded=bad)
            return 1
        self._decide("resubmit", reason, excluded=bad)
        return 0

    def _marker(self, begin: float) -> dict[str, Any] | None:
        try:
            marker = json.loads((self.run_dir / STOPPED).read_bytes())
        except (OSError, ValueError):
            return None
        return marker if marker.get("time", 0) >= begin else None

    def _decide(self, decision: str, reason: str, **fields: Any) -> None:
        kept = {name: value for name, value in fields.items() if value not in (None, (), [])}
        self._events.write(SUPERVISE, decision=decision, reason=reason, **kept)
        where = f" ({kept['node']})" if "node" in kept else ""
        self.say(f"supervise: {decision}{where}{f': {reason}' if reason else ''}")
        for line in kept.get("log", ()):
            self.say(f"  {line}")


def supervise(
    run_file: Annotated[Path, typer.Argument(help="The run file.", show_default=False)],
    nodes: Annotated[int, typer.Option(help="Nodes that the run needs.", min=1)] = 1,
    tasks_per_node: Annotated[int, typer.Option(help="Ranks per node.", min=1)] = 1,
    restarts: Annotated[int, typer.Option(help="Restarts after a failure, per job.", min=0)] = 3,
    spares: Annotated[int, typer.Option(help="Spare nodes, which replace failing ones.", min=0)] = 0,
    on_time_limit: Annotated[
        OnTimeLimit, typer.Option(help="After a signal and a save: requeue the job, or exit (in a chain).")
    ] = OnTimeLimit.requeue,
    wrap: Annotated[
        str, typer.Option(help="Prefix of the command of each rank: 'apptainer exec --nv image.sif'.")
    ] = "",
    preflight: Annotated[bool, typer.Option(help="Check every node first (arriero doctor).")] = True,
    checks: Annotated[
        list[str],
        typer.Option("--check", metavar="COMMAND", help="A shell command that must exit with 0. Repeatable."),
    ] = [],
    sets: Sets = [],
) -> None:
    """Run a training job inside its allocation: check the nodes, start the ranks, restart after failures.

    A job script runs it on the first node; `exec` lets Slurm's signals reach it. It starts the ranks with
    srun and restarts them from the newest valid checkpoint. A node whose ranks fail twice is left out: a
    spare takes its place, or the run continues with fewer replicas, or the job is submitted again without the
    node. SIGTERM saves and requeues the job; SIGUSR1 saves and continues, or acts like SIGTERM
    (checkpoint.on_usr1). Without Slurm it starts the ranks on this machine. Decisions are events in
    RUN/events.jsonl.

    Example: arriero launch supervise run.toml --nodes 16 --tasks-per-node 8 --restarts 10 --spares 1
    """
    from arriero.config.load import load_run
    from arriero.model.presets import expand
    from arriero.train.rundir import run_directory

    config = load_run(run_file, sets, expand).config
    in_slurm = "SLURM_JOB_ID" in os.environ
    allocation = Allocation(tasks_per_node) if in_slurm else Local(tasks_per_node)
    if len(allocation.nodes) < nodes:
        what = (
            f"the allocation has {counted(len(allocation.nodes), 'node')}"
            if in_slurm
            else "there is no Slurm job"
        )
        raise UserError(
            f"{what}, and --nodes is {nodes}", f"request {nodes + spares} nodes with sbatch --nodes"
        )
    program = [*shlex.split(wrap), "arriero"] if wrap else [sys.executable, "-m", "arriero"]
    given = [word for each in sets for word in ("--set", each)]
    run_dir = run_directory(config)
    job = Supervisor(
        config=config,
        run_dir=run_dir,
        allocation=allocation,
        command=[*program, "train", str(run_file), *given],
        wanted=Size(nodes, nodes * tasks_per_node),
        tasks_per_node=tasks_per_node,
        restarts=restarts,
        on_time_limit=on_time_limit.value,
        preflight=partial(failing_nodes, run_dir, checks, wrap) if preflight and in_slurm else dict,
        say=print_line,
    )
    code = job.run()
    report = goodput(run_dir)
    if report is not None:
        make_console().print(goodput_table(report))
    raise typer.Exit(code)


def print_line(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')} {text}")


def failing_nodes(run_dir: Path, checks: Sequence[str] = (), wrap: str = "") -> dict[str, str]:
    """Check all nodes of the allocation with `arriero doctor`; return those that fail, with the reason."""
    folder = run_dir / PREFLIGHT / os.environ["SLURM_JOB_ID"]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "arriero", "doctor", "--allocation", "--out", str(folder)]
    command += ["--dir", str(run_dir.parent), *(["--wrap", wrap] if wrap else [])]
    command += [word for check in checks for word in ("--check", check)]
    code = subprocess.run(command, check=False).returncode
    if code not in (0, 1):
        print_line(f"supervise: the pre-flight check could not run (code {code}): continuing without it")
        return {}
    path = folder / "failing_nodes.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    found = (line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#"))
    return {name: " ".join(reason) or "failed" for name, *reason in found}
