"""`arriero ckpt` as a user meets it."""

import json

import pytest
import torch
from typer.testing import CliRunner

from arriero.checkpoint.directory import Manifest
from arriero.checkpoint.manager import Checkpoints, SaveRequest
from arriero.checkpoint.scores import attach_evaluation, read_evaluations
from arriero.checkpoint.state import describe_parts, local_parts
from arriero.cli import app


@pytest.fixture
def ckpt(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    runs.train("run", "checkpoint.every=2 steps")
    folder = runs.folder / "run"
    return folder, lambda verb, *rest: CliRunner().invoke(app, ["ckpt", verb, *map(str, rest)])


def test_the_verbs_tell_valid_from_damaged_checkpoints_and_delete_old_ones(ckpt):
    folder, verb = ckpt
    newest = folder / "checkpoints" / "step-00000006"
    inside = verb("inspect", folder).output
    assert "model.embedding.weight" in inside
    assert "optim.blocks.0.attention.q.weight.exp_avg_sq" in inside
    assert "float32" in inside
    assert 'preset = "llama-test"' in inside
    assert "is valid" in verb("verify", folder).output
    victim = newest / "ledger.json"
    content = victim.read_bytes()
    victim.write_bytes(content.replace(b"samples", b"Samples", 1))
    found = verb("verify", newest)
    assert found.exit_code == 1
    assert "ledger.json has other bytes" in found.output
    rows = verb("list", folder).output.splitlines()
    assert [("yes" in row, "no: ledger.json" in row) for row in rows[1:]] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert verb("list", folder, "--quick").output.count("yes") == 3
    refused = verb("prune", folder, "--keep", 1)
    assert "is damaged, so older ones must stay" in str(refused.exception)
    victim.write_bytes(content)
    assert "would remove" in verb("prune", folder, "--keep", 1, "--dry-run").output
    assert "kept: 6" in verb("prune", folder, "--keep", 1).output
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000006"]


def test_the_verbs_print_one_json_object(ckpt, command):
    folder, _ = ckpt
    newest = folder / "checkpoints" / "step-00000006"

    def facts(verb, *rest, code=0):
        result = command("ckpt", verb, *rest, "--json")
        assert result.returncode == code, result.stderr
        return json.loads(result.stdout)

    listed = facts("list", folder)
    assert [(each["step"], each["valid"]) for each in listed["checkpoints"]] == [
        (2, True),
        (4, True),
        (6, True),
    ]
    assert listed["checkpoints"][0]["tokens"] * 3 == listed["checkpoints"][2]["tokens"]
    inside = facts("inspect", folder)
    assert inside["tensors"]["model.embedding.weight"]["dtype"] == "float32"
    assert inside["config"]["model"]["preset"] == "llama-test"
    assert "tensors" not in facts("inspect", folder, "--no-tensors")
    assert facts("verify", newest)["valid"]
    victim = newest / "ledger.json"
    victim.write_bytes(victim.read_bytes().replace(b"samples", b"Samples", 1))
    found = facts("verify", newest, code=1)
    assert (found["valid"], list(found["problems"])) == (False, ["ledger.json"])
    assert [each["valid"] for each in facts("list", folder)["checkpoints"]] == [True, True, False]
    (newest / "manifest.json").write_text("{}")
    assert list(facts("verify", newest, code=1)["problems"]) == ["manifest.json"]
    missing = command("ckpt", "verify", folder / "nowhere", "--json")
    assert (missing.returncode, missing.stdout) == (2, "")


def test_a_damaged_evaluation_beside_a_checkpoint_is_ignored(tmp_path):
    (tmp_path / "manifest.json").touch()
    attach_evaluation(tmp_path, "perplexity", {"loss": 2.5}, {}, {})
    whole = {"kind": "a", "scores": {}, "settings": {}, "details": {}, "time": 1.0}
    for number, content in enumerate([[], whole | {"time": None}, whole | {"scores": 1}, {"kind": "a"}]):
        (tmp_path / f"evaluation-{number}.json").write_text(json.dumps(content))
    assert [str(each) for each in read_evaluations(tmp_path)] == ["loss 2.5"]


def test_a_bad_interval_for_prune_is_refused_in_a_sentence(ckpt, command):
    for value in ("foo", "", "0 steps", "2h", "1e99999999 tok", "-3 steps"):
        result = command("ckpt", "prune", ckpt[0], "--keep-every", value)
        assert result.returncode == 2
        assert "--keep-every" in result.stderr
    assert len(list((ckpt[0] / "checkpoints").iterdir())) == 3


def test_verify_names_tensors_with_non_finite_values(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoints, "_check_finite", lambda *_: None)
    tensors = {"model.a": torch.ones(4, 4), "model.b": torch.ones(4, dtype=torch.bfloat16)}
    tensors |= {"model.c": torch.ones(2, 3, 4), "optim.optimizer.step": torch.tensor(1)}
    tensors["model.b"][2], tensors["model.c"][1, 2, 3] = float("inf"), float("nan")
    pieces = local_parts(tensors)

    def about(files):
        return Manifest(1, 10, 0.0, {"tp": 1}, {}, "tok", describe_parts(pieces), files)

    many = checkpoints(background=False)
    many.save(SaveRequest(1, pieces, {}, about))
    found = CliRunner().invoke(app, ["ckpt", "verify", str(tmp_path)])
    assert found.exit_code == 1
    assert [line.split()[0] for line in found.output.splitlines()] == ["model.b", "model.c"]
