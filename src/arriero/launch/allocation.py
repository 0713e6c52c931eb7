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
from pathlib import Path
from typing import Any

from arriero import slurm
from arriero.errors import UserError
from arriero.events import warn

_TASK = re.compile(r"(?:srun|slurmstepd): error: (\S+): tasks? (\d+)[\d,-]*: (.+)")
_RANK = re.compile(r"rank (\d+) was killed \((\w+)\)")
_DEAD = re.compile(r"Node failure on (\S+)|DUE TO NODE (\S+) FAILURE")
_KEPT_LINES = 400
_ATTEMPTS, _RETRY_S = 10, 30.0
_USABLE = ("allocated", "mixed", "idle", "completing", "planned", "reserved")
# what may have been given to sbatch in addition to the script
_KEPT = {
    "job-name": "JobName",
    "partition": "Partition",
    "account": "Account",
    "time": "TimeLimit",
    "qos": "QOS",
    "reservation": "Reservation",
}


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

    def send(self, number: int) -> bool:
        """Send a signal to all ranks; return whether it may have arrived, else it must be sent again.

        srun does not pass SIGTERM on, it kills. A second SIGTERM would end the ranks before they have saved.
        """
        if self._job is None:
            self._process.send_signal(number)
            return True
        words = ["scancel", f"--signal={signal.Signals(number).name[3:]}"]
        sent = [slurm.command(*words, step).returncode for step in _own_steps(self._job)]
        return any(code in (0, slurm.TIMED_OUT) for code in sent)

    def kill(self) -> None:
        """Write the stacks of all ranks into their logs, then end the step."""
        self.send(signal.SIGUSR2)
        time.sleep(3.0)
        for step in _own_steps(self._job) if self._job else ():
            slurm.command("scancel", "--signal=KILL", step)
        self._process.kill()

    def output(self) -> list[str]:
        return list(self._lines)


def _own_steps(job: str) -> list[str]:
    """Return the running steps of a job that srun started, such as '123.0'."""
    asked = slurm.command("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i")
    return [step for step in asked.stdout.split() if step.rpartition(".")[2].isdigit()]


class Allocation:
    """The Slurm job that this process belongs to."""

    def __init__(self, tasks_per_node: int) -> None:
        self.job = os.environ["SLURM_JOB_ID"]
        self._tasks_per_node = tasks_per_node
        self.nodes = list(slurm.hosts(os.environ["SLURM_JOB_NODELIST"]))

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
        names = f"--nodes={','.join(nodes)}"
        shown = slurm.command("sinfo", "--noheader", "--Node", names, "--format=%N %T")
        states = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines() if " " in line)
        return {
            node: f"Slurm reports it as {state}"
            for node, state in states.items()
            if state.endswith("*") or state.rstrip("*~#!%$@^-+") not in _USABLE
        }

    def describe(self) -> dict[str, Any]:
        """Return job, nodes, and when it was submitted and started, in seconds since 1970."""
        shown = self._shown()
        # a requeued job waits from its requeue on, which Slurm stores as the time it became eligible
        since = "EligibleTime" if shown.get("Restarts", "0") not in ("", "0") else "SubmitTime"
        times = {"submitted": slurm.moment(shown.get(since)), "started": slurm.moment(shown.get("StartTime"))}
        return {
            "job": self.job,
            "nodes": self.nodes,
            "tasks_per_node": self._tasks_per_node,
            **{name: seconds for name, seconds in times.items() if seconds is not None},
        }

    def requeue(self) -> str | None:
        """Requeue the job; return the problem if it cannot be."""
        state = self._shown().get("JobState")
        if state is None:
            return "Slurm does not know the job"
        if state not in ("RUNNING", slurm.NO_ANSWER):
            return "it is being cancelled"
        return slurm.problem_of(slurm.command("scontrol", "requeue", self.job))

    def resubmit(self, exclude: Sequence[str]) -> str | None:
        """Submit the same job again, to start after this one, without these nodes; return the problem.

        Jobs that wait for the end of this one, as in a chain, wait for the new one instead.
        """
        shown = self._shown()
        for _ in range(_ATTEMPTS):
            # accounting may answer in place of the controller, without the script
            if not shown or "Command" in shown:
                break
            time.sleep(_RETRY_S)
            shown = self._shown()
        if "Command" not in shown:
            return "Slurm does not answer" if shown else "Slurm does not know the job"
        script = Path(shown["Command"])
        if not script.is_file():
            return f"the job script {script} does not exist any more"
        options = [
            f"--{option}={shown[key]}" for option, key in _KEPT.items() if slurm.is_set(shown.get(key))
        ]
        options += [f"--nodes={len(self.nodes)}", f"--dependency=afterany:{self.job}"]
        known = [shown["ExcNodeList"]] if slurm.is_set(shown.get("ExcNodeList")) else []
        options += [f"--exclude={','.join([*known, *exclude])}"] if known or exclude else []
        waiting = self._waiting()
        try:
            new = slurm.submit(script, *options, replaces=self.job)
        except UserError as error:
            return error.what
        for job in waiting:
            done = slurm.command("scontrol", "update", f"JobId={job}", f"Dependency=afterany:{new}")
            if (problem := slurm.problem_of(done)) is not None:
                warn(f"job {job} does not wait for job {new}, which replaces {self.job}: {problem}")
        return None

    def _waiting(self) -> list[str]:
        """Return the jobs of this user that start when this job has ended, however it ended."""
        asked = slurm.command("squeue", "--me", "--noheader", "--states=PENDING", "--format=%i %E")
        lines = [line.split(maxsplit=1) for line in asked.stdout.splitlines()]
        waits = re.compile(rf"afterany:{self.job}\b")
        return [words[0] for words in lines if len(words) == 2 and waits.search(words[1])]

    def _shown(self) -> dict[str, str]:
        return slurm.job_facts(self.job)


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
