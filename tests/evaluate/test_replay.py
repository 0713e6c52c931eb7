"""`arriero replay` repeats what a run recorded, and names the first step that differs."""

import hashlib
import json
import shutil
import sys

import pytest

import arriero
from arriero.checkpoint.directory import MANIFEST, read_manifest
from arriero.evaluate.replay_plan import Record
from arriero.files import sha256_of_json

SETTINGS = {
    "run.name": "run",
    "run.device": "cpu",
    "run.deterministic": True,
    "model.preset": "llama-test",
    "model.vocab_size": 4096,
    "data.seq_len": 64,
    "data.phases": [{"at": "5 steps", "batch": "1024 tok"}, {"at": "9 steps", "seq_len": 32}],
    "train.batch": "512 tok",
    "train.horizon": "10 steps",
    "optim.lr": 3e-3,
    "schedule.warmup": "2 steps",
    "checkpoint.every": "3 steps",
    "checkpoint.keep": 9,
    "eval.heldout": "4k tok",
    "observe.log_every": 1,
    "observe.tensorboard": False,
}


def train(folder, cache, nproc=1, hooks=(), **changes):
    where = {"run.dir": str(folder), "data.cache": str(cache)}
    return arriero.run(arriero.load_config(None, SETTINGS | where | changes), hooks, nproc).run_dir


@pytest.fixture(scope="module")
def original(corpus_cache, tmp_path_factory):
    """A run that was stopped after 6 steps and resumed, with two changes of its batch."""
    folder = tmp_path_factory.mktemp("original")
    shape = {"schedule.horizon": "10 steps"}
    train(
        folder,
        corpus_cache,
        **shape,
        **{"train.horizon": "6 steps", "data.phases": SETTINGS["data.phases"][:1]},
    )
    return train(folder, corpus_cache, **shape)


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


def replayed(command, run, *options):
    before = content(run)
    result = command("replay", run, "--json", *options)
    assert content(run) == before, "the run was changed"
    assert result.returncode in (0, 1), result.stderr
    found = json.loads(result.stdout)
    assert found["holds"] == (result.returncode == 0)
    return found


def content(run):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in run.rglob("*") if path.is_file()}


