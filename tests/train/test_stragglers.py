"""Ranks that slow down all others are named."""

import pytest

from arriero.train.stragglers import Stragglers


def reports(probe_of_rank_2, wait_of_rank_2=0.0, laps=40):
    stragglers, found = Stragglers(), []
    for lap in range(laps):
        probes = [1.0 + 0.05 * ((lap + rank) % 3) for rank in range(4)]
        probes[2] = probe_of_rank_2(lap)
        found += stragglers.add(probes, [0.01, 0.01, wait_of_rank_2, 0.02], step_s=1.0)
    return [(slow.rank, slow.why) for slow in found]


def test_a_rank_with_a_slow_device_is_reported_once():
    [(rank, why)] = reports(lambda _: 1.4)
    assert rank == 2
    assert why == "its matmul takes 1.33 times the median of the ranks"


def test_a_rank_that_waits_for_data_is_reported():
    [(rank, why)] = reports(lambda _: 1.0, wait_of_rank_2=0.5)
    assert rank == 2
    assert "waits for data 49% of a step longer" in why


@pytest.mark.parametrize("probe", [lambda _: 1.15, lambda lap: 3.0 if lap % 4 == 0 else 1.0])
def test_a_slightly_slower_or_sometimes_slow_rank_is_not_reported(probe):
    assert reports(probe) == []
