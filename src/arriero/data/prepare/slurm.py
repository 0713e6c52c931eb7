"""A prepare spread over a Slurm cluster: an array of the same command, then once more to finish."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arriero.errors import UserError


@dataclass(frozen=True)
class Cluster:
    """What the jobs ask of Slurm."""

    partition: str | None = None
    account: str | None = None
    time: str = "04:00:00"
    tasks: int = 16
    cpus: int = 1


def array_script(command: Sequence[str], cluster: Cluster, tasks: int, logs: Path) -> str:
    """Task i of n makes every n-th shard; a task that is run again skips what is finished."""
    part = [*command, "--workers", str(cluster.cpus), "--part"]
    head = _head("arriero-prepare", cluster, logs / "part-%a.log", [f"--array=0-{tasks - 1}"])
    return f'{head}\nexec {shlex.join(part)} "$SLURM_ARRAY_TASK_ID/{tasks}"\n'


def finish_script(command: Sequence[str], cluster: Cluster, logs: Path) -> str:
    """The plain command: it makes what a failed task left out and writes the manifest."""
    head = _head("arriero-finish", cluster, logs / "finish.log", [])
    return f"{head}\nexec {shlex.join([*command, '--workers', str(cluster.cpus)])}\n"


def submit(array: Path, finish: Path) -> tuple[str, str]:
    """The ids of the array and of the job that follows it."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on this machine", "run on a login node, or without --slurm")
    first = _sbatch([str(array)])
    return first, _sbatch([f"--dependency=afterany:{first}", str(finish)])


def _head(name: str, cluster: Cluster, log: Path, more: Sequence[str]) -> str:
    options = [
        f"--job-name={name}",
        *([f"--partition={cluster.partition}"] if cluster.partition else []),
        *([f"--account={cluster.account}"] if cluster.account else []),
        f"--time={cluster.time}",
        "--ntasks=1",
        f"--cpus-per-task={cluster.cpus}",
        f"--output={log}",
        "--open-mode=append",
        "--requeue",
        *more,
    ]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options)])


def _sbatch(arguments: Sequence[str]) -> str:
    done = subprocess.run(["sbatch", "--parsable", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"Slurm refused the job: {done.stderr.strip()}", "check --partition, --account and --time"
        )
    return done.stdout.strip().partition(";")[0]
