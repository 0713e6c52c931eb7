"""The share of the forward pass that HFU counts twice is what real blocks compute again."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from arriero.config.fields import ActivationCheckpointing
from arriero.config.schema import PrecisionSection
from arriero.model.family import build_model
from arriero.model.layers import Attention, Block, FusedQKVAttention, TiledBlock, converted
from arriero.model.presets import resolve
from arriero.model.spec import Recompute, flops_per_token
from arriero.parallel.activation_checkpointing import apply_activation_checkpointing
from arriero.parallel.precision import apply_float8
from arriero.plan.recompute import recomputed

TOKENS = 32


class Matmuls(TorchDispatchMode):
    """Count the FLOPs of matmuls, float8 ones included."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        if name in ("aten::mm", "aten::addmm"):
            self.flops += 2 * args[-2].shape[0] * args[-1].numel()
        elif name == "arriero::float8_linears":
            self.flops += 2 * args[0].shape[0] * sum(weight.numel() for weight in args[1])
        elif name == "arriero::float8_gradients":
            self.flops += 4 * args[0].numel() * args[1].shape[0]
        return func(*args, **(kwargs or {}))


def counted_flops(model):
    """Return the FLOPs of the matmuls of forward and backward."""
    x = torch.randint(0, 512, (1, TOKENS))
    with Matmuls() as counter:
        model.hidden(x).square().mean().backward()
    return counter.flops


def prepared(name, joined="", tile=0):
    spec = resolve(name, {"layers": 4})
    model = build_model(spec)
    model.init_weights(1)
    if joined == "float8":
        apply_float8(model, PrecisionSection(float8="tensorwise"), emulate=True)
    for number, block in model.blocks.items():
        if joined == "qkv" and isinstance(block, Block) and type(block.attention) is Attention:
            block.attention = converted(block.attention, FusedQKVAttention)
        if tile:
            model.blocks[number] = TiledBlock.of(block, tile, None)
    return spec, model


def share_that_runs(name, checkpointing, joined="", tile=0):
    """Return the recomputed share of the matmuls of the blocks, by counting them."""
    _, plain = prepared(name, joined)
    spec, model = prepared(name, joined, tile)
    apply_activation_checkpointing(model, ActivationCheckpointing.parse(checkpointing), spec.layers)
    forward = 2 * spec.layers * spec.block_matmul_parameters * TOKENS
    return (counted_flops(model) - counted_flops(plain)) / forward


@pytest.mark.parametrize("name", ["llama-test", "gpt2-test"])
@pytest.mark.parametrize(
    "checkpointing", ["none", "full", "every:2", "selective", "attention", "full:1/4+selective"]
)
def test_uncompiled_blocks_recompute_the_counted_share(name, checkpointing):
    given = ActivationCheckpointing.parse(checkpointing)
    found = recomputed(resolve(name, {"layers": 4}), given, compiled=False)
    assert found.matmul == pytest.approx(share_that_runs(name, checkpointing))
    assert found.attention == {"full": 1.0, "every:2": 0.5, "full:1/4+selective": 0.25}.get(
        checkpointing, 0.0
    )


@pytest.mark.parametrize("joined", ["qkv", "float8"])
@pytest.mark.parametrize("checkpointing", ["selective", "attention"])
def test_joined_matmuls_change_what_selective_checkpointing_keeps(joined, checkpointing):
    given = ActivationCheckpointing.parse(checkpointing)
    spec = resolve("llama-test", {"layers": 4})
    found = recomputed(spec, given, compiled=False, fused_qkv=joined == "qkv", float8=joined == "float8")
    assert found.matmul == pytest.approx(share_that_runs("llama-test", checkpointing, joined))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_tiles_of_the_feed_forward_layer_are_recomputed(checkpointing):
    given = ActivationCheckpointing.parse(checkpointing)
    found = recomputed(resolve("llama-test", {"layers": 4}), given, compiled=False, tiled=True)
    assert found.matmul == pytest.approx(share_that_runs("llama-test", checkpointing, tile=8))
    assert found.matmul > (1 if checkpointing == "full" else 0.4)


def test_a_smaller_budget_recomputes_more():
    spec = resolve("llama-test", {"layers": 4, "dim": 256, "ffn": 768, "head_dim": 64})
    shares = [
        recomputed(spec, ActivationCheckpointing.parse(f"budget:{budget}"), compiled=True)
        for budget in (0.5, 0.0)
    ]
    assert 0 < shares[0].matmul < 0.5 < shares[1].matmul < 1
    assert shares[1].attention == 1


def test_hfu_counts_matmuls_and_attention_apart():
    spec = resolve("llama-test", {})
    plain = flops_per_token(spec, 64, "hfu")
    matmuls = flops_per_token(spec, 64, "hfu", Recompute(0.5, 0.0)) - plain
    attention = flops_per_token(spec, 64, "hfu", Recompute(0.0, 1.0)) - plain
    assert matmuls == spec.layers * spec.block_matmul_parameters
    assert attention == 2 * spec.layers * spec.attention_width * 64
