"""Predicted memory matches what a training step on the CPU uses; tests/gpu has the same for a GPU."""

from itertools import product

import pytest
import torch

from arriero.config.load import load_run
from arriero.model.family import build_model
from arriero.model.presets import expand, load_preset
from memory_gauge import LiveTensors, measured_bytes, predicted_bytes

pytestmark = pytest.mark.slow
PRECISIONS = {
    "fp32": ["precision.compute=fp32"],
    "bf16 with fp32 master weights": ["precision.compute=bf16"],
    "bf16 weights": ["precision.compute=bf16", "precision.master=bf16"],
}
STATES = ("fp32", "bf16", "int8")


@pytest.fixture
def tiny(tmp_path, synthetic_cache):
    """Return a function that makes a small run of one micro-batch per step."""
    # the quantiles that weights are drawn from are cached per process and belong to no run
    build_model(load_preset("llama-test")).init_weights(1)

    def config(*sets, width=64, layers=1, sequences=1, seq_len=16):
        heads = width // 64
        keys = [
            *(
                f"model.{name}={value}"
                for name, value in (("dim", width), ("ffn", 3 * width), ("layers", layers))
            ),
            *(f"model.heads={heads}", f"model.kv_heads={heads}", "model.vocab_size=4096", "model.tied=false"),
            *("data.sources=[{path='builtin:synthetic'}]", f"data.cache={synthetic_cache}"),
            *(f"data.seq_len={seq_len}", f"train.batch={sequences * seq_len} tok"),
            *(f"train.micro_batch={sequences}", "train.horizon=2 steps", "schedule.warmup=1 steps"),
            *("run.device=cpu", f"run.dir={tmp_path}", "precision.compile=false", "eval.heldout=false"),
            *("eval.every=false", "observe.tensorboard=false", "checkpoint.at_end=false"),
            "checkpoint.export=false",
        ]
        return load_run(None, [*keys, *sets], expand).config

    return config


@pytest.mark.parametrize(("precision", "state"), [*product(PRECISIONS, STATES)])
def test_state_is_predicted_exactly(tiny, precision, state):
    config = tiny(*PRECISIONS[precision], f"optim.state={state}")
    measured, predicted = measured_bytes(config, on_gpu=False), predicted_bytes(config)
    assert measured.state == pytest.approx(predicted.state, rel=0.02)
    assert measured.peak >= measured.state


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("fp32", "none"), ("fp32", "full"), ("fp32", "selective"), ("bf16 weights", "attention")],
)
def test_peak_is_not_underestimated(tiny, precision, kind):
    """A run that is predicted to fit must fit; the prediction may be up to twice the peak."""
    keys = [*PRECISIONS[precision], f"memory.activation_checkpointing={kind}"]
    config = tiny(*keys, width=256, layers=4, sequences=2, seq_len=512)
    measured, predicted = measured_bytes(config, on_gpu=False), predicted_bytes(config)
    assert 0.5 * predicted.peak < measured.peak < 1.02 * predicted.peak


def test_activation_checkpointing_reduces_the_measured_peak(tiny):
    none, full = (
        measured_bytes(
            tiny(f"memory.activation_checkpointing={kind}", layers=4, sequences=4, seq_len=256), on_gpu=False
        ).peak
        for kind in ("none", "full")
    )
    assert full < none


def test_live_tensors_count_a_storage_once_until_it_is_freed():
    with LiveTensors() as live:
        a = torch.zeros(1000)
        view = a.view(10, 100)
        assert live.now() == 4000
        b = view * 2
        assert live.now() == 8000
        del a, view
        assert live.now() == 4000
        del b
    assert (live.now(), live.peak()) == (0, 8000)


def test_live_tensors_count_what_only_the_autograd_graph_holds():
    weight = torch.ones(1000, requires_grad=True)
    with LiveTensors() as live:
        loss = (weight * 2).exp().sum()
        kept = live.now()
        loss.backward()
    # the result of exp and the loss
    assert kept == 4000 + 4
    assert weight.grad is not None
