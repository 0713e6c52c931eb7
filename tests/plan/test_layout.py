"""Layouts: coordinates and groups of ranks, Ulysses and ring degrees."""

from itertools import product

import pytest

from arriero.plan.layout import AXES, Layout, divide_context, divisors, tokens_divisor


def layouts(most=3):
    return [Layout(*degrees) for degrees in product(range(1, most + 1), repeat=len(AXES))]


@pytest.mark.parametrize("axes", [("pp",), ("tp",), ("cp",), ("dp_replicate", "dp_shard", "cp"), AXES])
def test_groups_cover_all_ranks_and_differ_only_in_their_axes(axes):
    for layout in layouts(2):
        groups = layout.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))
        for group in groups:
            others = {tuple(layout.coordinates(r)[a] for a in AXES if a not in axes) for r in group}
            own = {tuple(layout.coordinates(r)[a] for a in axes) for r in group}
            assert len(others) == 1
            assert len(own) == len(group)


def test_ranks_have_distinct_coordinates_with_tp_innermost():
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
def test_ulysses_takes_what_the_heads_allow_and_a_ring_the_rest(cp, heads, kv_heads, divided):
    assert divide_context(cp, heads, kv_heads) == divided
    assert divide_context(cp, heads, kv_heads, "ring") == (1, cp)
    ulysses, ring = divided
    assert heads % ulysses == 0
    assert ulysses * ring == cp


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 4_194_304])
def test_divisors_are_complete_and_sorted(number):
    found = divisors(number)
    assert found == sorted(set(found))
    assert found[:: len(found) - 1 or 1] == ([1, number] if number > 1 else [1])
    assert all(number % n == 0 for n in found)
    if number < 100:
        assert found == [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize(("ulysses", "ring", "divisor"), [(1, 1, 1), (4, 1, 4), (1, 2, 4), (3, 2, 12)])
def test_ring_divides_sequences_into_two_chunks_per_rank(ulysses, ring, divisor):
    assert tokens_divisor(ulysses, ring) == divisor
