"""The chunked loss in bf16 on a GPU: the cross-entropy of the very logits, of any vocabulary."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from arriero.parallel.loss import LossOptions, chunked_loss
from gpu.alone import DEVICE, alone, relative_error

pytestmark = pytest.mark.gpu

TOKENS, DIM = 700, 256


def states(vocab):
    """Logits several units wide; a third of the labels do not count, among them a whole chunk."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, TOKENS, DIM, generator=generator)
    weight = 0.2 * torch.randn(vocab, DIM, generator=generator)
    labels = torch.randint(0, vocab, (1, TOKENS), generator=generator)
    labels[:, ::5] = -100
    labels[:, 128:256] = -100
    return x.to(DEVICE, torch.bfloat16), weight.to(DEVICE, torch.bfloat16), labels.to(DEVICE)


def with_gradients(loss, x, weight, labels):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    value = loss(x, weight, labels)
    return value.detach(), *torch.autograd.grad(value, (x, weight))


def plain(z_loss):
    """Logits of bf16, all that follows in fp32 and by autograd."""

    def loss(x, weight, labels):
        logits = (x @ weight.T).float().flatten(0, 1)
        entropy = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        counted = labels.flatten() != -100
        return entropy + z_loss * (logits.logsumexp(-1).square() * counted).sum()

    return loss


@pytest.mark.parametrize("z_loss", [0.0, 1e-3], ids=["plain", "z-loss"])
@pytest.mark.parametrize("vocab", [50257, 4096, 1031])
def test_chunks_of_bf16_logits_have_the_loss_and_gradients_of_fp32_cross_entropy(vocab, z_loss):
    def work():
        given = states(vocab)
        found = with_gradients(partial(chunked_loss, options=LossOptions(128, z_loss)), *given)
        # what is reported is the cross-entropy alone
        value = with_gradients(plain(0.0), *given)[0]
        _, *expected = with_gradients(plain(z_loss), *given)
        assert not found[1].flatten(0, 1)[128:256].any()
        return relative_error(found[0], value), [
            relative_error(a, b) for a, b in zip(found[1:], expected, strict=True)
        ]

    value, gradients = alone(work)
    assert value < 2e-6
    # the gradient of the logits is rounded to bf16 once, in both
    assert max(gradients) < 2**-7, gradients


@pytest.mark.parametrize("chunk", [128, False], ids=["chunks", "at once"])
def test_a_float8_head_has_the_loss_and_gradients_of_the_emulated_one(chunk):
    def work():
        given = states(4099)
        loss = partial(chunked_loss, options=LossOptions(chunk, float8=True))
        found = with_gradients(loss, *given)
        expected = with_gradients(loss, *(each.cpu() for each in given))
        return [relative_error(a.cpu(), b) for a, b in zip(found, expected, strict=True)]

    value, *gradients = alone(work)
    # an element on the border between two float8 numbers may fall to either side
    assert value < 1e-3 and max(gradients) < 0.02, (value, gradients)
