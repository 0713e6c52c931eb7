"""Several ranks share one GPU: streams, prefetching and offloading with real collectives between ranks."""

import pytest
import torch
import torch.distributed as dist

import arriero
from arriero.bench.cases import cases
from arriero.bench.parity import Parity
from arriero.parallel.shared_gpu import BACKEND, register_backend
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import world_from
from checkpoint.running import Runs

pytestmark = pytest.mark.gpu

CASES = [case for case in cases("llama", "cuda") if case.group == "GPU"]
CASES += [
    case
    for case in cases("llama")
    if case.title
    in (
        "one axis: dp_shard 2, offloaded to CPU",
        "schedules: zbv, pp 2",
        "schedules: zero-bubble, pp 2",
        "document masks: cp 2, ring",
    )
]


@pytest.fixture(scope="module")
def parity(synthetic_cache):
    return Parity("llama", synthetic_cache, {"run.device": "cuda", "run.share_gpu": True})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_layout_on_a_shared_gpu_has_the_loss_of_one_process(parity, case):
    verdict = parity.compare(case)
    assert verdict.holds, verdict


def test_a_checkpoint_saved_in_the_background_resumes_on_another_layout(tmp_path, corpus_cache):
    runs = Runs(tmp_path, corpus_cache)
    common = ["run.device=cuda", "run.share_gpu=true", "checkpoint.every=2 steps"]

    def losses(name, *layout, steps=4):
        config = runs.config(name, *common, *layout, f"train.horizon={steps} steps")
        return list(arriero.run(config, nproc=2 if layout else 1).losses.values())

    whole = losses("whole")
    losses("moved", "parallel.dp_shard=2", steps=2)
    assert losses("moved", "parallel.dp_shard=1", "parallel.tp=2") == pytest.approx(whole[2:], rel=1e-5)


def gathered_of_two_ranks(value):
    """Gather twice: read one result before the wait, overwrite the input of the other after the call."""
    world = world_from()
    torch.cuda.set_device(0)
    register_backend()
    dist.init_process_group(BACKEND, init_method=world.meeting, rank=world.rank, world_size=world.size)
    values, gathered = torch.full((4,), value, device="cuda"), torch.empty(8, device="cuda")
    # loads the kernels that are used below, which takes longer than the group waits
    dist.all_gather_into_tensor(gathered, values)
    torch.zeros_like(values).zero_()
    is_nan = gathered.isnan().all()
    torch.cuda.synchronize()
    work = dist.all_gather_into_tensor(gathered, values, async_op=True)
    values.zero_()
    is_nan = gathered.isnan().all()
    work.wait()
    result = is_nan.item(), gathered.sum().item()
    dist.barrier()
    dist.destroy_process_group()
    return result


def test_a_missing_wait_and_an_input_overwritten_too_early_show():
    is_nan, total = run_ranks(lambda: gathered_of_two_ranks(1.0), 2, leader_prints=False)
    assert is_nan
    assert total != 8.0
