"""Run the rounds through StreamFlow: generate streamflow.yml and the CWL, run them, check what they did.

The workflow moves two kinds of directories: a turn, with the global model and the orders of the sites, goes
to every site, and each site's member comes back. Data is no input of the workflow, so it cannot leave a site.
The engine's word is never trusted: the coordinator takes only members whose manifest and checksums are right.
StreamFlow cannot resume, so each start generates the rounds that are left.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.errors import UserError
from arriero.federate.schema import FederationConfig, SiteSection
from arriero.files import publish_file, staged_directory

if TYPE_CHECKING:
    from arriero.federate.coordinator import Coordinator
    from arriero.federate.members import GlobalManifest

FOLDER, TURN = "streamflow", "turn"
_RETRIES = 3
_VERSION = {"cwlVersion": "v1.2"}
_NEEDS: dict[str, Any] = {
    name: {}
    for name in (
        "InlineJavascriptRequirement",
        "StepInputExpressionRequirement",
        "MultipleInputFeatureRequirement",
    )
}


def workflow_files(
    config: FederationConfig, federation_file: Path, rounds: int, turn: Path
) -> dict[str, Any]:
    """Return the files of the workflow, by name; JSON is valid YAML."""
    sites = config.sites
    return {
        "streamflow.yml": _streamflow(sites),
        "config.yml": {"turn": {"class": "Directory", "path": str(turn)}, "rounds": rounds},
        "main.cwl": _main(),
        "round.cwl": _round(sites),
        "close.cwl": _close(federation_file),
        **{f"train-{site.name}.cwl": _train(site) for site in sites},
    }


def _streamflow(sites: Sequence[SiteSection]) -> dict[str, Any]:
    """One deployment and one binding per site; a failed step is rolled back and tried again."""
    bindings = [
        {"step": f"/rounds/train-{site.name}", "target": {"deployment": site.name}}
        for site in sites
        if site.host
    ]
    return {
        "version": "v1.0",
        "workflows": {
            "federation": {
                "type": "cwl",
                "config": {"file": "main.cwl", "settings": "config.yml"},
                "bindings": bindings,
            }
        },
        "deployments": {site.name: _deployment(site) for site in sites if site.host},
        # without it StreamFlow hangs when a step in a loop fails
        "failureManager": {"type": "rollback", "config": {"max_retries": _RETRIES, "retry_delay": 2}},
    }


def _deployment(site: SiteSection) -> dict[str, Any]:
    given = {"username": site.user, "sshKey": site.key}
    config = {"nodes": [f"{site.host}:{site.port}"], "checkHostKey": True}
    config |= {name: value for name, value in given.items() if value is not None}
    place = {"workdir": f"{site.work}/streamflow"} if site.work else {}
    return {"type": "ssh", "config": config, **place}


def _main() -> dict[str, Any]:
    loop = {
        "loopWhen": "$(inputs.round < inputs.rounds)",
        "loop": {"turn": {"loopSource": TURN}, "round": {"valueFrom": "$(inputs.round + 1)"}},
        "outputMethod": "last",
    }
    return _VERSION | {
        "class": "Workflow",
        "$namespaces": {"cwltool": "http://commonwl.org/cwltool#"},
        "requirements": {"SubworkflowFeatureRequirement": {}, **_NEEDS},
        "inputs": {"turn": "Directory", "rounds": "int"},
        "outputs": {"final": {"type": "Directory", "outputSource": f"rounds/{TURN}"}},
        "steps": {
            "rounds": {
                "run": "round.cwl",
                "in": {"turn": "turn", "rounds": "rounds", "round": {"default": 0}},
                "out": [TURN],
                "requirements": {"cwltool:Loop": loop},
            }
        },
    }


def _round(sites: Sequence[SiteSection]) -> dict[str, Any]:
    """One named step per site, which binds it to its deployment, and one that closes the round."""
    steps: dict[str, Any] = {
        f"train-{site.name}": {
            "run": f"train-{site.name}.cwl",
            "in": {"turn": "turn"},
            "out": ["member"],
        }
        for site in sites
    }
    members = {"source": [f"{step}/member" for step in steps], "linkMerge": "merge_flattened"}
    steps["close"] = {"run": "close.cwl", "in": {"members": members}, "out": [TURN]}
    return _VERSION | {
        "class": "Workflow",
        "requirements": _NEEDS,
        "inputs": {"turn": "Directory", "round": "int", "rounds": "int"},
        "outputs": {TURN: {"type": "Directory", "outputSource": f"close/{TURN}"}},
        "steps": steps,
    }


def _train(site: SiteSection) -> dict[str, Any]:
    member = f"member-{site.name}"
    work = ["--work", site.work] if site.work else []
    launch = ["--profile", site.profile, "--nodes", str(site.nodes)] if site.profile else []
    launch = launch or ["--nproc", str(site.nproc)]
    arguments = [*shlex.split(site.command), "fed", "round", "--site", site.name, *work, *launch]
    return _VERSION | {
        "class": "CommandLineTool",
        "requirements": {"InlineJavascriptRequirement": {}},
        "baseCommand": arguments[:1],
        "arguments": [*arguments[1:], "--out", member],
        "inputs": {"turn": {"type": "Directory", "inputBinding": {"prefix": "--turn", "position": 1}}},
        "outputs": {"member": {"type": "Directory", "outputBinding": {"glob": member}}},
    }


def _close(federation_file: Path) -> dict[str, Any]:
    # a position on the items and on the list: engines order them differently
    items = {"type": "array", "items": "Directory", "inputBinding": {"prefix": "--member"}}
    return _VERSION | {
        "class": "CommandLineTool",
        "requirements": {"InlineJavascriptRequirement": {}},
        "baseCommand": [sys.executable, "-m", "arriero", "fed", "turn", str(federation_file)],
        "arguments": ["--out", TURN],
        "inputs": {"members": {"type": items, "inputBinding": {"position": 1}}},
        "outputs": {TURN: {"type": "Directory", "outputBinding": {"glob": TURN}}},
    }


def write_turn(coordinator: "Coordinator", target: Path) -> None:
    """Publish what the sites need next: the newest global model, the orders and the run files."""
    orders = coordinator.assign_idle()
    with staged_directory(target) as making:
        shutil.copytree(coordinator.rounds.model(coordinator.rounds.number), making / "model")
        for kind in ("orders", "sites"):
            (making / kind).mkdir()
        for name, order in orders.items():
            (making / "orders" / f"{name}.json").write_text(json.dumps(asdict(order)))
            shutil.copyfile(coordinator.run_file(name), making / "sites" / f"{name}.toml")


def take_turn(coordinator: "Coordinator", members: Sequence[Path], target: Path) -> "GlobalManifest | None":
    """Receive what the engine brought, close the round if it may close, and publish the next turn.

    A directory without a member is a site that has not finished; its order stays open.
    """
    from arriero.federate.members import MEMBER, GlobalManifest, MemberManifest, Refused, read_manifest

    for path in members:
        if not (path / MEMBER).is_file():
            continue
        try:
            about = read_manifest(path, MemberManifest)
        except Refused as error:
            coordinator.rounds.events.write("refuse", reason=str(error))
            continue
        inbox = coordinator.rounds.inbox(about.site, about.round)
        known = (coordinator.rounds.at(about.round) / "members" / about.site).exists()
        if coordinator.config.site(about.site) is None or known or inbox.exists():
            continue
        with staged_directory(inbox) as making:
            shutil.copytree(path, making, dirs_exist_ok=True)
    coordinator.reload()
    made = coordinator.rounds.try_to_close(coordinator.names)
    write_turn(coordinator, target)
    return made if isinstance(made, GlobalManifest) else None


def run_streamflow(coordinator: "Coordinator", report: Any) -> None:
    """Generate the rounds that are left and run them, until all are done or one makes no progress."""
    program = streamflow_program()
    while not coordinator.is_finished:
        before, number = _progress(coordinator), coordinator.rounds.number
        folder = coordinator.folder / FOLDER
        folder.mkdir(exist_ok=True)
        turn = folder / TURN
        shutil.rmtree(turn, ignore_errors=True)
        write_turn(coordinator, turn)
        assert coordinator.source is not None
        left = coordinator.last_round - number
        files = workflow_files(coordinator.config, coordinator.source.absolute(), left, turn)
        with _private(folder, files), _known_hosts(coordinator.config) as environment:
            log = (folder / "log.txt").open("a")
            with log, tempfile.TemporaryDirectory(prefix="streamflow-") as out:
                command = [program, "run", "streamflow.yml", "--outdir", out]
                code = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log).returncode
        for each in range(number, coordinator.rounds.number):
            report(each + 1)
        coordinator.rounds.events.write("streamflow", code=code, round=coordinator.rounds.number)
        if not coordinator.is_finished and _progress(coordinator) == before:
            raise UserError(
                f"StreamFlow ended with code {code}, and no member arrived", f"see {folder / 'log.txt'}"
            )


def _progress(coordinator: "Coordinator") -> tuple[int, int]:
    number = coordinator.rounds.number
    return number, len(coordinator.rounds.members(number))


@contextmanager
def _private(folder: Path, files: dict[str, Any]):
    """Write the workflow for its run only: streamflow.yml names hosts, users and key files."""
    for name, content in files.items():
        publish_file(folder / name, (json.dumps(content, indent=1) + "\n").encode())
        (folder / name).chmod(0o600)
    try:
        yield
    finally:
        (folder / "streamflow.yml").unlink(missing_ok=True)


@contextmanager
def _known_hosts(config: FederationConfig):
    """Yield the environment of StreamFlow, which reads host keys from ~/.ssh/known_hosts only."""
    files = sorted({site.known_hosts for site in config.sites if site.known_hosts})
    if not files:
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="arriero-home-") as home:
        (Path(home) / ".ssh").mkdir(mode=0o700)
        text = "".join(Path(path).read_text() for path in files)
        (Path(home) / ".ssh" / "known_hosts").write_text(text)
        yield {**os.environ, "HOME": home}


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
