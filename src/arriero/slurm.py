"""Slurm jobs: render a script for a site, submit it, ask for its state."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from arriero.config.site import Site, Variable
from arriero.errors import UserError

ENVIRONMENT = "environment.sh"
JOBS = "jobs.jsonl"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")


@dataclass(frozen=True)
class JobScript:
    """A script of a folder: `options` are those of sbatch beyond the site's, `commands` the shell lines."""

    name: str
    title: str
    log: Path
    commands: Sequence[str]
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    options: Sequence[str] = ()
    variables: Mapping[str, Variable] = field(default_factory=dict)

    def render(self, site: Site, folder: Path) -> str:
        """Return the script, which reads the variables from a file in `folder`."""
        import jinja2

        templates = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        templates.filters["quoted"] = lambda value: shlex.quote(str(value))
        text = files("arriero.launch").joinpath("job.sh.j2").read_text(encoding="utf-8")
        rendered = templates.from_string(text).render(
            title=self.title,
            options=[*self._options(site), *self.options],
            modules=site.software.modules,
            setup=site.software.setup,
            limits=_limits(site),
            bin=_bin_folder(),
            environment=folder / ENVIRONMENT,
            commands=self.commands,
        )
        # empty parts leave no gaps
        while "\n\n\n" in rendered:
            rendered = rendered.replace("\n\n\n", "\n\n")
        return rendered.rstrip("\n") + "\n"

    def write(self, site: Site, folder: Path, file_name: str = "job.sbatch") -> Path:
        """Write the script and its variables."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ENVIRONMENT).write_text(environment_file({**self.variables, **site.variables()}))
        (folder / file_name).write_text(self.render(site, folder))
        return folder / file_name

    def _options(self, site: Site) -> list[str]:
        slurm = site.slurm
        wanted = {
            "job-name": self.name,
            "account": site.account,
            "partition": slurm.partition,
            "qos": slurm.qos,
            "time": slurm.time,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "gpus-per-node": self.gpus_per_node or None,
            "cpus-per-task": self.cpus_per_task or slurm.cpus_per_task,
            "output": self.log,
            "open-mode": "append",
            "chdir": Path.cwd(),
        }
        lines = [f"--{name}={_quoted(value)}" for name, value in wanted.items() if value is not None]
        return [*lines, "--requeue", *slurm.options]


def _quoted(value: object) -> str:
    text = str(value)
    return '"' + text.replace('"', '\\"') + '"' if any(c in text for c in " \t#'\"") else text


def _limits(site: Site) -> list[str]:
    limits = {"-n": site.limits.nofile, "-l": site.limits.memlock}
    note = '2> /dev/null || ulimit {0} "$(ulimit -H {0})"  # as high as the system allows'
    return [f"ulimit {flag} {value} {note.format(flag)}" for flag, value in limits.items() if value]


def _bin_folder() -> Path | None:
    """Return the folder of the virtual or conda environment that runs this, for the PATH of the job."""
    folder = Path(sys.executable).parent
    is_own = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ
    return folder if is_own else None


def program() -> str:
    """Return the shell words that start Arriero in a job."""
    folder = _bin_folder()
    found = shutil.which("arriero", path=str(folder) if folder else None)
    return "arriero" if found else f"{shlex.quote(sys.executable)} -m arriero"


def environment_file(variables: Mapping[str, Variable]) -> str:
    """Return a shell file that sets the variables, each below its reason and source."""
    lines = [
        "# shellcheck shell=bash",
        "# Each variable is below its reason and, in brackets, its source.",
        "",
    ]
    for name, each in variables.items():
        source = f" [{each.source}]" if each.source else ""
        value = str(each.value)
        for character in '\\"`':
            value = value.replace(character, f"\\{character}")
        lines += [f"# {each.reason}{source}", f'export {name}="{value}"']
    return "\n".join([*lines, ""])


def submit(script: Path, *options: str) -> str:
    """Submit a script, record the job beside it, and return its id."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on this machine", "run this on a login node of the cluster")
    # options of a surrounding job must not become those of the new one
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}
    done = subprocess.run(
        ["sbatch", "--parsable", *options, str(script)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise UserError(
            f"Slurm rejected the job: {done.stderr.strip()}",
            f"check the #SBATCH lines of {script}, and [slurm] in site.toml",
        )
    job = done.stdout.strip().partition(";")[0]
    record = {"job": job, "time": round(time.time(), 3), "script": str(script), "options": list(options)}
    with (script.parent / JOBS).open("a") as file:
        file.write(json.dumps(record) + "\n")
    return job


def submitted(folder: Path) -> list[dict[str, Any]]:
    """Return the jobs that were submitted from a folder, the oldest first."""
    path = folder / JOBS
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def job_facts(jobs: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return what Slurm still knows about these jobs: fields of `scontrol show job`, or of sacct."""
    found = {}
    for job in jobs if shutil.which("scontrol") else ():
        shown = _output("scontrol", "show", "job", "-o", job)
        # a job that was requeued or is an array has several lines; the last is the newest
        for line in shown.splitlines():
            facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if "JobState" in facts:
                found[job] = facts
        if job not in found and (said := _from_accounting(job)):
            found[job] = said
    return found


def _from_accounting(job: str) -> dict[str, str] | None:
    """Ask slurmdbd about a job that slurmctld has forgotten; many clusters have it."""
    fields = ("JobState", "StartTime", "EndTime", "NodeList", "ExitCode", "Restarts")
    columns = "State,Start,End,NodeList,ExitCode,Restarts"
    shown = _output("sacct", "-n", "-X", "-P", "-j", job, "-o", columns) if shutil.which("sacct") else ""
    lines = [line.split("|") for line in shown.splitlines() if line.count("|") == len(fields) - 1]
    return (
        dict(zip(fields, lines[-1], strict=True)) | {"JobState": lines[-1][0].split()[0]} if lines else None
    )


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except subprocess.TimeoutExpired:
        return ""


def wait_for(job: str, poll_s: float = 5.0) -> str:
    """Wait until a job has ended and return its last state; 'UNKNOWN' if Slurm has forgotten it."""
    while True:
        state = job_facts([job]).get(job, {}).get("JobState", "UNKNOWN")
        if state in (*ENDED, "UNKNOWN"):
            return state
        time.sleep(poll_s)
