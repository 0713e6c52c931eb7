"""Every layout reproduces the losses of one process: the quick cases. `make parity` runs all."""

import math
from dataclasses import replace

import pytest
import torch

from arriero.bench.cases import FP32, MODELS, Case, axes, cases
from arriero.bench.parity import Parity, Verdict, nan_max, parity_page, weight_difference
from arriero.plan.layout import AXES

QUICK = {
    "llama": [case.title for case in cases("llama") if case.quick],
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


MAKE_QUICK = {("llama", "one axis: dp_shard 2"), ("llama", "one axis: tp 2")}
QUICK_CASES = [
    pytest.param(model, title, marks=() if (model, title) in MAKE_QUICK else pytest.mark.slow)
    for model in MODELS
    for title in QUICK.get(model, [])
]


@pytest.mark.parametrize(("model", "title"), QUICK_CASES)
def test_a_layout_reproduces_losses_gradients_and_weights_of_one_process(proofs, model, title):
    case = next(case for case in cases(model) if case.title == title)
    assert case.tolerance == FP32
    verdict = proofs[model].compare(case)
    assert verdict.holds, verdict


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
    assert weight_difference(expected | ignored, expected | {k: -v for k, v in ignored.items()}) == 0.0


def test_the_page_marks_failed_cases():
    text = parity_page({"llama": [verdict(), verdict(loss=0.5)]}, "cpu")
    assert "**1 of 2 cases hold**" in text
    assert "| n | 2 | 5.0e-01 | 0.0e+00 | 0.0e+00 | 1 | **fails** |" in text
    assert torch.__version__ in text
    assert "721,472 parameters" in text
