"""Run directories and checkpoints of earlier versions, whose run.toml has keys that were renamed since."""

import hashlib
import json
from dataclasses import replace

import pytest

from arriero.checkpoint.directory import File, read_manifest

SETS = [
    "model.preset=llama-test",
    "model.vocab_size=4096",
    "data.seq_len=64",
    "train.batch=256 tok",
    "schedule.kind=constant",
    "schedule.warmup=false",
    "eval.heldout=false",
    "eval.every=false",
    "observe.log_every=1",
    "observe.sample=false",
    "observe.tensorboard=false",
    "memory.activation_checkpointing=full",
]


@pytest.fixture
def flags(corpus_cache):
    sets = [*SETS, f"data.cache='{corpus_cache}'"]
    return [part for each in sets for part in ("--set", each)]


def test_run_of_an_earlier_version_resumes_and_converts(arriero, flags, tmp_path):
    first = arriero("train", *flags, "--set", "train.horizon=2 steps")
    assert first.returncode == 0, first.stderr
    run = tmp_path / "runs" / "demo"
    checkpoint = run / "checkpoints" / "step-00000002"
    for file in (run / "run.toml", checkpoint / "run.toml"):
        text = file.read_text()
        assert "activation_checkpointing" in text
        file.write_text(text.replace("activation_checkpointing", "remat"))
    old, manifest = (checkpoint / "run.toml").read_bytes(), read_manifest(checkpoint)
    files = {**manifest.files, "run.toml": File(len(old), hashlib.sha256(old).hexdigest())}
    (checkpoint / "manifest.json").write_bytes(replace(manifest, files=files).to_json())
    again = arriero("train", *flags, "--set", "train.horizon=4 steps", "--set", "checkpoint.export=false")
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert "activation_checkpointing" in (run / "run.toml").read_text()
    converted = arriero("ckpt", "convert", checkpoint, tmp_path / "out", "--to", "hf")
    assert converted.returncode == 0, converted.stderr
