"""Kill a run at any moment: the short part of kills.py; `make reliability` runs all of it."""

import pytest

from checkpoint import kills


@pytest.fixture(scope="module")
def grounds(tmp_path_factory, corpus_cache):
    return kills.Range(tmp_path_factory.mktemp("runs"), corpus_cache)


@pytest.mark.parametrize(("seed", "ranks"), [(1, 1), (2, 1), (4, 2)])
def test_a_killed_run_ends_as_if_it_was_not_killed(grounds, seed, ranks):
    tally = kills.Tally()
    kills.kill_at_random(grounds, seed, tally, ranks)
    assert tally.failures == []
    assert sum(tally.counts.values()) > 1


@pytest.mark.parametrize(
    ("kind", "harm"),
    [
        ("distcp", "a flipped bit"),
        ("manifest", "a manifest from a newer version"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_resumed(grounds, kind, harm):
    tally = kills.Tally()
    kills.damage(grounds, kind, harm, 1, tally)
    assert tally.failures == []


def test_saves_on_a_full_disk_fail_loudly_until_there_is_room(grounds):
    tally = kills.Tally()
    kills.full_disk(grounds, tally)
    assert tally.failures == []


def test_a_disk_that_becomes_read_only_ends_the_run_which_resumes_afterwards(grounds):
    tally = kills.Tally()
    kills.read_only(grounds, tally)
    assert tally.failures == []
