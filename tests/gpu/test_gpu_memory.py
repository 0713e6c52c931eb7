"""Predicted memory matches what torch allocates on the GPU."""

import pytest

from arriero.config.load import load_run
from arriero.model.presets import expand
from gpu.alone import alone
from memory_gauge import measured_bytes, predicted_bytes

pytestmark = pytest.mark.gpu

SETS = [
    "model.dim=2048",
    "model.layers=8",
    "model.ffn=6144",
    "model.heads=32",
    "model.kv_heads=32",
    "model.tied=false",
    "data.sources=[{path='builtin:synthetic'}]",
    "model.max_seq_len=2048",
    "data.seq_len=2048",
    "train.batch=8192 tok",
    "train.micro_batch=4",
    "train.horizon=2 steps",
    "schedule.warmup=1 steps",
    "run.device=cuda",
    "precision.compile=false",
    "eval.heldout=false",
    "eval.every=false",
    "observe.tensorboard=false",
    "checkpoint.at_end=false",
    "checkpoint.export=false",
]


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
@pytest.mark.parametrize("precision", [["optim.state=fp32"], ["precision.master=bf16", "optim.state=int8"]])
def test_memory_of_a_step_is_predicted(synthetic_cache, tmp_path, precision, kind):
    places = [f"data.cache={synthetic_cache}", f"run.dir={tmp_path}"]
    config = load_run(
        None, [*SETS, *places, *precision, f"memory.activation_checkpointing={kind}"], expand
    ).config
    measured, predicted = alone(lambda: (measured_bytes(config, True), predicted_bytes(config)))
    assert measured.state == pytest.approx(predicted.state, rel=0.05)
    assert 0.5 * predicted.peak < measured.peak < 1.05 * predicted.peak
