"""Our arithmetic about pipelines is torch's: the stages of a rank, the micro-batches that may be."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from arriero.config.schema import ParallelSection
from arriero.errors import UserError
from arriero.parallel.spawn import run_ranks
from arriero.plan.schedules import (
    SCHEDULES,
    allowed_micro_batches,
    micro_batch_counts,
    stages_of,
    stages_per_rank,
)

EXACT = {"1f1b", "interleaved-1f1b", "zero-bubble", "dualpipev"}
COUNTS = range(1, 14)


def test_the_run_file_names_every_schedule():
    named = ParallelSection.model_fields["schedule"].annotation.__args__
    assert set(named) == set(SCHEDULES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_hold_all_stages_and_each_once(name, ranks):
    per_rank = stages_per_rank(name, None)
    held = [stage for rank in range(ranks) for stage in stages_of(name, rank, ranks, per_rank)]
    assert sorted(held) == list(range(ranks * per_rank))


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_a_v_begins_and_ends_on_the_first_rank(name):
    assert stages_of(name, 0, 4, 2) == [0, 7]
    assert stages_of(name, 3, 4, 2) == [3, 4]


@pytest.mark.parametrize(
    ("name", "asked", "words"),
    [
        ("1f1b", 2, "needs 1 stages a rank"),
        ("zbv", 3, "needs 2 stages a rank"),
        ("interleaved-1f1b", 1, "needs two or more stages a rank"),
    ],
)
def test_stages_a_schedule_cannot_use_are_refused(name, asked, words):
    with pytest.raises(UserError, match=words):
        stages_per_rank(name, asked)


def test_looped_schedules_take_more_stages():
    assert stages_per_rank("interleaved-1f1b", 3) == 3
    assert stages_of("interleaved-1f1b", 1, 2, 3) == [1, 3, 5]


def test_counts_divide_the_sequences_and_are_allowed():
    assert list(micro_batch_counts("1f1b", 12, 3, 1)) == [3, 4, 6, 12]
    assert list(micro_batch_counts("gpipe", 12, 3, 1)) == [1, 2, 3, 4, 6, 12]
    assert list(micro_batch_counts("interleaved-1f1b", 10, 2, 2)) == [1, 2, 10]
    assert list(micro_batch_counts("zbv", 2, 2, 2)) == []


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_torch_takes_what_we_allow_and_places_stages_as_we_do(name, ranks):
    taken, places = run_ranks(lambda: torchs_answers(name, ranks), 1, leader_prints=False)
    per_rank = stages_per_rank(name, None)
    ours = {count for count in COUNTS if allowed_micro_batches(name, count, ranks, per_rank)}
    assert ours
    assert ours <= taken
    if name in EXACT:
        assert ours == taken
    assert {s: r for r in range(ranks) for s in stages_of(name, r, ranks, per_rank)} == places


def torchs_answers(name, ranks):
    """Which counts of micro-batches torch's schedule takes, and the rank it gives each stage."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    per_rank, taken, places = stages_per_rank(name, None), set(), {}
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
