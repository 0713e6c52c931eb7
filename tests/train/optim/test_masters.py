import pytest
import torch
from layouts import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from arriero.config.schema import OptimSection
from arriero.train.model_state import ModelState
from arriero.train.optim.optimizer import Optimizer

PLAIN = OptimSection(name="sgd", weight_decay=0.0, clip=False)


def network():
    """Small whole numbers, which bf16 computes with exactly, however the sums are split."""
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4, bias=False))
    for parameter in model.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).float()
    return model


def two_micro_batches(model, optimizer):
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        x = torch.randint(-2, 3, (5, 6), generator=generator).to(torch.bfloat16)
        model(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())
    norm = optimizer.step(lr=2.0**-12)
    full = {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in optimizer.model.tensors().items()}
    held = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return norm.item(), full, {n: p.detach() for n, p in held.items()}


def alone():
    model = network()
    return two_micro_batches(model, Optimizer(ModelState.of([model], torch.bfloat16), PLAIN))


def test_master_weights_change_by_less_than_bf16_resolves():
    before = {name: p.detach().clone() for name, p in network().named_parameters()}
    _, masters, held = alone()
    for name, master in masters.items():
        assert (master.dtype, held[name].dtype) == (torch.float32, torch.bfloat16)
        # where two are as near, either may be taken
        nearest = (master.to(torch.bfloat16) - master).abs()
        assert torch.equal((held[name] - master).abs(), nearest)
        assert not torch.equal(master, before[name])
        assert (master - before[name]).abs().max() < 0.5


def test_gradients_set_without_hooks_are_accumulated():
    """Schedules that split the backward pass call no hooks for the weights."""
    model = network()
    optimizer = Optimizer(ModelState.of([model], torch.bfloat16), PLAIN)
    x = torch.ones(5, 6, dtype=torch.bfloat16)
    weights = list(model.parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(model(x).sum(), weights), strict=True):
        weight.grad = gradient
    expected = torch.cat([weight.grad.flatten() for weight in weights]).double().norm()
    assert optimizer.step(lr=1.0).item() == pytest.approx(expected.item())
    assert all(weight.grad is None for weight in weights)


def test_master_weights_of_a_tensor_parallel_model_are_sharded_like_it():
    def work():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = Optimizer(ModelState.of([model], torch.bfloat16), PLAIN)
        for name, weight in optimizer.model.tensors().items():
            assert weight.placements == dict(model.named_parameters())[name].placements
        return two_micro_batches(model, optimizer)

    split, reference = on_ranks("tensor", work, ranks=2), on_ranks("alone", alone)
    assert split[0] == pytest.approx(reference[0], rel=1e-6)
    torch.testing.assert_close(split[1:], reference[1:], rtol=0, atol=0)


@pytest.mark.parametrize("masters", [None, torch.bfloat16])
def test_gradients_left_as_partial_sums_are_reduced(masters):
    """As those of a norm are, that sees a part of the sequence on each rank; not in every micro-batch."""

    def work():
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
        optimizer = Optimizer(ModelState({"w": weight}, compute_dtype=masters), PLAIN)
        x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]).to(weight.dtype)
        for micro_batch in (x, x, x.redistribute(placements=[Replicate()])):
            (micro_batch * weight).sum().backward()
        norm = optimizer.step(lr=1.0)
        return norm.item(), optimizer.model.tensors()["w"].to_local()

    norm, weight = on_ranks("tensor", work, ranks=2)
    gradient = 3 * torch.arange(12.0).view(4, 3).sum(0)
    assert norm == pytest.approx(gradient.norm().item(), rel=1e-6)
    assert torch.equal(weight, 1 - gradient)


def test_fp32_weights_split_into_master_weights_are_restored_exactly():
    """As when one process resumes a checkpoint of sharded fp32 weights, and the other way round."""
    exact, halves = network(), network()
    plain = Optimizer(ModelState.of([exact]), PLAIN)
    split = Optimizer(ModelState.of([halves], torch.bfloat16), PLAIN)
    odd = {name: torch.randn_like(w) for name, w in plain.model.tensors().items()}
    for name, weight in odd.items():
        split.model.load(name, weight)
    assert {p.dtype for p in halves.parameters()} == {torch.bfloat16}
    for name, weight in split.model.tensors().items():
        plain.model.load(name, weight)
    for name, weight in plain.model.tensors().items():
        assert torch.equal(weight, odd[name])
