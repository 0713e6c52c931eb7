"""Reach sites through StreamFlow: one workflow per site, a CWL loop over the rounds of that site.

A turn, with the global model, the site's order and its run file, goes to the site; its member comes back, and
the next turn is fetched from the coordinator, which closes rounds by its own rules. A site that is slow,
waits in a queue or does not answer therefore holds up no other. Data is no input of the workflow, so it
cannot leave a site. The engine's word is never trusted: the coordinator takes only members whose manifest
and checksums are right. StreamFlow cannot resume, so each start generates the workflow of what is left.
"""

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from pydantic import ValidationError

from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.federate.members import OUTER, Record, write_json
from arriero.federate.round_files import Assignment
from arriero.federate.schema import FederationConfig, SiteSection
from arriero.federate.site import EVALUATION, MEMBER, MODEL, ORDER, RUN_FILE
from arriero.files import is_locked, link_tree, staged_directory

FOLDER, TURN, FINISHED = "streamflow", "turn", "finished"
_RETRIES = 3
_POLL_S = 0.3
_VERSION = {"cwlVersion": "v1.2"}
_NEEDS: dict[str, Any] = {"InlineJavascriptRequirement": {}, "StepInputExpressionRequirement": {}}


def workflow_files(site: SiteSection, federation_file: Path, turn: Path) -> dict[str, Any]:
    """Return the files of a site's workflow, by name; JSON is valid YAML."""
    return {
        "streamflow.yml": _streamflow(site),
        "config.yml": {"turn": {"class": "Directory", "path": str(turn)}},
        "main.cwl": _main(),
        "round.cwl": _round(site),
        "train.cwl": _train(site),
        "next.cwl": _next(site, federation_file),
    }


def all_workflow_files(config: FederationConfig, federation_file: Path) -> dict[str, Any]:
    """Return the workflows of all sites on other machines, by site."""
    return {
        site.name: workflow_files(site, federation_file, Path(TURN)) for site in config.sites if site.host
    }


def _streamflow(site: SiteSection) -> dict[str, Any]:
    """The step that trains is bound to the site; a failed step is rolled back and tried again."""
    given = {"username": site.user, "sshKey": site.key}
    config = {"nodes": [f"{site.host}:{site.port}"], "checkHostKey": True}
    config |= {name: value for name, value in given.items() if value is not None}
    place = {"workdir": f"{site.work}/streamflow"} if site.work else {}
    binding = {"step": f"/rounds/train-{site.name}", "target": {"deployment": site.name}}
    return {
        "version": "v1.0",
        "workflows": {
            "federation": {
                "type": "cwl",
                "config": {"file": "main.cwl", "settings": "config.yml"},
                "bindings": [binding],
            }
        },
        "deployments": {site.name: {"type": "ssh", "config": config, **place}},
        # without it StreamFlow hangs when a step in a loop fails
        "failureManager": {"type": "rollback", "config": {"max_retries": _RETRIES, "retry_delay": 2}},
    }


def _main() -> dict[str, Any]:
    loop = {
        "loopWhen": f'$(inputs.turn.basename != "{FINISHED}")',
        "loop": {"turn": {"loopSource": TURN}},
        "outputMethod": "last",
    }
    return _VERSION | {
        "class": "Workflow",
        "$namespaces": {"cwltool": "http://commonwl.org/cwltool#"},
        "requirements": {"SubworkflowFeatureRequirement": {}, **_NEEDS},
        "inputs": {"turn": "Directory"},
        "outputs": {"final": {"type": "Directory", "outputSource": f"rounds/{TURN}"}},
        "steps": {
            "rounds": {
                "run": "round.cwl",
                "in": {"turn": "turn"},
                "out": [TURN],
                "requirements": {"cwltool:Loop": loop},
            }
        },
    }


