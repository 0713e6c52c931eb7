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
from arriero.federate.rounds import Assignment
from arriero.federate.schema import load_federation
from arriero.federate.site import run_turn
from arriero.federate.streamflow import (
    all_workflow_files,
    deliver,
    streamflow_program,
    take_turn,
    write_turn,
)
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


def test_the_workflow_of_a_site_has_a_named_step_a_loop_and_a_failure_manager(tmp_path):
    path = federation_file(tmp_path, "data", **remote(tmp_path))
    for name, files in all_workflow_files(load_federation(path), path).items():
        assert files["main.cwl"]["steps"]["rounds"]["requirements"]["cwltool:Loop"]["outputMethod"] == "last"
        assert set(files["round.cwl"]["steps"]) == {f"train-{name}", "next"}
        engine = files["streamflow.yml"]
        assert engine["failureManager"]["type"] == "rollback"
        (bound,) = engine["workflows"]["federation"]["bindings"]
        assert bound == {"step": f"/rounds/train-{name}", "target": {"deployment": name}}
        assert engine["deployments"][name]["config"]["checkHostKey"]


def test_data_is_no_input_of_the_workflow(tmp_path):
    """What is no input of a step cannot be moved by the engine."""
    path = federation_file(tmp_path, "data", data="['/secret/data']", **remote(tmp_path))
    files = all_workflow_files(load_federation(path), path)
    assert "/secret/data" not in json.dumps(files)
    assert all(set(each["config.yml"]) == {"turn"} for each in files.values())


def test_init_shows_the_workflow(tmp_path, command):
    federation_file(tmp_path, "data", **remote(tmp_path))
    done = command("fed", "init", "fed.toml", "--show")
    assert done.returncode == 0 and "train.cwl" in json.loads(done.stdout)["b"]


def test_what_the_engine_brings_is_not_trusted(tmp_path, corpus_cache):
    """An empty answer, one of another site and a damaged member change nothing; the order is sent again."""
    coordinator = Coordinator.of(federation_file(tmp_path, corpus_cache, "a"))
    coordinator.prepare()
    order = coordinator.assign_idle()["a"]
    write_turn(coordinator, order, tmp_path / "turn")
    work, good = tmp_path / "work", tmp_path / "good"
    run_turn(tmp_path / "turn", "a", work, good)
    for name in ("empty", "stranger", "damaged"):
        shutil.copytree(good, tmp_path / name)
    shutil.rmtree(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    (tmp_path / "stranger" / "order.json").write_text(
        order.model_copy(update={"site": "b"}).model_dump_json()
    )
    assert deliver(coordinator, "a", tmp_path / "empty") is None
    assert deliver(coordinator, "a", tmp_path / "stranger") is None
    next((tmp_path / "damaged" / "member").glob("delta*")).write_bytes(b"half")
    assert deliver(coordinator, "a", tmp_path / "damaged") == order
    assert coordinator.rounds.try_to_close(["a"]) is None and coordinator.rounds.pending("a") == order

    with coordinator.lock():
        again = take_turn(coordinator, "a", tmp_path / "empty", tmp_path / "again")
        assert Assignment.read(again / "order.json") == order, "the same order, because nothing was accepted"
        run_turn(again, "a", work, tmp_path / "second")
        deliver(coordinator, "a", tmp_path / "second")
        made = coordinator.rounds.try_to_close(["a"])
        assert made.round == 1 and open_global(work / "models" / "0000").model == made.parent
        (coordinator.rounds.at(2) / "global").mkdir(parents=True)
        last = take_turn(coordinator, "a", tmp_path / "empty", tmp_path / "last")
    assert Assignment.read(last / "order.json").steps == 0, "the final model is evaluated at the site"
    with pytest.raises(UserError, match="no `arriero fed run` is running"):
        take_turn(coordinator, "a", tmp_path / "empty", tmp_path / "orphan")


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
