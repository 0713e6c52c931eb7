"""The nodes a supervisor starts ranks on: a Slurm allocation, or this machine."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from arriero.errors import UserError

_TASK = re.compile(r"(?:srun|slurmstepd): error: (\S+): tasks? (\d+)[\d,-]*: (.+)")
_RANK = re.compile(r"rank (\d+) was killed \((\w+)\)")
_DEAD = re.compile(r"Node failure on (\S+)|DUE TO NODE (\S+) FAILURE")
_KEPT_LINES = 400
_USABLE = ("allocated", "mixed", "idle", "completing", "planned", "reserved")


@dataclass(frozen=True)
class StepResult:
    """How a step ended, with the last lines of its standard error."""

    code: int
    output: Sequence[str]

    @property
    def dead_node(self) -> str | None:
        found = [match for line in self.output if (match := _DEAD.search(line))]
        return next((name.rstrip(",") for each in found for name in each.groups() if name), None)

    @property
    def killed_task(self) -> tuple[int, str, str] | None:
        """Return rank, node and cause of the first task that a signal ended; srun reports it first."""
        for line in self.output:
            if match := _TASK.search(line):
                exited = "Exited with exit code" in match[3]
                return None if exited else (int(match[2]), match[1], match[3])
            if match := _RANK.search(line):
                return int(match[1]), os.uname().nodename, f"killed by {match[2]}"
        return None


class Step:
    """A running job step; its standard error is passed on and its last lines are kept."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], job: str | None) -> None:
        self._job, self._lines = job, deque[str](maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip("\n"))
            with suppress(OSError):
                sys.stderr.write(line)
                sys.stderr.flush()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if the step still runs after so many seconds."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5.0)
        return code if code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Send a signal to all ranks. srun does not pass SIGTERM on, it kills."""
        if self._job is None:
            self._process.send_signal(number)
        for step in _own_steps(self._job) if self._job else ():
            _run("scancel", f"--signal={signal.Signals(number).name[3:]}", step)

    def kill(self) -> None:
        """Write the stacks of all ranks into their logs, then end the step."""
        self.send(signal.SIGUSR2)
        time.sleep(3.0)
        for step in _own_steps(self._job) if self._job else ():
            _run("scancel", "--signal=KILL", step)
        self._process.kill()

    def output(self) -> list[str]:
        return list(self._lines)


def _own_steps(job: str) -> list[str]:
    """Return the running steps of a job that srun started, such as '123.0'."""
    shown = _run("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i").stdout.split()
    return [step for step in shown if step.rpartition(".")[2].isdigit()]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command; a controller that does not answer is a failed command, not an exception."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {error.timeout:.0f} s")


class Allocation:
    """The Slurm job that this process belongs to."""

    def __init__(self, tasks_per_node: int) -> None:
        self.job = os.environ["SLURM_JOB_ID"]
        self._tasks_per_node = tasks_per_node
        shown = _run("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])
        if shown.returncode:
            raise UserError(
                f"`scontrol show hostnames` failed: {shown.stderr.strip()}", "check the Slurm client"
            )
        self.nodes = shown.stdout.split()

    def start(self, command: Sequence[str], nodes: int, ranks: int, chosen: Sequence[str]) -> Step:
        """Start the ranks as a step on the chosen nodes; it ends when one rank fails."""
        left_out = [node for node in self.nodes if node not in chosen]
        options = [f"--nodes={nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={self._tasks_per_node}"]
        options += [f"--exclude={','.join(left_out)}"] if left_out else []
        # since Slurm 22.05 srun does not take this from sbatch by itself
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        environment = {**os.environ, **({"SRUN_CPUS_PER_TASK": cpus} if cpus else {})}
        fixed = ["--kill-on-bad-exit=1", "--no-kill", "--wait=60"]
        return Step(["srun", *fixed, *options, *command], environment, self.job)

    def unavailable(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return the nodes that Slurm reports as down, drained or not responding."""
        if not nodes:
            return {}
        shown = _run("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T")
        states = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines() if " " in line)
        return {
            node: f"Slurm reports it as {state}"
            for node, state in states.items()
            if state.endswith("*") or state.rstrip("*~#!%$@^-+") not in _USABLE
        }

    def describe(self) -> dict[str, Any]:
        """Return job, nodes, and when it was submitted and started, in seconds since 1970."""
        shown = self._shown()
        times = {"submitted": shown.get("SubmitTime", ""), "started": shown.get("StartTime", "")}
        if int(shown.get("Restarts", 0) or 0):
            # a requeued job waits from its requeue on, which Slurm stores as the time it became eligible
            times["submitted"] = shown.get("EligibleTime", "")
        return {
            "job": self.job,
            "nodes": self.nodes,
            "tasks_per_node": self._tasks_per_node,
            **{name: seconds for name, text in times.items() if (seconds := _seconds(text)) is not None},
        }

    def requeue(self) -> str | None:
        """Requeue the job; return the problem if it cannot be."""
        if self._shown().get("JobState") != "RUNNING":
            return "it is being cancelled"
        done = _run("scontrol", "requeue", self.job)
        return done.stderr.strip() or f"scontrol ended with {done.returncode}" if done.returncode else None

    def resubmit(self, exclude: Sequence[str]) -> str | None:
        """Submit the same job again, to start after this one, without these nodes."""
        shown = self._shown()
        script = shown.get("Command", "")
        if not Path(script).is_file():
            return f"the job script {script or '?'} does not exist any more"
        kept = {"job-name": "JobName", "partition": "Partition", "account": "Account", "time": "TimeLimit"}
        options = [f"--{option}={shown[key]}" for option, key in kept.items() if _is_set(shown.get(key))]
        options += [f"--nodes={len(self.nodes)}", f"--dependency=afterany:{self.job}"]
        known = [node for node in (shown.get("ExcNodeList") or "").split(",") if _is_set(node)]
        options += [f"--exclude={','.join([*known, *exclude])}"] if known or exclude else []
        done = _run("sbatch", "--parsable", *options, script)
        return done.stderr.strip() or "sbatch failed" if done.returncode else None

    def _shown(self) -> dict[str, str]:
        shown = _run("scontrol", "show", "job", "--oneliner", self.job).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def _is_set(value: str | None) -> bool:
    return bool(value) and value not in ("(null)", "None")


def _seconds(text: str) -> float | None:
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return None


class Local:
    """This machine, without a scheduler: one node, whose ranks `arriero train --nproc` starts."""

    def __init__(self, tasks_per_node: int) -> None:
        self.nodes = [os.uname().nodename]
        self._tasks_per_node, self._began = tasks_per_node, time.time()

    def start(self, command: Sequence[str], nodes: int, ranks: int, chosen: Sequence[str]) -> Step:
        return Step([*command, "--nproc", str(ranks)], dict(os.environ), None)

    def unavailable(self, nodes: Sequence[str]) -> dict[str, str]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"nodes": self.nodes, "tasks_per_node": self._tasks_per_node, "started": self._began}

    def requeue(self) -> str | None:
        return "there is no scheduler; the same command continues the run"

    def resubmit(self, exclude: Sequence[str]) -> str | None:
        return "there is no scheduler to resubmit to"