def _round(site: SiteSection) -> dict[str, Any]:
    train = f"train-{site.name}"
    return _VERSION | {
        "class": "Workflow",
        "requirements": _NEEDS,
        "inputs": {"turn": "Directory"},
        "outputs": {TURN: {"type": "Directory", "outputSource": f"next/{TURN}"}},
        "steps": {
            train: {"run": "train.cwl", "in": {"turn": "turn"}, "out": ["answer"]},
            "next": {"run": "next.cwl", "in": {"answer": f"{train}/answer"}, "out": [TURN]},
        },
    }


def _tool(arguments: list[str], source: str, result: str, names: list[str]) -> dict[str, Any]:
    bound = {"type": "Directory", "inputBinding": {"prefix": f"--{source}", "position": 1}}
    return _VERSION | {
        "class": "CommandLineTool",
        "requirements": {"InlineJavascriptRequirement": {}},
        "baseCommand": arguments[:1],
        "arguments": arguments[1:],
        "inputs": {source: bound},
        "outputs": {result: {"type": "Directory", "outputBinding": {"glob": names}}},
    }


def _train(site: SiteSection) -> dict[str, Any]:
    work = ["--work", site.work] if site.work else []
    launch = ["--profile", site.profile, "--nodes", str(site.nodes)] if site.profile else []
    launch = launch or ["--nproc", str(site.nproc)]
    arguments = [*shlex.split(site.command), "fed", "round", "--site", site.name, *work, *launch]
    return _tool([*arguments, "--out", "answer"], "turn", "answer", ["answer"])


def _next(site: SiteSection, federation_file: Path) -> dict[str, Any]:
    arguments = [sys.executable, "-m", "arriero", "fed", "turn", str(federation_file), "--site", site.name]
    return _tool([*arguments, "--out", "."], "answer", TURN, [TURN, FINISHED])


def write_turn(coordinator: Coordinator, order: Assignment, target: Path) -> None:
    """Publish what a site needs: the global model of its order, the order and its run file."""
    with staged_directory(target) as making:
        link_tree(coordinator.rounds.model(order.round), making / MODEL, leave_out=OUTER)
        (making / ORDER).write_text(order.model_dump_json())
        shutil.copyfile(coordinator.run_file(order.site), making / RUN_FILE)


class Evaluation(Record):
    site: str
    eval_loss: float | None


def deliver(coordinator: Coordinator, site: str, answer: Path) -> Assignment | None:
    """Put a site's answer where the coordinator looks for it; return the order that it answers.

    What is missing or not readable is no answer: the order stays open, and the site gets it again.
    """
    try:
        order = Assignment.read(answer / ORDER)
    except (OSError, ValidationError):
        return None
    if order.site != site or not coordinator.rounds.model(order.round).is_dir():
        return None
    if order.steps == 0:
        with suppress(OSError, ValidationError):
            found = Evaluation.read(answer / EVALUATION)
            write_json(coordinator.evaluation(site, order.round), found.model_dump())
        return order
    inbox = coordinator.rounds.inbox(site, order.round)
    if (answer / MEMBER).is_dir() and not coordinator.rounds.has_member(site, order.round):
        with staged_directory(inbox) as making:
            link_tree(answer / MEMBER, making)
    shutil.rmtree(answer / MEMBER, ignore_errors=True)
    return order


def take_turn(coordinator: Coordinator, site: str, answer: Path, out: Path) -> Path:
    """Deliver a site's answer, wait for its next order, and publish it in `out` as the next turn.

    The order is given by the process of `arriero fed run`, which holds the federation's lock.
    """
    answered = deliver(coordinator, site, answer)
    rounds = coordinator.rounds
    while is_locked(coordinator.lock_file, unknown=True):
        finished = coordinator.is_finished
        pending = rounds.pending(site)
        order = None if pending and rounds.inbox(site, pending.round).is_dir() else pending
        is_evaluated = coordinator.evaluation(site, rounds.number).is_file()
        if finished and order is None and not is_evaluated and (answered is None or answered.steps):
            order = coordinator.evaluation_order(site, rounds.number)
        if order is not None:
            write_turn(coordinator, order, out / TURN)
            return out / TURN
        if finished:
            (out / FINISHED).mkdir(exist_ok=True)
            return out / FINISHED
        time.sleep(_POLL_S)
    raise UserError(f"no `arriero fed run` is running for {coordinator.folder}", "start it again")


