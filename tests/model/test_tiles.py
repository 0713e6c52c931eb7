"""The feed-forward half of a block, some tokens at a time."""

from functools import partial

import pytest
import torch

from arriero.model.family import build_model
from arriero.model.layers import TiledBlock, apply_in_tiles
from arriero.model.presets import load_preset

FAMILIES = ["llama-test", "gpt2-test"]


def gradients(name, tile=None, compiled=False):
    model = build_model(load_preset(name))
    model.init_weights(1)
    compiler = partial(torch.compile, backend="aot_eager") if compiled else None
    for number, block in model.blocks.items():
        if tile is not None:
            model.blocks[number] = TiledBlock.of(block, tile, compiler)
        if compiled:
            model.blocks[number].compile(backend="aot_eager")
    tokens = torch.randint(0, model.spec.vocab_size, (2, 30), generator=torch.Generator().manual_seed(5))
    loss = model(tokens, labels_BT=tokens.roll(-1, 1))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("tile", [1, 7, 10, 29])
@pytest.mark.parametrize("name", FAMILIES)
def test_tiles_have_the_loss_and_gradients_of_whole_sequences(name, tile, compiled):
    if compiled and tile != 7:
        tile = 10
    loss, expected = gradients(name)
    tiled, found = gradients(name, tile, compiled)
    torch.testing.assert_close(tiled, loss)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5, msg=key)


def test_at_most_one_tile_is_computed_at_a_time():
    seen = []

    def function(x):
        seen.append(x.shape[1])
        return x * weight

    weight = torch.ones(3, requires_grad=True)
    x = torch.randn(2, 10, 3, requires_grad=True)
    apply_in_tiles(function, x, 4, [weight]).sum().backward()
    assert seen == [4, 4, 2] * 2
    assert torch.equal(x.grad, torch.ones_like(x))
    torch.testing.assert_close(weight.grad, x.detach().sum((0, 1)))


def test_gradients_of_tiles_are_summed_in_fp32():
    """In bf16 256 + 1 is 256."""
    weight = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(1, 512, 1, dtype=torch.bfloat16)
    apply_in_tiles(lambda tile: tile * weight, x, 1, [weight]).sum().backward()
    assert weight.grad.item() == 512
