"""Federations of real training runs, played as processes of this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from arriero.checkpoint.convert import open_model
from arriero.config.load import load_run
from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.federate.members import MemberManifest, open_global, read_manifest
from arriero.federate.site import run_round
from arriero.model.presets import expand
from arriero.train.run import run
from federate.models import play_round

REPOSITORY = Path(__file__).parents[2]


def weights_at(path):
    source = open_model(path)
    return {name: source.load(name) for name in source.tensors}


def test_one_site_with_fedavg_is_ordinary_training_to_the_bit(federate, tmp_path):
    """Over rounds: optimizer state, schedule and data position continue at the site."""
    path = federate("a", rounds=3, outer="optimizer = 'fedavg'\ncodec = 'fp32'")
    coordinator = Coordinator.of(path)
    coordinator.prepare()
    for number in range(3):
        assert play_round(coordinator).round == number + 1
    federated = weights_at(coordinator.rounds.model(3))
    sets = ["train.horizon='12 steps'", f"run.dir='{tmp_path / 'plain'}'", "checkpoint.export=false"]
    done = run(load_run(tmp_path / "a.toml", sets, expand).config)
    ordinary = weights_at(done.run_dir / "checkpoints" / "step-00000012")
    assert all(torch.equal(federated[name], ordinary[name]) for name in ordinary)
    members = [read_manifest(coordinator.rounds.at(n) / "members" / "a", MemberManifest) for n in range(3)]
    assert [(m.first_step, m.step, m.tokens) for m in members] == [(0, 4, 1024), (4, 8, 1024), (8, 12, 1024)]
    # with one site, the aggregate is the site's model, and so is its held-out loss
    assert members[1].eval_before == members[0].eval_after


def test_an_optimizer_that_is_reset_gives_another_model_on_the_same_data(federate):
    results = {}
    for inner in ("continue", "reset"):
        keys = f"optimizer = 'fedavg'\ncodec = 'fp32'\ninner = '{inner}'"
        coordinator = Coordinator.of(federate("a", federation=f"dir = '{inner}'", outer=keys))
        coordinator.prepare()
        for _ in range(2):
            play_round(coordinator)
        ledger = json.loads((coordinator.folder / "sites" / "a" / "run" / "ledger.json").read_text())
        results[inner] = weights_at(coordinator.rounds.model(2)), ledger
    (kept, kept_ledger), (fresh, fresh_ledger) = results["continue"], results["reset"]
    assert kept_ledger == fresh_ledger
    assert any(not torch.equal(kept[name], fresh[name]) for name in kept)


def test_a_site_that_is_killed_continues_inside_its_round(federate, start_arriero, tmp_path):
    """The member is bit-identical to that of a site that was never killed."""
    coordinator = Coordinator.of(federate("a", outer="codec = 'fp32'"))
    coordinator.prepare()
    play_round(coordinator)
    order = coordinator.assign_idle()["a"]
    paths = coordinator.paths(coordinator.config.site("a"), order)
    paths.out.parent.mkdir(parents=True, exist_ok=True)
    code = (
        "import os, sys, json; from pathlib import Path\n"
        "from arriero.federate.round_files import Assignment; from arriero.federate.site import *\n"
        "from arriero.train.hooks import Hook\n"
        "class Kill(Hook):\n"
        "    def on_step(self, session, step, tokens):\n"
        "        if step == 7: os.kill(os.getpid(), 9)\n"
        "order, *paths = json.loads(sys.argv[1])\n"
        "run_round(Assignment(**order), SitePaths(*map(Path, paths)), hooks=(Kill(),))\n"
    )
    given = [order.model_dump(), *map(str, (paths.model, paths.run_file, paths.work, paths.out))]
    killed = start_arriero(json.dumps(given), cwd=tmp_path, code=code).wait()
    assert killed.returncode == -signal.SIGKILL and not paths.out.exists()
    run_round(order, paths)
    events = [json.loads(line) for line in (paths.work / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events].count("start") == 3
    member = read_manifest(paths.out, MemberManifest)
    assert (member.first_step, member.step) == (4, 8)

    undisturbed = Coordinator.of(federate("a", federation="dir = 'other'", outer="codec = 'fp32'"))
    undisturbed.prepare()
    play_round(undisturbed), play_round(undisturbed)
    same = read_manifest(undisturbed.rounds.at(1) / "members" / "a", MemberManifest)
    assert member.files == same.files and member.eval_before == same.eval_before


def test_a_second_call_of_a_finished_round_publishes_nothing_new(federate):
    coordinator = Coordinator.of(federate("a"))
    coordinator.prepare()
    order = coordinator.assign_idle()["a"]
    paths = coordinator.paths(coordinator.config.site("a"), order)
    first = run_round(order, paths)
    stamp = (paths.out / "member.json").stat().st_mtime_ns
    assert run_round(order, paths) == first
    assert (paths.out / "member.json").stat().st_mtime_ns == stamp


def test_a_site_refuses_a_damaged_global_model(federate):
    coordinator = Coordinator.of(federate("a"))
    coordinator.prepare()
    order = coordinator.assign_idle()["a"]
    model = coordinator.rounds.model(0) / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    with pytest.raises(UserError, match="other bytes"):
        run_round(order, coordinator.paths(coordinator.config.site("a"), order))


def start(path, cwd):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "arriero", "fed", "run", str(path), "--local"]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition, process, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_a_killed_coordinator_continues_where_it_was(federate, tmp_path, command, forked_arriero):
    """Two sites, two rounds; the coordinator is killed inside a round, and its sites finish theirs."""
    path = federate("ab", federation="balance = false")
    first = start(path, tmp_path)
    rounds = tmp_path / "federations" / "fed" / "rounds"
    wait_for(lambda: list((rounds / "0001" / "assigned").glob("*.json")), first)
    first.kill()
    first.communicate()
    second = forked_arriero("fed", "run", path, "--local", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "round 2/2" in second.stdout and "final" in second.stdout
    assert "momentum 0.056 = 0.9 x rounds / (rounds + 30)" in second.stdout
    assert open_global(rounds / "0002" / "global").tokens == 4 * 1024

    shown = command("fed", "status", path, "--replay", "--json")
    facts = json.loads(shown.stdout)
    assert shown.returncode == 0 and facts["replay"] == {"1": True, "2": True}
    assert facts["accounts"] == {"accepted": 4 * 1024, "discarded": 0, "waiting": 0}
    assert [row["state"] for row in facts["rows"]] == ["accepted"] * 4
    assert {row["weight"] for row in facts["rows"]} == {0.5}
    assert all(row["eval_global"] > 0 and row["eval_site"] > 0 for row in facts["rows"])
    text = command("fed", "status", path)
    assert "cosine" in text.stdout and text.returncode == 0

    again = forked_arriero("fed", "run", path, "--local", cwd=tmp_path)
    assert again.returncode == 0 and "finished" in again.stdout


def test_addresses_and_keys_stay_in_the_users_file(federate):
    secret = {"host": "'secret-host'", "user": "'secret-user'", "key": "'secret-key'", "work": "'work'"}
    coordinator = Coordinator.of(federate("a", **secret))
    coordinator.prepare()
    for file in coordinator.folder.rglob("*"):
        assert not file.is_file() or b"secret" not in file.read_bytes(), file
