"""Every layout reproduces the losses of one process: the quick cases. `make parity` runs all."""

import math
from dataclasses import replace

import pytest
import torch

from arriero.bench.cases import BASE, FP32, MODELS, Case, axes, cases
from arriero.bench.parity import Parity, Verdict, nan_max, parity_page, weight_difference, without_gradient
from arriero.model.presets import load_preset, resolve
from arriero.plan.layout import AXES

IN_MAKE_QUICK = ["one axis: dp_shard 2", "one axis: tp 2"]
QUICK = {
    "llama": [case.title for case in cases("llama") if case.quick and case.title not in IN_MAKE_QUICK],
    "gpt2": ["one axis: tp 2", "one axis: pp 2", "two axes: dp_shard 2 x tp 2"],
    "mistral": ["document masks: cp 2"],
    "qwen2": ["one axis: tp 2"],
    "qwen3": ["two axes: dp_shard 2 x tp 2"],
    "diffllama": ["one axis: tp 2"],
    "mamba2": ["document masks: tp 2"],
    "bamba": ["two axes: dp_shard 2 x tp 2", "activation checkpointing: selective"],
}


@pytest.fixture(scope="module")
def proofs(synthetic_cache):
    return {model: Parity(model, synthetic_cache) for model in MODELS}


def differing(proof, model, titles):
    """Compare the cases, which share processes, and return those that do not hold."""
    chosen = [case for case in cases(model) if case.title in titles]
    assert len(chosen) == len(titles) and all(case.tolerance == FP32 for case in chosen)
    return [verdict for verdict in proof.compare_all(chosen) if not verdict.holds]


def test_shards_and_tensor_parallel_ranks_reproduce_one_process(proofs):
    assert not differing(proofs["llama"], "llama", IN_MAKE_QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_layouts_reproduce_losses_gradients_and_weights_of_one_process(proofs, model):
    assert not differing(proofs[model], model, QUICK[model])


def test_a_case_that_fails_is_reported_and_the_next_ones_run(synthetic_cache):
    """They share processes until one fails."""
    good, bad = (Case("g", name, axes(**{name: 2})) for name in ("dp_shard", "tp"))
    bad = replace(bad, sets={**bad.sets, "model.heads": 3, "model.dim": 48, "model.kv_heads": 3})
    found = list(
        Parity("llama", synthetic_cache, {"train.horizon": "2 steps"}).compare_all([good, bad, good])
    )
    assert [verdict.holds for verdict in found] == [True, False, True], found
    assert "tp" in found[1].error


def test_the_cases_cover_every_pair_of_axes_and_every_schedule_once():
    for model in MODELS:
        titles = [case.title for case in cases(model)]
        assert len(titles) == len(set(titles))
        if model not in ("llama", "gpt2"):
            axes_alone = {title for title in titles if title.startswith("one axis")}
            assert axes_alone >= {f"one axis: {axis} 2" for axis in AXES}
            continue
        assert len([title for title in titles if title.startswith("two axes")]) == 10
        assert len([title for title in titles if title.startswith("schedules")]) == 14


def verdict(**changes):
    return replace(Verdict(Case("g", "n", axes(tp=2)), 0.0, 0.0, 0.0, 1.0), **changes)


@pytest.mark.parametrize(
    "changes",
    [{"loss": 1.1e-4}, {"norm": 1.1e-5}, {"weights": 1.1e-4}, {"error": "died"}, {"weights": math.nan}],
)
def test_a_case_holds_only_if_every_difference_is_within_its_limit(changes):
    assert verdict().holds
    assert not verdict(**changes).holds


def test_nan_is_not_ignored():
    assert math.isnan(nan_max([0.0, math.nan, 1.0]))
    assert nan_max([0.0, 1.0]) == 1.0


def test_weights_are_compared_by_name_over_all_blocks():
    """A small tensor counts as much as a large one."""
    expected = {"embedding.weight": torch.full((1000,), 100.0)}
    expected |= {f"blocks.{i}.norm.weight": torch.ones(4) for i in range(2)}
    found = expected | {"blocks.1.norm.weight": torch.tensor([1.0, 1.0, 1.0, 1.2])}
    assert weight_difference(found, expected) == pytest.approx(0.2 / math.sqrt(8))
    assert weight_difference(expected, expected) == 0.0
    assert math.isnan(weight_difference(found | {"more": torch.ones(1)}, expected))
    ignored = {"blocks.0.attention.k.bias": torch.ones(2)}
    changed = expected | ignored, expected | {k: -v for k, v in ignored.items()}
    assert weight_difference(*changed, without_gradient(load_preset("gpt2-test"))) == 0.0
    assert weight_difference(*changed, without_gradient(load_preset("qwen2-test"))) == 2.0


def test_the_page_marks_failed_cases():
    text = parity_page({"llama": [verdict(), verdict(loss=0.5)]}, "cpu")
    assert "**1 of 2 cases hold**" in text
    assert "| n | 2 | 5.0e-01 | 0.0e+00 | 0.0e+00 | 1 | **fails** |" in text
    assert torch.__version__ in text
    spec = resolve("llama-test", {"layers": BASE["model.layers"], "vocab_size": BASE["model.vocab_size"]})
    assert f"{spec.parameters:,} parameters" in text
