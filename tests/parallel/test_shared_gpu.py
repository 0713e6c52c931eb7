"""Several ranks on one GPU; here the same process group carries tensors of the CPU."""

import os

import pytest
import torch
import torch.distributed as dist

from arriero.bench.cases import cases
from arriero.bench.parity import Parity
from arriero.parallel.shared_gpu import BACKEND, poison_, register_backend
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import world_from

RANKS = 3


def with_group(check):
    """Run `check(rank)` on three ranks that share a process group; return the value of rank 0."""

    def run():
        torch.set_num_threads(1)
        world = world_from(os.environ)
        register_backend()
        dist.init_process_group(BACKEND, init_method=world.meeting, rank=world.rank, world_size=world.size)
        value = check(world.rank)
        dist.barrier()
        dist.destroy_process_group()
        return value

    return run_ranks(run, RANKS, leader_prints=False)


def own_values(rank, count=6):
    return torch.arange(count, dtype=torch.float32) + 10 * rank


def sums():
    return sum(own_values(rank) for rank in range(RANKS))


def test_collectives_give_what_gloo_gives():
    def check(rank):
        mine, results = own_values(rank), {}
        results["all-reduce"] = mine.clone()
        dist.all_reduce(results["all-reduce"])
        results["mean in bf16"] = mine.bfloat16()
        dist.all_reduce(results["mean in bf16"], op=dist.ReduceOp.AVG)
        results["all-gather"] = torch.empty(6 * RANKS)
        dist.all_gather_into_tensor(results["all-gather"], mine)
        results["reduce-scatter"] = torch.empty(2)
        dist.reduce_scatter_tensor(results["reduce-scatter"], mine)
        results["all-to-all"] = torch.empty(6)
        dist.all_to_all_single(results["all-to-all"], mine)
        results["broadcast"] = mine.clone()
        dist.broadcast(results["broadcast"], src=2)
        return results

    found = with_group(check)
    assert torch.equal(found["all-reduce"], sums())
    assert torch.equal(found["mean in bf16"], (sums() / RANKS).bfloat16())
    assert torch.equal(found["all-gather"], torch.cat([own_values(rank) for rank in range(RANKS)]))
    assert torch.equal(found["reduce-scatter"], sums()[:2])
    assert torch.equal(found["all-to-all"], torch.cat([own_values(rank)[:2] for rank in range(RANKS)]))
    assert torch.equal(found["broadcast"], own_values(2))


def test_an_all_gather_whose_input_lies_in_its_output_keeps_the_input():
    def check(rank):
        output = torch.empty(6 * RANKS)
        mine = output[6 * rank : 6 * rank + 6]
        mine.copy_(own_values(rank))
        dist.all_gather_into_tensor(output, mine)
        return output

    assert torch.equal(with_group(check), torch.cat([own_values(rank) for rank in range(RANKS)]))


def test_a_result_that_is_read_before_it_is_waited_for_is_nan():
    def check(rank):
        reduced, gathered = own_values(rank), torch.zeros(6 * RANKS)
        works = [
            dist.all_reduce(reduced, async_op=True),
            dist.all_gather_into_tensor(gathered, own_values(rank), async_op=True),
        ]
        before = [reduced.isnan().all().item(), gathered.isnan().all().item()]
        for work in works:
            work.wait()
        return before, reduced

    before, reduced = with_group(check)
    assert before == [True, True]
    assert torch.equal(reduced, sums())


def test_every_rank_may_send_before_it_receives_and_to_itself():
    def check(rank):
        received, own = torch.empty(6), torch.empty(6)
        works = [
            dist.isend(own_values(rank), (rank + 1) % RANKS),
            dist.isend(own_values(rank) + 1, rank),
            dist.irecv(own, rank),
            dist.irecv(received, (rank - 1) % RANKS),
        ]
        for work in works:
            work.wait()
        return received, own

    received, own = with_group(check)
    assert torch.equal(received, own_values(RANKS - 1))
    assert torch.equal(own, own_values(0) + 1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32]
)
def test_poison_is_no_number_in_any_type(dtype):
    tensor = torch.zeros(4).to(dtype)
    poison_(tensor)
    assert tensor.float().isnan().all() if dtype.is_floating_point else (tensor == -1).all()


def test_a_layout_trained_through_the_group_has_the_loss_of_one_process(synthetic_cache):
    case = next(case for case in cases("llama") if case.title == "two axes: dp_shard 2 x tp 2")
    short = {"model.layers": 2, "train.horizon": "3 steps", "schedule.kind": "constant"}
    short |= {"schedule.warmup": "1 step", "run.share_gpu": True}
    verdict = Parity("llama", synthetic_cache, short).compare(case)
    assert verdict.holds, verdict
