"""Ranks on one machine begin together and end together."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from arriero.errors import EXIT_RESTART, NodeError, UserError
from arriero.parallel.spawn import RankFailed, run_ranks
from arriero.parallel.world import process_group, world_from


def test_ranks_communicate_and_rank_0_returns_its_result():
    def work():
        world = world_from()
        with process_group(world, torch.device("cpu")):
            total = torch.tensor(float(world.rank))
            dist.all_reduce(total)
            return total.item(), world.size

    assert run_ranks(work, 3, leader_prints=False) == (3.0, 3)


def test_ranks_are_started_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(run_ranks(lambda: world_from().size, 2)))
    thread.start()
    thread.join()
    assert results == [2]


def test_the_error_of_the_rank_that_failed_first_is_raised():
    def work():
        world = world_from()
        with process_group(world, torch.device("cpu")):
            if world.rank == 1:
                raise ZeroDivisionError("the first")
            dist.barrier()

    with pytest.raises(RankFailed, match="rank 1 failed first") as caught:
        run_ranks(work, 3, leader_prints=False)
    assert "ZeroDivisionError: the first" in str(caught.value)


def test_a_user_error_of_a_rank_is_raised_as_such():
    def work():
        raise UserError("the layer count is odd", "take an even one")

    with pytest.raises(UserError, match="the layer count is odd"):
        run_ranks(work, 2, leader_prints=False)


def test_a_killed_rank_is_named():
    def work():
        world = world_from()
        with process_group(world, torch.device("cpu")):
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()

    with pytest.raises(UserError, match=r"rank 1 was killed \(SIGKILL\)") as caught:
        run_ranks(work, 2, leader_prints=False)
    assert caught.value.exit_code == EXIT_RESTART


def test_a_killed_rank_is_the_cause_however_late_its_end_is_noticed():
    """Under load, the error of another rank may be written long before the end of the killed one is seen."""

    def work():
        if world_from().rank == 1:
            raise RuntimeError("connection closed by peer")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait(1.5)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match=r"rank 0 was killed \(SIGKILL\)"):
        run_ranks(work, 2, leader_prints=False)


@pytest.mark.parametrize("kind", [UserError, NodeError])
def test_an_error_of_a_rank_keeps_its_exit_code(kind):
    def work():
        raise kind("there is no GPU", "look for one")

    with pytest.raises(kind) as caught:
        run_ranks(work, 2, leader_prints=False)
    assert caught.value.exit_code == kind.exit_code
