"""Any layout, the same loss: the quick part of the matrix. `make parity` runs all of it."""

import math
from dataclasses import replace

import pytest
import torch

from arriero.bench.cases import FP32, MODELS, Case, cases, layout
from arriero.bench.parity import Parity, Verdict, _largest, _weights_apart
from arriero.bench.parity_page import page

QUICK = {
    "llama": [case.title for case in cases("llama") if case.quick],
    "gpt2": ["one axis: tp 2", "one axis: pp 2", "two axes: dp_shard 2 x tp 2"],
}


@pytest.fixture(scope="module")
def proofs(synthetic_cache):
    return {model: Parity(model, synthetic_cache) for model in MODELS}


MAKE_QUICK = {("llama", "one axis: dp_shard 2"), ("llama", "one axis: tp 2")}
QUICK_CASES = [
    pytest.param(model, title, marks=() if (model, title) in MAKE_QUICK else pytest.mark.slow)
    for model in MODELS
    for title in QUICK[model]
]


@pytest.mark.parametrize(("model", "title"), QUICK_CASES)
def test_a_layout_has_the_losses_gradient_and_weights_of_one_process(proofs, model, title):
    case = next(case for case in cases(model) if case.title == title)
    assert case.tolerance == FP32
    verdict = proofs[model].judge(case)
    assert verdict.holds, verdict


def test_the_matrix_has_every_axis_pair_schedule_and_no_case_twice():
    for model in MODELS:
        titles = [case.title for case in cases(model)]
        assert len(titles) == len(set(titles))
        assert len([title for title in titles if title.startswith("two axes")]) == 10
        assert len([title for title in titles if title.startswith("schedules")]) == 14


def verdict(**changes):
    return replace(Verdict(Case("g", "n", layout(tp=2)), 0.0, 0.0, 0.0, 1.0), **changes)


@pytest.mark.parametrize(
    "changes",
    [{"loss": 1.1e-4}, {"norm": 1.1e-5}, {"weights": 1.1e-4}, {"error": "died"}, {"weights": math.nan}],
)
def test_a_verdict_holds_only_if_everything_does(changes):
    assert verdict().holds
    assert not verdict(**changes).holds


def test_a_difference_that_is_not_a_number_is_not_passed_over():
    assert math.isnan(_largest([0.0, math.nan, 1.0]))
    assert _largest([0.0, 1.0]) == 1.0


def test_weights_are_compared_kind_by_kind():
    """A small kind is not lost beside a large one; blocks of one kind are taken together."""
    expected = {"embedding.weight": torch.full((1000,), 100.0)}
    expected |= {f"blocks.{i}.norm.weight": torch.ones(4) for i in range(2)}
    found = expected | {"blocks.1.norm.weight": torch.tensor([1.0, 1.0, 1.0, 1.2])}
    assert _weights_apart(found, expected) == pytest.approx(0.2 / math.sqrt(8))
    assert _weights_apart(expected, expected) == 0.0
    assert math.isnan(_weights_apart(found | {"more": torch.ones(1)}, expected))
    unseen = {"blocks.0.attention.k.bias": torch.ones(2)}
    assert _weights_apart(expected | unseen, expected | {k: -v for k, v in unseen.items()}) == 0.0


def test_the_page_shows_what_failed():
    text = page({"llama": [verdict(), verdict(loss=0.5)]}, "cpu")
    assert "**1 of 2 cases hold**" in text
    assert "| n | 2 | 5.0e-01 | 0.0e+00 | 0.0e+00 | 1 | **fails** |" in text
    assert torch.__version__ in text
    assert "721,472 parameters" in text
