"""`bench step` forks: the process it begins in must not ask the GPU anything."""

import time

import pytest

from arriero.bench.measure import StepCounts
from arriero.bench.step import benchmark
from arriero.config.load import load_run
from arriero.model.presets import expand
from gpu.alone import alone

pytestmark = pytest.mark.gpu


def test_the_gate_of_an_earlier_result_serves_the_next(synthetic_cache, monkeypatch):
    sets = [
        "model.preset=llama-test",
        "model.vocab_size=4096",
        "data.sources=[{path='builtin:synthetic'}]",
        f"data.cache={synthetic_cache}",
        "data.seq_len=64",
        "train.batch=512 tok",
        "precision.compile=false",
    ]
    config = load_run(None, sets, expand).config

    def measured(earlier):
        return benchmark(config, "tiny", StepCounts(1, 3, 0, time.time()), 1, True, earlier, lambda _: None)

    def checked_again(*_):
        raise AssertionError("the loss was checked again")

    def work():
        first = measured(None)
        monkeypatch.setattr("arriero.bench.step.check_loss", checked_again)
        return first, measured(first)

    first, second = alone(work)
    assert first.gate.holds
    assert second.gate == first.gate
    assert second.timing.tokens_per_s > 0
