"""Layers of a block whose matmuls are in float8, by our own kernels."""

from collections.abc import Sequence

from torch import Tensor, nn

from arriero.kernels.float8 import linears
from arriero.kernels.swiglu import swiglu
from arriero.model.layers import Block, SwiGLU


class Float8Linear(nn.Linear):
    """By kernels that cast faster than what the compiler makes of torchao's layers, for weights that are
    plain tensors while they are computed with."""

    def forward(self, input: Tensor) -> Tensor:
        (y,) = _project(input, (self,))
        return y


def use_float8(block: Block, layers: Sequence[nn.Linear]) -> None:
    """These layers of it, in place; those that share their input become one product."""
    for layer in layers:
        layer.__class__ = Float8Linear
    attention, ffn = block.attention, block.ffn
    if _all_float8(attention.q, attention.k, attention.v):
        attention.project = _project
    if isinstance(ffn, SwiGLU) and _all_float8(ffn.gate, ffn.up):
        ffn.gated = _gated


def _project(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    together = linears(x, [layer.weight for layer in layers])
    products = together.split([layer.out_features for layer in layers], dim=-1)
    return [y if layer.bias is None else y + layer.bias for y, layer in zip(products, layers, strict=True)]


def _gated(x: Tensor, gate: nn.Linear, up: nn.Linear) -> Tensor:
    return swiglu(linears(x, [gate.weight, up.weight]))


def _all_float8(*layers: nn.Module) -> bool:
    return all(isinstance(layer, Float8Linear) for layer in layers)
