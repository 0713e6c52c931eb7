import pytest
import torch
import torch.distributed as dist
from layouts import LAYOUTS, on_ranks, parameters, set_gradients, whole
from torch import nn
from torch.distributed.fsdp import fully_shard

from arriero.config.schema import OptimSection
from arriero.parallel.dtensor import local_part, shard_index, shard_of
from arriero.train.model_state import ModelState
from arriero.train.optim.optimizer import Optimizer

KINDS = {
    "adamw": {},
    "bf16": {"state": "bf16"},
    "int8": {"state": "int8"},
    "float8": {"state": "float8"},
    "muon": {"name": "muon"},
    "muon int8": {"name": "muon", "state": "int8"},
    "sgd": {"name": "sgd", "momentum": 0.9},
}


def trained(layout, config, steps, dtype=torch.float32, held=None, **options):
    """Steps from `steps` on parameters laid out so; the optimizer, its parameters and the norms it saw."""
    held = held or parameters(layout, dtype)
    optimizer = Optimizer(ModelState(held), config, seed=1, **options)
    return optimizer, held, take_steps(optimizer, held, steps)


def take_steps(optimizer, held, steps):
    norms = []
    for step in steps:
        set_gradients(held, step)
        norms.append(optimizer.step(lr=0.05).item())
    return norms


