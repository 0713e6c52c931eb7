"""Frozen linear layers whose weight is stored in 8 or 4 bits: int8 and nf4, with one scale per 64 elements.

A weight of (out, in) is a tensor of bytes (out, blocks, bytes of a block): the codes of 64 elements of a row,
then their scale in fp32. Rows and blocks are independent, so that a shard of the tensor along either is the
stored form of a shard of the weight. Bytes are not cast by FSDP. It is dequantised in each forward and
backward pass. nf4 has 16 levels, quantiles of the normal distribution (QLoRA, arXiv:2305.14314); int8 has
equal distances.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arriero.kernels import kernels, usable
from arriero.model.layers import converted, replace_module
from arriero.model.lora import LoraLinear

Kind = Literal["int8", "nf4"]
PACKED = ".packed"
BLOCK = 64
_SCALE = 4
# elements that are quantised at once, which bounds the memory of the 16 distances of nf4
_AT_ONCE = 1 << 22
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def packed_shape(shape: tuple[int, ...], kind: Kind) -> tuple[int, int, int]:
    """Return the shape of the stored form of a weight."""
    rows, columns = shape
    return rows, -(-columns // BLOCK), (BLOCK if kind == "int8" else BLOCK // 2) + _SCALE


def columns_of(piece: slice, columns: int) -> slice:
    """Return the columns of a weight that some of its blocks hold."""
    return slice(piece.start * BLOCK, min(piece.stop * BLOCK, columns))


def kind_of(packed: Tensor) -> Kind:
    return "int8" if packed.shape[-1] == BLOCK + _SCALE else "nf4"


def pack(weight: Tensor, kind: Kind) -> Tensor:
    """Return the stored form of a weight; each element becomes the nearest level of its block."""
    made = weight.new_empty(packed_shape(tuple(weight.shape), kind), dtype=torch.uint8)
    rows = max(1, _AT_ONCE // max(1, weight.shape[1]))
    for part, into in zip(weight.split(rows), made.split(rows), strict=True):
        into.copy_(_pack(part.float(), kind))
    return made


def _pack(weight: Tensor, kind: Kind) -> Tensor:
    blocks = F.pad(weight, (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(dim=-1, keepdim=True)
    unit = blocks / torch.where(scale > 0, scale, 1.0)
    if kind == "int8":
        codes = (unit * 127).round().to(torch.int8).view(torch.uint8)
    else:
        levels = _levels(weight)
        # the number of midpoints below an element is the number of its nearest level
        nearest = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
        high, low = nearest.unflatten(-1, (-1, 2)).unbind(-1)
        codes = (high << 4) | low
    return torch.cat((codes, scale.view(torch.uint8)), dim=-1)


def unpack(packed: Tensor, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight of a stored form."""
    scale = packed.view(torch.float32)[..., -1:]
    codes = packed[..., :-_SCALE]
    if codes.shape[-1] == BLOCK:
        # a product, because devices round quotients differently
        unit = codes.view(torch.int8).float() * (1 / 127)
    else:
        pairs = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2)
        unit = _levels(packed)[pairs.int()]
    return (unit * scale).to(dtype).flatten(1)[:, :columns]


def _levels(like: Tensor) -> Tensor:
    """Return the levels of nf4 on the device of a tensor."""
    # fake tensors and other classes must not be kept for plain ones
    found = _levels_on if type(like) in (Tensor, nn.Parameter) else _levels_on.__wrapped__
    return found(like.device)


@cache
def _levels_on(device: torch.device) -> Tensor:
    return torch.tensor(_NF4, device=device)


def _dequantized(packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the weight; on a GPU by one kernel."""
    if usable(packed):
        return kernels("packed_weights").unpack(packed, columns, dtype, _levels(packed))
    return unpack(packed, columns, dtype)


# Opaque to the compiler, which would otherwise keep dequantised weights from forward to backward.
@torch.library.custom_op("arriero::packed_linear", mutates_args=())
def packed_linear(x: Tensor, packed: Tensor) -> Tensor:
    return x @ _dequantized(packed, x.shape[-1], x.dtype).T


@packed_linear.register_fake
def _(x: Tensor, packed: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@torch.library.custom_op("arriero::packed_linear_grad", mutates_args=())
def packed_linear_grad(gradient: Tensor, packed: Tensor, columns: int) -> Tensor:
    return gradient @ _dequantized(packed, columns, gradient.dtype)


@packed_linear_grad.register_fake
def _(gradient: Tensor, _packed: Tensor, columns: int) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], columns))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, packed = inputs
    ctx.columns = x.shape[-1]
    ctx.save_for_backward(packed)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (packed,) = ctx.saved_tensors
    return packed_linear_grad(gradient, packed, ctx.columns), None


packed_linear.register_autograd(_backward, setup_context=_keep)


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is frozen and stored as bytes. Tensor parallelism sets `multiply`."""

    packed: nn.Parameter
    multiply: Callable[[Tensor, Tensor], Tensor] = staticmethod(packed_linear)

    def forward(self, input: Tensor) -> Tensor:
        product = self.multiply(input, self.packed)
        return product if self.bias is None else product + self.bias


class QuantizedLoraLinear(LoraLinear, QuantizedLinear):
    """A quantised linear layer with a low-rank product in full precision."""


def quantize_layers(model: nn.Module, kind: Kind) -> None:
    """Replace the linear layers of a model on the meta device by quantised ones without content."""
    kinds: dict[type[nn.Module], type[QuantizedLinear]] = {
        nn.Linear: QuantizedLinear,
        LoraLinear: QuantizedLoraLinear,
    }
    for name, layer in list(model.named_modules()):
        if (new := kinds.get(type(layer))) is None:
            continue
        made = converted(layer, new)
        weight = made._parameters.pop("weight")
        assert weight is not None
        shape = packed_shape(tuple(weight.shape), kind)
        empty = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        made.packed = nn.Parameter(empty, requires_grad=False)
        replace_module(model, name, made)