@dataclass
class Engine:
    """A StreamFlow process that serves one site until the federation ends. It ends with its coordinator."""

    process: subprocess.Popen[str]
    folder: Path
    private: Path
    spans_rounds = True

    @staticmethod
    def start(coordinator: Coordinator, site: SiteSection, order: Assignment) -> "Engine":
        """Start StreamFlow with an order. Addresses are in a private directory that is deleted at its end."""
        assert coordinator.source is not None
        program = streamflow_program()
        folder = coordinator.folder / FOLDER / site.name
        shutil.rmtree(folder / "tmp", ignore_errors=True)
        shutil.rmtree(folder / TURN, ignore_errors=True)
        (folder / "tmp").mkdir(parents=True)
        write_turn(coordinator, order, folder / TURN)
        private = Path(tempfile.mkdtemp(prefix=f"arriero-{site.name}-"))
        files = workflow_files(site, coordinator.source.absolute(), (folder / TURN).absolute())
        for name, content in files.items():
            (private / name).write_text(json.dumps(content, indent=1))
        # its copies of models and members stay on the coordinator's disk
        environment = {**os.environ, "TMPDIR": str((folder / "tmp").absolute())}
        if site.known_hosts:
            # StreamFlow reads host keys from ~/.ssh/known_hosts only; default keys and settings stay
            (private / ".ssh").mkdir(mode=0o700)
            for path in (Path.home() / ".ssh").glob("*"):
                if path.name != "known_hosts":
                    (private / ".ssh" / path.name).symlink_to(path)
            shutil.copyfile(site.known_hosts, private / ".ssh" / "known_hosts")
            environment["HOME"] = str(private)
        process = subprocess.Popen(
            [program, "run", "streamflow.yml", "--outdir", str((folder / "tmp").absolute())],
            cwd=private,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        secrets = [each for each in (site.host, site.user, site.key, site.known_hosts) if each]
        Thread(target=_log, args=(process, folder / "log.txt", secrets), daemon=True).start()
        return Engine(process, folder, private)

    def is_alive(self) -> bool:
        if self.process.poll() is None:
            return True
        self._clean()
        return False

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def stop(self, wait: bool = True) -> None:
        """Stop the engine and its local steps; what runs at the site continues, and is found again."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        if not wait:
            return
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._clean()

    def _clean(self) -> None:
        for path in (self.private, self.folder / "tmp", self.folder / TURN):
            shutil.rmtree(path, ignore_errors=True)


def _log(process: subprocess.Popen[str], path: Path, secrets: list[str]) -> None:
    """Copy the output of the engine to a file, without addresses, users and keys."""
    assert process.stdout is not None
    with path.open("a", buffering=1) as file:
        for line in process.stdout:
            for secret in secrets:
                line = line.replace(secret, "***")
            file.write(line)


def _end_with_parent() -> None:
    """End with the coordinator, also if it is killed (PR_SET_PDEATHSIG)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def streamflow_program() -> str:
    """Return the path of StreamFlow, which lives in an environment of its own."""
    beside = (Path(sys.executable).parent / "streamflow", Path(".venv-federation/bin/streamflow"))
    found = os.environ.get("ARRIERO_STREAMFLOW") or shutil.which("streamflow")
    found = found or next((str(path.absolute()) for path in beside if path.is_file()), None)
    if found is None:
        raise UserError(
            "StreamFlow is not installed, which reaches sites on other machines",
            "`python -m venv .venv-federation`, then `.venv-federation/bin/pip install --pre "
            "'streamflow>=0.2.0rc3'`; or use --local",
        )
    return found
