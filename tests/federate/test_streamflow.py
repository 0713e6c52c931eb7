"""Rounds through StreamFlow, over real ssh to this machine with a key per site."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.federate.members import open_global
from arriero.federate.round_files import Assignment
from arriero.federate.schema import load_federation
from arriero.federate.site import run_turn
from arriero.federate.streamflow import (
    Engine,
    all_workflow_files,
    deliver,
    take_turn,
    write_turn,
)
from benchmarks.federation_chaos import run_file
from federate.conftest import TINY

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = REPOSITORY / ".venv-federation" / "bin" / "streamflow"


def federation_file(folder, cache, sites="ab", **keys):
    lines = [
        "[federation]\nname = 'fed'\nrounds = 2\ntokens = '2 steps'\nmode = 'synchronous'\nbalance = false"
    ]
    for number, name in enumerate(sites):
        (folder / f"{name}.toml").write_text(run_file(number + 1, cache, **TINY))
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


def test_another_file_of_known_hosts_leaves_the_default_keys(tmp_path, corpus_cache, monkeypatch):
    (tmp_path / ".ssh").mkdir()
    for path in (".ssh/id_ed25519", ".ssh/known_hosts", "hosts", "fake"):
        (tmp_path / path).write_text(f"{path}\n")
    (tmp_path / "fake").write_text('#!/bin/sh\ncat "$HOME"/.ssh/*\n')
    (tmp_path / "fake").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ARRIERO_STREAMFLOW", str(tmp_path / "fake"))
    keys = {"host": "'login'", "work": "'/w'", "known_hosts": "'hosts'"}
    coordinator = Coordinator.of(federation_file(tmp_path, corpus_cache, "a", **keys))
    coordinator.prepare()
    engine = Engine.start(coordinator, coordinator.config.sites[0], coordinator.assign_idle()["a"])
    engine.process.wait(60)
    assert not engine.is_alive() and (tmp_path / ".ssh" / "id_ed25519").is_file()
    for _ in range(100):
        if len(seen := (engine.folder / "log.txt").read_text().split()) == 2:
            break
        time.sleep(0.1)
    assert seen == [".ssh/id_ed25519", "hosts"]


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
