"""Rounds through StreamFlow, over real ssh to this machine with a key per site."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.federate.members import open_global
from arriero.federate.schema import load_federation
from arriero.federate.streamflow import streamflow_program, take_turn, workflow_files, write_turn
from federate.test_local import RUN

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = REPOSITORY / ".venv-federation" / "bin" / "streamflow"


def federation_file(folder, cache, sites="ab", **keys):
    lines = [
        "[federation]\nname = 'fed'\nrounds = 2\ntokens = '2 steps'\nmode = 'synchronous'\nbalance = false"
    ]
    for number, name in enumerate(sites):
        (folder / f"{name}.toml").write_text(RUN.format(seed=number + 1, cache=cache))
        lines += [f"[[sites]]\nname = '{name}'\nrun_file = '{name}.toml'"]
        lines += [f"{key} = {value.format(name=name)}" for key, value in keys.items()]
    (folder / "fed.toml").write_text("\n".join(lines))
    return folder / "fed.toml"


def remote(folder, port=22):
    return {
        "host": "'127.0.0.1'",
        "port": str(port),
        "user": f"'{os.environ.get('USER', 'root')}'",
        "key": f"'{folder}/ssh/id-{{name}}'",
        "known_hosts": f"'{folder}/ssh/known_hosts'",
        "work": f"'{folder}/work-{{name}}'",
        "command": f"'env PYTHONPATH={REPOSITORY}/src OMP_NUM_THREADS=1 {sys.executable} -m arriero'",
    }


def test_the_workflow_has_a_named_step_per_site_a_loop_and_a_failure_manager(tmp_path):
    path = federation_file(tmp_path, "data", **remote(tmp_path))
    files = workflow_files(load_federation(path), path, 3, tmp_path / "turn")
    assert files["main.cwl"]["steps"]["rounds"]["requirements"]["cwltool:Loop"]["outputMethod"] == "last"
    assert set(files["round.cwl"]["steps"]) == {"train-a", "train-b", "close"}
    engine = files["streamflow.yml"]
    assert engine["failureManager"]["type"] == "rollback"
    bound = {
        each["step"]: each["target"]["deployment"] for each in engine["workflows"]["federation"]["bindings"]
    }
    assert bound == {"/rounds/train-a": "a", "/rounds/train-b": "b"}
    assert all(each["config"]["checkHostKey"] for each in engine["deployments"].values())


def test_data_is_no_input_of_the_workflow(tmp_path):
    """What is no input of a step cannot be moved by the engine."""
    path = federation_file(tmp_path, "data", data="['/secret/data']", **remote(tmp_path))
    files = workflow_files(load_federation(path), path, 3, tmp_path / "turn")
    assert "/secret/data" not in json.dumps(files)
    assert set(files["config.yml"]) == {"turn", "rounds"}


def test_init_shows_the_workflow(tmp_path, command):
    federation_file(tmp_path, "data", **remote(tmp_path))
    done = command("fed", "init", "fed.toml", "--show")
    assert done.returncode == 0 and "train-b.cwl" in json.loads(done.stdout)


def test_turns_close_rounds_without_trusting_the_engine(tmp_path, corpus_cache):
    """A job that ended without a member, a damaged member, and a member of a stranger change nothing."""
    from arriero.federate.site import run_turn

    coordinator = Coordinator.of(federation_file(tmp_path, corpus_cache))
    coordinator.prepare()
    write_turn(coordinator, tmp_path / "turn-0")
    for name in "ab":
        run_turn(tmp_path / "turn-0", name, tmp_path / f"work-{name}", tmp_path / f"member-{name}")
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "member-b", damaged)
    next(damaged.glob("delta*")).write_bytes(b"half")
    assert take_turn(coordinator, [tmp_path / "member-a", tmp_path / "empty"], tmp_path / "turn-1") is None
    assert take_turn(coordinator, [tmp_path / "member-a", damaged], tmp_path / "turn-2") is None
    assert coordinator.rounds.number == 0
    made = take_turn(coordinator, [tmp_path / "member-a", tmp_path / "member-b"], tmp_path / "turn-3")
    assert made.round == 1
    assert open_global(tmp_path / "turn-3" / "model").model == made.model
    assert not (tmp_path / "turn-2" / "orders" / "a.json").exists(), "a site that has answered has no order"


@pytest.fixture
def streamflow(monkeypatch):
    if ENVIRONMENT.is_file():
        monkeypatch.setenv("ARRIERO_STREAMFLOW", str(ENVIRONMENT))
    try:
        streamflow_program()
    except UserError as error:
        pytest.skip(f"{error.what}: `make .venv-federation/.installed`")
    if shutil.which("sshd") is None and not Path("/usr/sbin/sshd").exists():
        pytest.skip("sshd is not installed")


@contextmanager
def sshd(folder, sites):
    """Run an ssh server of our own on a free port, which knows a key per site."""
    ssh = folder / "ssh"
    ssh.mkdir()
    for name in ("host", *(f"id-{site}" for site in sites)):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / name], check=True)
    keys = "".join((ssh / f"id-{site}.pub").read_text() for site in sites)
    (ssh / "authorized_keys").write_text(keys)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kind, key = (ssh / "host.pub").read_text().split()[:2]
    (ssh / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    settings = [f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {ssh / 'host'}", "UsePAM no"]
    settings += [f"AuthorizedKeysFile {ssh / 'authorized_keys'}", "PasswordAuthentication no"]
    settings += ["StrictModes no", "PidFile none", "MaxSessions 100", "PermitRootLogin prohibit-password"]
    (ssh / "config").write_text("\n".join(settings) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    server = subprocess.Popen([program, "-D", "-e", "-f", ssh / "config"], stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("streamflow")
def test_streamflow_drives_two_sites_over_ssh(tmp_path, corpus_cache):
    with sshd(tmp_path, "ab") as port:
        path = federation_file(tmp_path, corpus_cache, **remote(tmp_path, port))
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, "-m", "arriero", "fed", "run", path],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=580,
        )
    folder = tmp_path / "federations" / "fed"
    assert done.returncode == 0, done.stderr + (folder / "streamflow" / "log.txt").read_text()[-3000:]
    coordinator = Coordinator.of(path)
    assert coordinator.is_finished
    assert coordinator.replay(tmp_path) == [(1, True), (2, True)]
    assert open_global(coordinator.rounds.model(2)).tokens == 4 * 512
    assert not (folder / "streamflow" / "streamflow.yml").exists(), "addresses stay in the user's file"