def outcome(optimizer, norms):
    state = {name: {kind: whole(t) for kind, t in kinds.items()} for name, kinds in optimizer.state().items()}
    return norms, {name: whole(w) for name, w in optimizer.model.tensors().items()}, state


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_every_layout_updates_as_one_process_does(layout):
    def work(layout):
        found = {}
        for kind in ("adamw", "muon", "sgd"):
            config = OptimSection(**KINDS[kind], clip=2.0, weight_decay=0.2)
            optimizer, _, norms = trained(layout, config, range(4))
            found[kind] = outcome(optimizer, norms)
        return found

    split, alone = on_ranks(layout, lambda: work(layout)), work("alone")
    for kind, (norms, weights, state) in split.items():
        assert norms == pytest.approx(alone[kind][0], rel=1e-6)
        torch.testing.assert_close(weights, alone[kind][1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state, alone[kind][2], rtol=1e-5, atol=1e-6)


def hand_over(to, weights, state):
    for name, weight in weights.items():
        to.model.load(name, weight.clone())
    for name, kinds in state.items():
        for kind, values in kinds.items():
            to.load_moment(name, kind, values.clone())


@pytest.mark.parametrize("layout", ["alone", "shard+tensor"])
def test_a_loaded_optimizer_state_resumes_bit_identically(layout):
    def one(config, master):
        optimizer, held, _ = trained(layout, config, range(3), master)
        again_held = parameters(layout, master)
        again = Optimizer(ModelState(again_held), config, seed=1)
        hand_over(again, optimizer.model.tensors(), optimizer.state())
        take_steps(optimizer, held, range(3, 6))
        take_steps(again, again_held, range(3, 6))
        return outcome(optimizer, [])[1:], outcome(again, [])[1:]

    def work():
        masters = (torch.float32, torch.bfloat16)
        return {
            (kind, master): one(OptimSection(**KINDS[kind]), master) for kind in KINDS for master in masters
        }

    for straight, resumed in on_ranks(layout, work).values():
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
        assert straight[1]["optimizer"]["step"] == 6


@pytest.mark.parametrize("kind", ["int8", "muon"])
def test_a_state_moves_to_another_layout(kind):
    config = OptimSection(**KINDS[kind])

    def work():
        shard, _, _ = trained("shard", config, range(3))
        mixed = Optimizer(ModelState(parameters("shard+tensor")), config)
        before = outcome(shard, [])[2]
        targets = {name: dict(kinds) for name, kinds in mixed.state().items()}
        for name, kinds in targets.items():
            for key, target in kinds.items():
                local_part(target).copy_(shard_of(before[name][key], target))
        hand_over(mixed, {}, targets)
        return before, outcome(mixed, [])[2]

    before, after = on_ranks("shard", work)
    torch.testing.assert_close(after, before, rtol=0.2, atol=1e-3)
    assert after["optimizer"]["step"] == 3


@pytest.mark.parametrize("layout", ["replicate+shard", "mixed"])
def test_ranks_that_hold_the_same_shard_round_it_alike(layout):
    def work():
        _, held, _ = trained(layout, OptimSection(state="int8"), range(3), torch.bfloat16)
        mine = {(name, shard_index(p)): local_part(p).clone() for name, p in held.items()}
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        return everyones

    everyones, compared = on_ranks(layout, work), 0
    for one in everyones:
        for other in everyones:
            for key in one.keys() & other.keys():
                assert torch.equal(one[key], other[key]), key
                compared += one is not other
    assert compared > 0


def test_a_tied_copy_counts_once_in_the_norm_and_is_rounded_as_the_original():
    table = torch.randn(300, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    held = {"embedding.weight": nn.Parameter(table.clone()), "head.weight": nn.Parameter(table.clone())}
    model = ModelState(held, tied={"head.weight": "embedding.weight"})
    optimizer = Optimizer(model, OptimSection(state="bf16"), seed=1)
    for _ in range(3):
        for parameter in held.values():
            parameter.grad = torch.ones_like(parameter)
        assert optimizer.step(1e-3).item() == pytest.approx(1200**0.5)
    assert torch.equal(held["embedding.weight"], held["head.weight"])
    assert not torch.equal(held["embedding.weight"], table)
    assert set(optimizer.model.tensors()) == {"embedding.weight"}
    assert set(optimizer.state()) == {"embedding.weight", "optimizer"}


def scaled(weight):
    model = ModelState({"w": weight}, compute_dtype=torch.float16)
    return Optimizer(model, OptimSection(name="sgd", weight_decay=0, clip=False), scaled_loss=True)


def test_the_scaled_loss_gives_the_unscaled_step():
    weight = nn.Parameter(torch.ones(3))
    optimizer = scaled(weight)
    assert (weight.dtype, optimizer.loss_scale) == (torch.float16, 2.0**16)
    # 1e-7 is nothing in fp16, unless it is scaled
    (weight.float().sum() * 1e-7 * optimizer.loss_scale).backward()
    norm = optimizer.step(lr=1e5)
    assert norm.item() == pytest.approx(1e-7 * 3**0.5, rel=1e-3)
    torch.testing.assert_close(optimizer.model.tensors()["w"], torch.full((3,), 0.99), rtol=1e-4, atol=0)


def test_an_overflow_skips_the_step_and_halves_the_scale():
    weight = nn.Parameter(torch.ones(3))
    optimizer = scaled(weight)
    (weight.float().sum() * 2.0 * optimizer.loss_scale).backward()
    assert not optimizer.step(lr=1.0).isfinite()
    assert torch.equal(optimizer.model.tensors()["w"], torch.ones(3))
    assert (optimizer.loss_scale, optimizer.skipped, optimizer.steps) == (2.0**15, 1, 0)
    (weight.float().sum() * 1.5 * optimizer.loss_scale).backward()
    optimizer.step(lr=0.25)
    assert torch.equal(optimizer.model.tensors()["w"], torch.full((3,), 1 - 0.25 * 1.5))
    assert (optimizer.loss_scale, optimizer.skipped, optimizer.steps) == (2.0**15, 1, 1)


def test_the_scale_grows_after_2000_good_steps_and_survives_a_restart():
    weight = nn.Parameter(torch.ones(1))
    optimizer = scaled(weight)
    for _ in range(1999):
        weight.float().sum().backward()
        optimizer.step(lr=0.0)
    assert optimizer.loss_scale == 2.0**16
    again_weight = nn.Parameter(torch.ones(1))
    again = scaled(again_weight)
    hand_over(again, {}, optimizer.state())
    again_weight.float().sum().backward()
    again.step(lr=0.0)
    assert (again.loss_scale, again.steps) == (2.0**17, 2000)


@pytest.mark.parametrize("scaled_loss", [False, True])
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(scaled_loss):
    def work():
        held = parameters("shard")
        optimizer = Optimizer(ModelState(held), OptimSection(), scaled_loss=scaled_loss)
        before = {name: whole(p) for name, p in held.items()}
        set_gradients(held, 0)
        if dist.get_rank() == 3:
            local_part(held["blocks.0.attention.q.weight"].grad).fill_(float("inf"))
        optimizer.step(lr=1.0)
        seen = [None] * 4
        dist.all_gather_object(seen, (optimizer.skipped, optimizer.loss_scale))
        return seen, all(torch.equal(whole(p), before[name]) for name, p in held.items())

    assert on_ranks("shard", work) == ([(1, 2.0**15 if scaled_loss else 1.0)] * 4, True)


BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("clip", [1.0, False])
@pytest.mark.parametrize("masters", [None, torch.bfloat16, torch.float16], ids=["plain", "bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(kind, masters, clip):
    """Neither weights, nor moments, nor the step count, also when it is the first step."""
    config = OptimSection(**KINDS[kind], clip=clip, weight_decay=0.3)
    held = parameters("alone")
    optimizer = Optimizer(ModelState(held, compute_dtype=masters), config, seed=1)
    for number, bad in enumerate(BAD):
        before = outcome(optimizer, [])
        kept = {name: p.detach().clone() for name, p in held.items()}
        set_gradients(held, 50 + number)
        held["blocks.0.ffn.down.weight"].grad[2, 3] = bad
        assert not torch.tensor(step_once(optimizer)).isfinite()
        torch.testing.assert_close(outcome(optimizer, []), before, rtol=0, atol=0)
        assert all(torch.equal(held[name], kept[name]) for name in held)
        assert (optimizer.skipped_in_a_row.item(), optimizer.skipped) == (1, number + 1)
        take_steps(optimizer, held, [number])
        assert optimizer.skipped_in_a_row.item() == 0
        assert not torch.equal(held["norm.weight"], kept["norm.weight"])
    assert (optimizer.steps, optimizer.attempts) == (3, 6)


def step_once(optimizer):
    return optimizer.step(lr=0.05).item()


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_skipped_steps_do_not_affect_later_steps(kind):
    config = OptimSection(**KINDS[kind])
    straight, _, _ = trained("alone", config, range(4))
    held = parameters("alone")
    disturbed = Optimizer(ModelState(held), config, seed=1)
    for step in range(4):
        set_gradients(held, 70)
        disturbed.step(lr=0.05, loss=torch.tensor(float("nan")))
        take_steps(disturbed, held, [step])
    torch.testing.assert_close(outcome(disturbed, []), outcome(straight, []), rtol=0, atol=0)


def test_parameters_without_a_gradient_are_unchanged():
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = Optimizer(ModelState({"used": used, "unused": unused, "frozen": frozen}), OptimSection())
    used.grad = torch.ones(2, 2)
    optimizer.step(0.1)
    assert torch.equal(unused, torch.ones(2, 2)) and torch.equal(frozen, torch.ones(2, 2))
    assert not torch.equal(used, torch.ones(2, 2))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_model_under_fsdp_trains_as_one_process_does(kind):
    def work():
        torch.manual_seed(0)
        model = nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.Linear(7, 9)}), "head": nn.Linear(9, 3)})
        if dist.is_initialized():
            for part in (model["blocks"]["0"], model["head"]):
                fully_shard(part)
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        optimizer = Optimizer(ModelState.of([model]), OptimSection(**KINDS[kind], clip=1.0))
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        norms, batch = [], torch.randn(8, 7)
        for _ in range(4):
            x = batch.chunk(ranks)[rank]
            loss = model["head"](model["blocks"]["0"](x).tanh()).square().sum()
            loss.backward()
            norms.append(optimizer.step(0.02).item())
        return norms, {name: whole(w) for name, w in optimizer.model.tensors().items()}

    split, alone = on_ranks("shard", work), on_ranks("alone", work)
    assert split[0] == pytest.approx(alone[0], rel=1e-4)
    torch.testing.assert_close(split[1], alone[1], rtol=1e-3, atol=1e-4)
