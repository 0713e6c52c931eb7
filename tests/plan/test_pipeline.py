"""Pipeline stages and schedules: balanced cuts, and the same rules as torch's schedules."""

from itertools import combinations, pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from arriero.config.schema import ParallelSection
from arriero.model.presets import load_preset, resolve
from arriero.parallel.spawn import run_ranks
from arriero.plan.layout import (
    SCHEDULES,
    allowed_micro_batches,
    cut_stages,
    micro_batch_counts,
    stage_costs,
    stages_of,
)

EXACT = {"1f1b", "interleaved-1f1b", "zero-bubble", "dualpipev"}
COUNTS = range(1, 14)


def test_run_file_accepts_every_schedule():
    named = ParallelSection.model_fields["schedule"].annotation.__args__
    assert set(named) == set(SCHEDULES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_hold_each_stage_once(name, ranks):
    per_rank = SCHEDULES[name].stages_per_rank
    held = [stage for rank in range(ranks) for stage in stages_of(name, rank, ranks, per_rank)]
    assert sorted(held) == list(range(ranks * per_rank))


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_v_shaped_schedules_put_first_and_last_stage_on_rank_0(name):
    assert stages_of(name, 0, 4, 2) == [0, 7]
    assert stages_of(name, 3, 4, 2) == [3, 4]


@pytest.mark.parametrize(
    ("name", "allowed"), [("1f1b", [1]), ("zbv", [2]), ("interleaved-1f1b", [2, 3, 4]), ("gpipe", [1])]
)
def test_looped_schedules_allow_more_stages_per_rank(name, allowed):
    assert [n for n in range(1, 5) if SCHEDULES[name].allows_stages(n)] == allowed


def test_stages_of_a_looped_schedule_alternate_between_ranks():
    assert stages_of("interleaved-1f1b", 1, 2, 3) == [1, 3, 5]


def test_micro_batch_counts_divide_the_sequences_and_suit_the_schedule():
    assert list(micro_batch_counts("1f1b", 12, 3, 1)) == [3, 4, 6, 12]
    assert list(micro_batch_counts("gpipe", 12, 3, 1)) == [1, 2, 3, 4, 6, 12]
    assert list(micro_batch_counts("interleaved-1f1b", 10, 2, 2)) == [1, 2, 10]
    assert list(micro_batch_counts("zbv", 2, 2, 2)) == []


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_torch_accepts_allowed_counts_and_places_stages_alike(name, ranks):
    taken, places = run_ranks(lambda: counts_and_places_of_torch(name, ranks), 1, leader_prints=False)
    per_rank = SCHEDULES[name].stages_per_rank
    ours = {count for count in COUNTS if allowed_micro_batches(name, count, ranks, per_rank)}
    assert ours
    assert ours <= taken
    if name in EXACT:
        assert ours == taken
    assert {s: r for r in range(ranks) for s in stages_of(name, r, ranks, per_rank)} == places


def counts_and_places_of_torch(name, ranks):
    """Return the micro-batch counts that torch's schedule accepts, and the rank of each stage."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    per_rank, taken, places = SCHEDULES[name].stages_per_rank, set(), {}
    for count in COUNTS:
        stages = [
            PipelineStage(torch.nn.Linear(1, 1), number, ranks * per_rank, torch.device("cpu"))
            for number in stages_of(name, 0, ranks, per_rank)
        ]
        try:
            get_schedule_class(SCHEDULES[name].torch_name)(
                stages if per_rank > 1 else stages[0], count, loss_fn=torch.sum
            )
        except ValueError:
            continue
        taken.add(count)
        places = dict(stages[0].stage_index_to_group_rank)
    return taken, places


def costs(spec, seq_len, cuts):
    embedding, block, head = stage_costs(spec, seq_len)
    ends = {cuts[0]: embedding, cuts[-1]: head} if len(cuts) > 1 else {cuts[0]: embedding + head}
    return [len(cut) * block + ends.get(cut, 0.0) for cut in cuts]


def every_cut(layers, stages):
    for inner in combinations(range(1, layers), stages - 1):
        yield [range(a, b) for a, b in pairwise((0, *inner, layers))]


@pytest.mark.parametrize("vocab_size", [64, 4096, 20000, 128256])
@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (4, 2), (5, 3), (8, 4), (9, 9), (10, 4)])
def test_no_other_cut_has_a_cheaper_most_expensive_stage(layers, stages, vocab_size):
    spec = resolve("llama-test", {"layers": layers, "vocab_size": vocab_size})
    found = cut_stages(spec, 64, stages)
    smallest = min(max(costs(spec, 64, cuts)) for cuts in every_cut(layers, stages))
    assert max(costs(spec, 64, found)) == smallest


@pytest.mark.parametrize(("layers", "stages"), [(4, 4), (7, 3), (32, 5), (126, 16)])
def test_stages_are_consecutive_and_not_empty(layers, stages):
    cuts = cut_stages(resolve("llama-test", {"layers": layers}), 64, stages)
    assert [i for cut in cuts for i in cut] == list(range(layers))
    assert len(cuts) == stages
    assert all(cuts)


def test_large_head_leaves_fewer_blocks_to_the_last_stage():
    small = cut_stages(resolve("llama-test", {"layers": 8, "vocab_size": 64}), 64, 2)
    large = cut_stages(resolve("llama-test", {"layers": 8, "vocab_size": 2500}), 64, 2)
    assert [len(cut) for cut in small] == [4, 4]
    assert len(large[1]) < len(large[0])


def test_most_even_of_equal_cuts_is_chosen():
    spec = resolve("llama-test", {"layers": 10, "vocab_size": 64})
    assert sorted(map(len, cut_stages(spec, 64, 4))) == [2, 2, 3, 3]


def test_llama_405b_is_cut_as_published():
    """The last of 16 stages has one block fewer, because it holds the head."""
    cuts = cut_stages(load_preset("llama3.1-405b"), 8192, 16)
    assert max(map(len, cuts)) == 8
    assert len(cuts[-1]) < 8
