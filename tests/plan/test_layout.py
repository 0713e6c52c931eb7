"""Degrees become a layout or a sentence; ranks fall into groups without rest."""

from itertools import product

import pytest

from arriero.config.schema import ParallelSection
from arriero.errors import UserError
from arriero.model.presets import resolve as model_of
from arriero.plan.layout import (
    AXES,
    Layout,
    Work,
    divide_context,
    obstacles,
    refuse_illegal,
    resolve,
    tokens_divisor,
)

SPEC = model_of("llama-test", {"layers": 4, "vocab_size": 512})
WORK = Work(SPEC, seq_len=64, sequences=8)


def section(**degrees):
    return ParallelSection(**degrees)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 5120])
def test_alone_the_shards_take_every_rank(ranks):
    assert resolve(section(), ranks) == Layout(dp_shard=ranks)


@pytest.mark.parametrize("axis", AXES)
def test_any_one_degree_may_take_what_the_others_leave(axis):
    others = {other: 2 for other in AXES if other != axis}
    assert resolve(section(**others, **{axis: -1}), 48) == Layout(**others, **{axis: 3})


@pytest.mark.parametrize(
    ("degrees", "ranks", "words"),
    [
        ({"dp_shard": 1, "tp": 2}, 3, r"asks for 2 ranks \(tp 2\) and this run has 3"),
        ({"tp": 2}, 3, r"asks for a multiple of 2 ranks \(tp 2\) and this run has 3"),
        ({"tp": -1}, 4, "parallel.dp_shard and parallel.tp are both -1"),
        ({"dp_shard": 1, "cp": 2, "pp": 3}, 1, r"asks for 6 ranks \(pp 3 x cp 2\) and this run has 1"),
    ],
)
def test_degrees_that_do_not_make_up_the_ranks_are_refused(degrees, ranks, words):
    with pytest.raises(UserError, match=words):
        resolve(section(**degrees), ranks)


@pytest.mark.parametrize(
    ("layout", "changed", "words", "todo"),
    [
        (Layout(tp=3), {}, r"model.heads \(4\) does not divide over tp 3", "divides it"),
        (Layout(tp=4), {}, r"model.kv_heads \(2\) does not divide over tp 4", "divides it"),
        (Layout(tp=2), {"ffn": 191}, r"model.ffn \(191\) does not divide over tp 2", "divides it"),
        (
            Layout(tp=4),
            {"vocab_size": 6, "kv_heads": 4},
            "6 leaves one of tp 4 ranks without a row",
            "smaller tp",
        ),
        (Layout(pp=8), {"stages": 8}, "4 layers cannot fill 8 pipeline stages", "parallel.pp"),
        (Layout(cp=2), {"seq_len": 63}, r"data.seq_len \(63\) does not divide over cp 2", "multiple of 2"),
        (Layout(cp=2, tp=2), {"seq_len": 62}, r"does not divide over cp 2 x tp 2", "multiple of 4"),
        (Layout(cp=2), {"seq_len": 62, "context": "ring"}, "cp 2, in two pieces each", "multiple of 4"),
        (Layout(dp_shard=9), {}, "8 sequences leaves some of the 9 data-parallel ranks", "train.batch"),
        (Layout(dp_shard=4, dp_replicate=4), {}, "some of the 16 data-parallel ranks", "train.batch"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would_mend_it(layout, changed, words, todo):
    shape = {key: value for key, value in changed.items() if key in ("ffn", "vocab_size", "kv_heads")}
    spec = model_of("llama-test", {"layers": 4} | shape)
    rest = {"seq_len": 64, "sequences": 8} | {k: v for k, v in changed.items() if k not in shape}
    with pytest.raises(UserError, match=f"{words}.*{todo}"):
        refuse_illegal(layout, Work(spec, **rest))


def test_all_reasons_against_a_layout_are_told():
    with pytest.raises(
        UserError,
        match=r"dp_shard 9 x tp 3 is not possible: model.heads .*, and model.kv_heads .*, and a batch of 8",
    ):
        refuse_illegal(Layout(tp=3, dp_shard=9), WORK)


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2, 2, 2, 2), Layout(pp=4), Layout(cp=4, tp=2)])
def test_what_divides_is_allowed(layout):
    assert list(obstacles(layout, Work(SPEC, 64, 8, stages=layout.pp))) == []


def test_a_vocabulary_need_not_divide():
    odd = model_of("llama-test", {"vocab_size": 511})
    assert list(obstacles(Layout(tp=2), Work(odd, 64, 8))) == []


def layouts(most=3):
    return [Layout(*degrees) for degrees in product(range(1, most + 1), repeat=len(AXES))]


@pytest.mark.parametrize("axes", [("pp",), ("tp",), ("cp",), ("dp_replicate", "dp_shard", "cp"), AXES])
def test_groups_part_all_ranks_and_differ_in_nothing_else(axes):
    for layout in layouts(2):
        groups = layout.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))
        for group in groups:
            others = {tuple(layout.coordinates(r)[a] for a in AXES if a not in axes) for r in group}
            own = {tuple(layout.coordinates(r)[a] for a in axes) for r in group}
            assert len(others) == 1
            assert len(own) == len(group)


def test_every_rank_has_its_own_place_and_neighbours_talk_most():
    for layout in layouts():
        places = [layout.coordinates(rank) for rank in range(layout.ranks)]
        assert len({tuple(place[axis] for axis in AXES) for place in places}) == layout.ranks
        assert [place["tp"] for place in places[: layout.tp]] == list(range(layout.tp))
        assert places[-1] == {axis: getattr(layout, axis) - 1 for axis in AXES}


@pytest.mark.parametrize(
    ("cp", "heads", "kv_heads", "divided"),
    [
        (1, 4, 2, (1, 1)),
        (2, 4, 2, (2, 1)),
        (4, 4, 2, (4, 1)),
        (8, 4, 2, (4, 2)),
        (3, 4, 2, (1, 3)),
        (6, 4, 2, (2, 3)),
        (6, 12, 4, (2, 3)),
        (5, 5, 1, (5, 1)),
    ],
)
def test_ulysses_goes_as_far_as_the_heads_divide_and_a_ring_beyond(cp, heads, kv_heads, divided):
    assert divide_context(cp, heads, kv_heads) == divided
    assert divide_context(cp, heads, kv_heads, "ring") == (1, cp)
    ulysses, ring = divided
    assert heads % ulysses == 0
    assert ulysses * ring == cp


def test_ulysses_alone_is_refused_where_heads_run_out():
    assert divide_context(4, 4, 2, "ulysses") == (4, 1)
    with pytest.raises(UserError, match=r"'ulysses' cannot share 4 heads and 2 kv heads over cp 8.*'auto'"):
        divide_context(8, 4, 2, "ulysses")


@pytest.mark.parametrize(("ulysses", "ring", "divisor"), [(1, 1, 1), (4, 1, 4), (1, 2, 4), (3, 2, 12)])
def test_a_ring_cuts_sequences_in_two_chunks_a_rank(ulysses, ring, divisor):
    assert tokens_divisor(ulysses, ring) == divisor