def edit_line(run, number, **changes):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line | changes if line["step"] == number else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def flip_bit(checkpoint, with_checksum):
    """Flip one bit in the last file of tensors, and make the manifest agree with it."""
    file = max(checkpoint.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[data.index(b"PK\x01\x02") - 400] ^= 4
    file.write_bytes(data)
    if with_checksum:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        del manifest["sha256"]
        manifest["files"][file.name]["sha256"] = hashlib.sha256(data).hexdigest()
        manifest["sha256"] = sha256_of_json(manifest)
        (checkpoint / MANIFEST).write_text(json.dumps(manifest))
        read_manifest(checkpoint)


def test_the_same_layout_repeats_every_bit_across_a_resume_and_changes_of_the_batch(command, run):
    found = replayed(command, run, "--from", "0", "--steps", "10")
    assert found["holds"]
    assert [row["step"] for row in found["steps"]] == list(range(1, 11))
    assert all(row["expected"] == "bit-equal" and row["bit_equal"] for row in found["steps"])
    assert [each["step"] for each in found["checkpoints"]] == [3, 6, 9, 10]
    assert not any(each["unequal"] for each in found["checkpoints"])
    assert "eval_loss" in found["steps"][-1]


@pytest.mark.parametrize("sets", [(), ("parallel.tp=2",), ("parallel.tp=2", "parallel.dp_shard=1")])
def test_another_layout_agrees_within_the_bounds_of_parity(command, run, sets):
    options = [word for each in sets for word in ("--set", each)]
    found = replayed(command, run, "--from", "6", "--steps", "4", "--nproc", "2", *options)
    assert found["holds"]
    assert {row["expected"] for row in found["steps"]} == {"within bounds"}
    assert not all(row["bit_equal"] for row in found["steps"])
    assert found["layout"] != "1 process"


@pytest.mark.slow
def test_ranks_of_srun_repeat_steps_together(slurm, run, tmp_path):
    def replay(*options):
        before = content(run)
        words = [
            "--overcommit",
            "-N",
            "2",
            "-n",
            "2",
            sys.executable,
            "-m",
            "arriero",
            "replay",
            run,
            "--json",
        ]
        result = slurm.run("srun", *words, *options, check=False, cwd=tmp_path)
        assert content(run) == before, "the run was changed"
        assert result.returncode in (0, 1), result.stderr
        return json.loads(result.stdout)

    found = replay("--from", "6", "--steps", "4")
    assert found["holds"] and found["layout"] == "dp_shard 2" and len(found["steps"]) == 4, found
    assert [each["step"] for each in found["checkpoints"]] == [9, 10]
    flip_bit(run / "checkpoints" / "step-00000009", with_checksum=False)
    assert "is damaged" in replay("--from", "9", "--workdir", str(tmp_path))["first_difference"]
    assert not [*tmp_path.glob("arriero-replay-*")]


def test_the_first_step_whose_record_was_changed_is_named(command, run):
    for step in (8, 9):
        loss = Record.read(run).lines[step]["loss"]
        edit_line(run, step, loss=loss * (1 + 1e-12))
    found = replayed(command, run, "--from", "6")
    assert found["first_difference"].startswith("step 8: loss")
    edit_line(run, 8, loss=Record.read(run).lines[8]["loss"] * 1.001)
    assert "step 8" in replayed(command, run, "--from", "6", "--nproc", "2")["first_difference"]


@pytest.mark.parametrize("with_checksum", [False, True])
def test_a_flipped_bit_in_a_checkpoint_is_found(command, run, with_checksum):
    flip_bit(run / "checkpoints" / "step-00000009", with_checksum)
    found = replayed(command, run, "--from", "6")
    assert found["first_difference"].startswith("step 9:")
    assert "checkpoint" in found["first_difference"]
    # as the beginning of a replay
    found = replayed(command, run, "--from", "9")
    assert ("is damaged" if not with_checksum else "step 10") in found["first_difference"]


def test_a_run_with_its_last_checkpoint_only_is_repeated_from_the_beginning(command, run):
    for step in (3, 6, 9):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    found = replayed(command, run)
    assert (found["from_step"], found["to_step"], found["holds"]) == (0, 5, True)
    assert "--steps 10 reaches that of step 10" in found["remarks"][0]


def test_a_metric_that_was_not_recorded_is_shown_as_empty(command, run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("grad_norm")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = command("replay", run, "--from", "9", "--steps", "1")
    assert result.returncode == 0, result.stderr
    assert "holds" in result.stdout and "not finite" not in result.stdout


def test_what_cannot_be_repeated_is_explained(command, run):
    for options, text in (
        (("--from", "4"), "--from 0, 3, 6, 9 or 10"),
        (("--from", "10"), "recorded no step after 10"),
    ):
        result = command("replay", run, *options)
        assert result.returncode == 2
        assert text in result.stderr
    edit_line(run, 7, step=6)
    result = command("replay", run, "--from", "6", "--steps", "1")
    assert (result.returncode, "give --steps 2" in result.stderr) == (2, True)


def test_changed_data_is_named(command, run):
    result = command("replay", run, "--set", "data.sources=[{path='builtin:synthetic'}]")
    assert result.returncode == 2
    assert "has changed since the run began (fingerprint" in result.stderr


class Spoil(arriero.Hook):
    """Make the loss of a step infinite, once."""

    on_all_ranks = True

    def __init__(self, step, marker):
        self._step, self._marker = step, marker

    def on_step(self, session, step, tokens):
        passes = session.passes
        if step == self._step - 1 and not self._marker.exists():
            self._marker.touch()
            original = type(passes).gradients

            def spoiled(batch, scale):
                del passes.gradients
                return original(passes, batch, scale) * float("nan")

            passes.gradients = spoiled


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_batches_that_the_guard_rejected_are_treated_as_in_the_run(command, corpus_cache, tmp_path, policy):
    changes = {
        "guard.nonfinite": policy,
        "data.phases": [],
        "train.horizon": "8 steps",
        "observe.log_every": 1,
    }
    run = train(tmp_path / "runs", corpus_cache, hooks=[Spoil(5, tmp_path / "spoiled")], **changes)
    found = replayed(command, run, "--from", "3", "--steps", "5")
    if policy == "rollback":
        # the batch was skipped when the steps were repeated
        assert found["holds"]
        assert found["steps"][1]["loss"] == {"recorded": None, "replayed": None, "difference": 0.0}
    else:
        # a fault of the device is found: the batch has a finite loss
        assert found["first_difference"].startswith("step 5: loss not finite recorded")


def test_a_lora_run_is_repeated(command, corpus_cache, tmp_path):
    changes = {"lora.rank": 4, "data.phases": [], "train.horizon": "4 steps", "checkpoint.every": "2 steps"}
    base = train(tmp_path / "base", corpus_cache, **{"data.phases": [], "train.horizon": "1 steps"})
    run = train(tmp_path / "runs", corpus_cache, **changes, **{"checkpoint.start_from": str(base / "model")})
    assert replayed(command, run)["holds"]
    assert replayed(command, run, "--from", "0", "--steps", "2")["holds"]
