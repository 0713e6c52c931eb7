"""Ranks on one machine begin together and end together."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from arriero.errors import UserError
from arriero.parallel.spawn import RankFailed, run_ranks
from arriero.parallel.world import World, first_host, process_group, world_from


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

    with pytest.raises(UserError, match=r"rank 1 was killed \(SIGKILL\)"):
        run_ranks(work, 2, leader_prints=False)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n3,n7", "n3"), ("n[03-05]", "n03"), ("gpu[7,9-12],cpu1", "gpu7"), ("a1,b[2-3]", "a1")],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "nid[00017-00020,00031]",
}


def test_variables_of_all_launchers_are_read():
    assert world_from({}) == World()
    assert world_from(TORCHRUN) == World(3, 8, 1, 1, "tcp://n1:29500")
    assert world_from(SLURM) == World(3, 8, 1, 4, "tcp://nid00017:20119")
    assert world_from(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == World()
    batch_script = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert world_from(batch_script) == World()
    with pytest.raises(UserError, match="RANK is 'x', not a number"):
        world_from({"RANK": "x", "WORLD_SIZE": "2"})
    with pytest.raises(UserError, match="rendezvous address"):
        world_from({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": "3", "WORLD_SIZE": "1"}, "RANK is 3 and WORLD_SIZE is 1"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK is 8 and WORLD_SIZE is 8"),
        ({"RANK": "0"}, "sets RANK without WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "sets WORLD_SIZE without RANK"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "without RANK and WORLD_SIZE"),
    ],
)
def test_contradictory_or_incomplete_launcher_variables_are_errors(variables, complaint):
    with pytest.raises(UserError, match=complaint):
        world_from(variables)


def test_other_variables_beside_those_of_slurm_are_ignored():
    assert world_from(SLURM | {"WORLD_SIZE": "8"}) == world_from(SLURM)
    assert world_from({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == World()
