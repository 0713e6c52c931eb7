"""Stages are cut where the dearest of them is cheapest."""

from itertools import combinations, pairwise

import pytest

from arriero.model.presets import load_preset, resolve
from arriero.plan.stages import cut_stages, stage_costs


def costs(spec, seq_len, cuts):
    embedding, block, head = stage_costs(spec, seq_len)
    ends = {cuts[0]: embedding, cuts[-1]: head} if len(cuts) > 1 else {cuts[0]: embedding + head}
    return [len(cut) * block + ends.get(cut, 0.0) for cut in cuts]


def every_cut(layers, stages):
    for inner in combinations(range(1, layers), stages - 1):
        yield [range(a, b) for a, b in pairwise((0, *inner, layers))]


@pytest.mark.parametrize("vocab_size", [64, 4096, 20000, 128256])
@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (4, 2), (5, 3), (8, 4), (9, 9), (10, 4)])
def test_no_other_cut_has_a_cheaper_dearest_stage(layers, stages, vocab_size):
    spec = resolve("llama-test", {"layers": layers, "vocab_size": vocab_size})
    found = cut_stages(spec, 64, stages)
    dearest = min(max(costs(spec, 64, cuts)) for cuts in every_cut(layers, stages))
    assert max(costs(spec, 64, found)) == dearest


@pytest.mark.parametrize(("layers", "stages"), [(4, 4), (7, 3), (32, 5), (126, 16)])
def test_stages_follow_each_other_and_none_is_empty(layers, stages):
    cuts = cut_stages(resolve("llama-test", {"layers": layers}), 64, stages)
    assert [i for cut in cuts for i in cut] == list(range(layers))
    assert len(cuts) == stages
    assert all(cuts)


def test_a_large_head_takes_blocks_off_the_last_stage():
    small = cut_stages(resolve("llama-test", {"layers": 8, "vocab_size": 64}), 64, 2)
    large = cut_stages(resolve("llama-test", {"layers": 8, "vocab_size": 2500}), 64, 2)
    assert [len(cut) for cut in small] == [4, 4]
    assert len(large[1]) < len(large[0])


def test_of_equally_dear_cuts_the_most_even_is_taken():
    spec = resolve("llama-test", {"layers": 10, "vocab_size": 64})
    assert sorted(map(len, cut_stages(spec, 64, 4))) == [2, 2, 3, 3]


def test_the_llamas_of_the_papers_are_cut_as_their_makers_did():
    """Llama 3.1 405B over 16 stages: the last has a block less, for the head."""
    cuts = cut_stages(load_preset("llama3.1-405b"), 8192, 16)
    assert max(map(len, cuts)) == 8
    assert len(cuts[-1]) < 8
