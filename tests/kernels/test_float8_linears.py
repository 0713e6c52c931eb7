"""Products in float8, as the device without float8 emulates them."""

import pytest
import torch

from arriero.kernels.float8 import linears

# rounding to three digits of mantissa, and to two: 2**-4 and 2**-3 at most, and half of it on average
FORWARD, BACKWARD = 2**-4, 2**-3


def given(tokens, width, outs, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, tokens, width, generator=generator).to(dtype).requires_grad_()
    weights = [
        (0.1 * torch.randn(out, width, generator=generator)).to(dtype).requires_grad_() for out in outs
    ]
    return x, weights


def relative_error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("outs", [(48,), (32, 16, 16)])
@pytest.mark.parametrize("tokens", [16, 7, 1])
def test_several_layers_are_one_product_close_to_the_exact_one(tokens, outs):
    x, weights = given(tokens, 64, outs)
    y = linears(x, weights)
    exact = torch.cat([x.detach().double() @ weight.detach().double().T for weight in weights], dim=-1)
    assert (y.shape, y.dtype) == ((2, tokens, sum(outs)), torch.bfloat16)
    assert 0 < relative_error(y, exact) < FORWARD


def test_gradients_are_close_to_exact_ones():
    x, weights = given(24, 64, (32, 16))
    gradient = torch.randn(2, 24, 48, generator=torch.Generator().manual_seed(4)).bfloat16()
    found = torch.autograd.grad(linears(x, weights), [x, *weights], gradient)
    exact_x = x.detach().double().requires_grad_()
    exact = [weight.detach().double().requires_grad_() for weight in weights]
    y = torch.cat([exact_x @ weight.T for weight in exact], dim=-1)
    expected = torch.autograd.grad(y, [exact_x, *exact], gradient.double())
    for mine, theirs, own in zip(found, expected, [x, *weights], strict=True):
        assert (mine.shape, mine.dtype) == (own.shape, own.dtype)
        assert relative_error(mine, theirs) < BACKWARD


def test_zeros_and_large_numbers_have_valid_scales():
    x, weights = given(16, 32, (16,))
    assert not linears(torch.zeros_like(x), weights).any()
    large = linears(x.detach() * 2.0**90, weights)
    assert large.isfinite().all()
    torch.testing.assert_close(large * 2.0**-90, linears(x, weights), rtol=0, atol=0)


def test_compiled_results_equal_eager_ones():
    x, weights = given(16, 32, (16, 32))
    compiled = torch.compile(lambda x, a, b: linears(x, [a, b]), backend="aot_eager", fullgraph=True)
    gradient = torch.ones(2, 16, 48, dtype=torch.bfloat16)
    eager = torch.autograd.grad(linears(x, weights), [x, *weights], gradient)
    for mine, theirs in zip(
        torch.autograd.grad(compiled(x, *weights), [x, *weights], gradient), eager, strict=True
    ):
        assert torch.equal(mine, theirs)
