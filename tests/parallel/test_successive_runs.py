"""Several runs in one process: nothing of an earlier process group is used by a later one."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import RENDEZVOUS, process_group, world_from


def products(groups_before):
    """Multiply split matrices in a new process group in which other groups were made before."""
    with process_group(world_from(), torch.device("cpu")):
        for _ in range(groups_before):
            dist.new_group([0, 1])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        x = DTensor.from_local(torch.full((4, 2), float(mesh.get_local_rank() + 1)), mesh, [Shard(1)])
        w = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
        product = x @ w
        assert product.placements == (Partial(),)
        scattered = product.redistribute(placements=[Shard(0)])
        return scattered.redistribute(placements=[Replicate()]).to_local().sum().item()


def both():
    meeting = os.environ[RENDEZVOUS]
    found = []
    for i, before in enumerate((3, 0)):
        os.environ[RENDEZVOUS] = f"{meeting}-{i}"
        found.append(products(before))
    return found


def test_a_second_run_uses_the_groups_of_its_own_mesh():
    assert run_ranks(both, 4, leader_prints=False) == [96.0, 96.0]
