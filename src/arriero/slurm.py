"""Slurm: the job script of a site, every call of a Slurm command, and lists of nodes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from arriero.config.site import Site, Variable
from arriero.errors import UserError
from arriero.events import read_records, warn

ENVIRONMENT = "environment.sh"
JOBS = "jobs.jsonl"
ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE"),
    *("BOOT_FAIL", "REVOKED", "SPECIAL_EXIT"),
)
# states that are not Slurm's: it has forgotten the job, or the controller does not answer
UNKNOWN, NO_ANSWER = "UNKNOWN", "NO ANSWER"
_ANSWER_S = 60
# exit code of a command that did not answer, as of timeout(1)
TIMED_OUT = 124
_LONGEST_POLL_S = 60.0
_FIELD = re.compile(r"([A-Za-z]\S*?)=(.*?)(?=\s+[A-Za-z][\w:/-]*=|\s*$)")
_PIECE = re.compile(r"([^\[\], ]+)|\[([^\[\]]+)\]")
_ITEM = re.compile(r"(?:[^\[\], ]|\[[^\[\]]+\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


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
        text = files("arriero").joinpath("job.sh.j2").read_text(encoding="utf-8")
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


def command(*words: str, seconds: float = _ANSWER_S) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm; one that is missing or does not answer has failed, and stderr says why."""
    # options of a surrounding job must not become those of a new one
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            words, TIMED_OUT, "", f"{words[0]}: no answer within {seconds:.0f} s"
        )
    except OSError as error:
        return subprocess.CompletedProcess(words, 127, "", f"{words[0]} cannot be started ({error.strerror})")


def problem_of(done: subprocess.CompletedProcess[str]) -> str | None:
    """Return what a command of Slurm says went wrong; None if it succeeded."""
    return (
        (done.stderr.strip() or f"{done.args[0]} ended with {done.returncode}") if done.returncode else None
    )


def submit(script: Path, *options: str, **about: Any) -> str:
    """Submit a script, record the job and `about` beside it, and return its id."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on this machine", "run this on a login node of the cluster")
    done = command("sbatch", "--parsable", *options, str(script), seconds=2 * _ANSWER_S)
    if (problem := problem_of(done)) is not None:
        raise UserError(
            f"Slurm rejected the job: {problem}",
            f"check the #SBATCH lines of {script}, and [slurm] in site.toml",
        )
    job = done.stdout.strip().partition(";")[0]
    record = {
        "job": job,
        "time": round(time.time(), 3),
        "script": str(script),
        "options": list(options),
        **about,
    }
    try:
        with (script.parent / JOBS).open("a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        warn(f"job {job} is submitted, but not recorded in {script.parent / JOBS} ({error.strerror})")
    return job


def submitted(folder: Path) -> list[dict[str, Any]]:
    """Return the jobs that were submitted from a folder, the oldest first."""
    return [record for record in read_records(folder / JOBS) if "job" in record]


def fields_of(text: str) -> dict[str, str]:
    """Return the last line of `scontrol show -o` that describes something as names and values."""
    # a job that was requeued or is an array has several lines; the last is the newest
    lines = [dict(_FIELD.findall(line)) for line in text.splitlines() if "=" in line]
    return lines[-1] if lines else {}


def job_facts(job: str) -> dict[str, str]:
    """Return what Slurm knows about a job: fields of `scontrol show job`, or of sacct.

    Nothing of a forgotten job. If the controller does not answer, JobState is NO_ANSWER.
    """
    done = command("scontrol", "show", "job", "-o", job)
    facts = fields_of(done.stdout)
    if done.returncode == 0 and "JobState" in facts:
        return facts
    is_forgotten = done.returncode == 0 or "Invalid job id" in done.stderr
    return _from_accounting(job) or ({} if is_forgotten else {"JobState": NO_ANSWER})


def _from_accounting(job: str) -> dict[str, str]:
    """Ask slurmdbd about a job that slurmctld has forgotten; many clusters have it."""
    names = ("JobState", "SubmitTime", "StartTime", "EndTime", "NodeList", "ExitCode", "Restarts")
    columns = "State,Submit,Start,End,NodeList,ExitCode,Restarts"
    shown = command("sacct", "-n", "-X", "-P", "-j", job, "-o", columns).stdout
    lines = [line.split("|") for line in shown.splitlines() if line.count("|") == len(names) - 1]
    if not lines or not lines[-1][0]:
        return {}
    return dict(zip(names, lines[-1], strict=True)) | {"JobState": lines[-1][0].split()[0]}


def is_set(value: str | None) -> bool:
    """Return whether a field of scontrol has a value."""
    return bool(value) and value not in ("(null)", "None", "N/A", "Unknown")


def moment(text: str | None) -> float | None:
    """Return a time that Slurm prints in seconds since 1970; None if it is not known."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None


def wait_for(job: str, poll_s: float = 5.0) -> str:
    """Wait until a job has ended, and the one that it was resubmitted as; return the last state.

    UNKNOWN if Slurm has forgotten it. A controller that does not answer is asked again, for ever.
    """
    script, pause = Path(), poll_s
    if shutil.which("scontrol") is None:
        raise UserError("scontrol is not on this machine", "run this on a login node of the cluster")
    while True:
        facts = job_facts(job) or {"JobState": UNKNOWN}
        script = Path(facts.get("Command", script))
        if (state := facts["JobState"]) in (*ENDED, UNKNOWN):
            again = [each["job"] for each in submitted(script.parent) if each.get("replaces") == job]
            if not again:
                return state
            job = again[-1]
            continue
        if state == NO_ANSWER and pause == poll_s:
            warn(f"Slurm does not answer about job {job}: asking again")
        pause = min(2 * pause, max(poll_s, _LONGEST_POLL_S)) if state == NO_ANSWER else poll_s
        time.sleep(pause)


def hosts(nodes: str) -> Iterator[str]:
    """Yield the names of a list in the order of `scontrol show hostnames`."""
    at = 0
    while at < len(nodes):
        if nodes[at] in ", ":
            at += 1
            continue
        item = _ITEM.match(nodes, at)
        if item is None or nodes[item.end() : item.end() + 1] not in ("", ","):
            raise UserError(f"'{nodes}' is not a list of hosts", "write it like 'n1,gpu[01-04,07]-ib'")
        yield from _expand(item[0], nodes)
        at = item.end()


def _expand(item: str, nodes: str) -> Iterator[str]:
    pieces = [[text] if text else _numbers(ranges, nodes) for text, ranges in _PIECE.findall(item)]
    brackets = [i for i, (text, _) in enumerate(_PIECE.findall(item)) if not text]
    # Slurm counts the last bracket fastest, then the first, the second, and so on
    slowest_first = [*reversed(brackets[:-1]), *brackets[-1:]]
    name = [piece[0] for piece in pieces]
    for numbers in product(*(pieces[i] for i in slowest_first)):
        for i, number in zip(slowest_first, numbers, strict=True):
            name[i] = number
        yield "".join(name)


def _numbers(ranges: str, nodes: str) -> list[str]:
    numbers = []
    for text in ranges.split(","):
        found = _RANGE.fullmatch(text)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise UserError(f"'{text}' in the list of hosts '{nodes}' is not a range", "write it like 01-04")
        width = len(found[1])
        numbers += [f"{i:0{width}d}" for i in range(int(found[1]), int(found[2] or found[1]) + 1)]
    return numbers


def first_host(nodes: str) -> str:
    """Return the first host of a list."""
    return next(hosts(nodes), "")
