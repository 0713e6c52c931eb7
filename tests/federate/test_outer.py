"""The outer optimizers: identities that hold to the bit, and what the codecs preserve."""

import pytest
import torch

from arriero.federate.outer import (
    BLOCK,
    OuterOptimizer,
    Part,
    decode_int8,
    encode,
    outer_step,
    pseudo_gradient,
)
from federate.models import DILOCO, FEDAVG, moved, outer_update, weights


def test_one_site_with_fedavg_is_its_own_model_to_the_bit():
    base, local = weights(0), moved(weights(0), 1)
    # a weight that crosses zero: base - (base - local) would lose its low bits
    local["norm.weight"][0] = 1e-30
    new, state = outer_update(base, [(123, local)], {}, FEDAVG)
    assert all(torch.equal(new[name], local[name]) for name in local)
    assert state == {}


@pytest.mark.parametrize("optimizer", [FEDAVG, DILOCO, OuterOptimizer("fedadam", lr=0.01)])
def test_identical_sites_are_one_site_to_the_bit(optimizer):
    base, local = weights(0), moved(weights(0), 1)
    one, one_state = outer_update(base, [(1, local)], {}, optimizer)
    many, many_state = outer_update(base, [(1000, local), (3, local), (77777, local)], {}, optimizer)
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert all(torch.equal(one_state[k][n], many_state[k][n]) for k in one_state for n in one)


def test_weights_count_as_tokens():
    base, a, b = weights(0), moved(weights(0), 1), moved(weights(0), 2)
    weighted, _ = outer_update(base, [(300, a), (100, b)], {}, FEDAVG)
    repeated, _ = outer_update(base, [(1, a), (1, a), (1, a), (1, b)], {}, FEDAVG)
    for name in base:
        torch.testing.assert_close(weighted[name], repeated[name], rtol=1e-6, atol=0)
        torch.testing.assert_close(weighted[name], 0.75 * a[name] + 0.25 * b[name], rtol=1e-5, atol=1e-8)


def test_one_inner_sgd_step_is_data_parallel_averaging():
    base = {"w": torch.randn(8, 5, generator=torch.Generator().manual_seed(1))}
    batch = torch.randn(64, 5, generator=torch.Generator().manual_seed(2))

    def after_one_step(rows, lr=0.1):
        w = base["w"].clone().requires_grad_()
        (rows @ w.T).square().mean().backward()
        return {"w": (w - lr * w.grad).detach()}

    sites = [(16, after_one_step(rows)) for rows in batch.split(16)]
    new, _ = outer_update(base, sites, {}, OuterOptimizer("nesterov", lr=1.0, momentum=0.0))
    torch.testing.assert_close(new["w"], after_one_step(batch)["w"], rtol=1e-6, atol=1e-7)


def test_nesterov_is_torch_sgd_with_the_pseudo_gradient():
    base, state = weights(0), {}
    parameters = {name: t.double().clone().requires_grad_() for name, t in base.items()}
    sgd = torch.optim.SGD(parameters.values(), lr=0.7, momentum=0.9, nesterov=True)
    for number in range(3):
        local = moved(base, number + 1)
        for name, parameter in parameters.items():
            parameter.grad = base[name].double() - local[name].double()
        sgd.step()
        base, state = outer_update(base, [(10, local)], state, DILOCO)
        for name, parameter in parameters.items():
            torch.testing.assert_close(base[name].double(), parameter.detach(), rtol=1e-6, atol=1e-6)


def test_fedadam_takes_steps_of_the_same_size_for_large_and_small_deltas():
    optimizer = OuterOptimizer("fedadam", lr=0.01, eps=1e-12)
    base = torch.zeros(2)
    gradient = pseudo_gradient(base, [Part(1.0, torch.tensor([1.0, 1e-3]))], 1.0)
    new, state = outer_step(base, gradient, {}, optimizer)
    assert new[0].item() == pytest.approx(new[1].item(), rel=1e-5)
    assert new[0].item() < 0 and set(state) == {"momentum", "variance"}


def test_two_half_updates_move_as_far_as_a_full_one():
    """An asynchronous update with one of two equal members is half a step, momentum included."""
    base, delta = torch.zeros(1), torch.ones(1)
    state = {"momentum": torch.full((1,), 2.0)}
    full, _ = outer_step(base, pseudo_gradient(base, [Part(2.0, delta)], 2.0), state, DILOCO)
    half, kept = outer_step(base, pseudo_gradient(base, [Part(1.0, delta)], 2.0), state, DILOCO)
    half, _ = outer_step(half, pseudo_gradient(half, [Part(1.0, delta)], 2.0), kept, DILOCO)
    # without the share, the momentum alone would move the weights by twice as much
    assert half.item() == pytest.approx(full.item(), rel=0.1)


@pytest.mark.parametrize(("codec", "error"), [("bf16", 2**-8), ("int8", 1 / 254 + 1e-6)])
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_a_codec_keeps_a_delta_within_its_rounding(codec, error, count):
    generator = torch.Generator().manual_seed(count)
    delta = torch.randn(count, generator=generator) * torch.logspace(-6, 2, count)
    made = encode(delta, torch.zeros(count), codec)
    decoded = decode_int8(made[""], made[".scale"]) if codec == "int8" else made[""].float()
    for part, given in zip(decoded.split(BLOCK), delta.split(BLOCK), strict=True):
        scale = given.abs().max() if codec == "int8" else given.abs()
        assert ((part - given).abs() <= error * scale + 1e-30).all()


def test_a_delta_of_zero_stays_zero_in_every_codec():
    same = torch.randn(300)
    for codec in ("bf16", "int8"):
        made = encode(same, same, codec)
        assert not made[""].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_int8_does_not_hide_numbers_that_are_not_finite(bad):
    local = torch.zeros(600)
    local[300] = bad
    made = encode(torch.zeros(600), local, "int8")
    assert not torch.isfinite(decode_int8(made[""], made[".scale"])[BLOCK : 2 * BLOCK]).all()


def test_bf16_master_weights_ship_training_and_not_the_rounding_of_the_base():
    base = torch.randn(1000)
    untrained = base.bfloat16()
    assert not encode(base, untrained, "bf16")[""].any()
    assert torch.equal(encode(base, untrained, "fp32")[""], base)
