"""AdamW over all parameters in one launch: every number is read once and written once.

The twin is `arriero.train.optim.adamw`; random bits are those of `arriero.train.optim.rounding`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from arriero.kernels.multi_tensor import (
    BLOCK,
    WARPS,
    addresses,
    blocks_of,
    place_of_block,
    pointer_to,
    triton_type,
)


class Rates(NamedTuple):
    """The rests are what is left of one."""

    lr: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    eps: float


class Parameters(NamedTuple):
    """Of one kind: types are alike. `lows` are empty unless the weights are upper halves of fp32 ones;
    `keys` (n, 2) int32 and `decays` (n,) fp32 are on the device."""

    weights: Sequence[Tensor]
    lows: Sequence[Tensor]
    gradients: Sequence[Tensor]
    first: Sequence[Tensor]
    second: Sequence[Tensor]
    decays: Tensor
    keys: Tensor


def step_in_place(parameters: Parameters, rates: Rates, scalars: Tensor, step_key: int) -> None:
    """`scalars` are four fp32 numbers on the device: what gradients are multiplied by, the learning rate over
    the bias of the first moment, one over the root of the second's, and 1, or 0 to change nothing."""
    weights, lows = parameters.weights, parameters.lows
    blocks = blocks_of(tuple(weight.numel() for weight in weights), weights[0].device)
    # without lower halves the kernel reads none
    rows, in_line = addresses(weights, lows or weights, *parameters[2:5])
    _adamw[(blocks.count,)](
        blocks.owner,
        blocks.sizes,
        blocks.first,
        *rows,
        parameters.decays,
        parameters.keys,
        scalars,
        step_key,
        *rates,
        WEIGHT=triton_type(weights[0]),
        GRADIENT=triton_type(parameters.gradients[0]),
        MOMENT=triton_type(parameters.first[0]),
        SPLIT=bool(lows),
        IN_LINE=in_line,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


@triton.jit
def _random_bits(index, key, other, step):
    h = (index.to(tl.uint32)) ^ key
    h ^= h >> 16
    h *= 0x21F0AAAD
    h += other + step
    h ^= h >> 15
    h *= 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def _round(values, half):
    """To bf16, up with the probability that 16 random bits give."""
    bits = values.to(tl.uint32, bitcast=True)
    raised = ((bits + half) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) == 0x7F800000, values, raised).to(tl.bfloat16)


@triton.jit
def _load(pointer, at, left, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer + at, mask=at < left, other=0)
    return tl.load(pointer + at)


@triton.jit
def _store(pointer, at, left, values, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + at, values, mask=at < left)
    else:
        tl.store(pointer + at, values)


@triton.jit
def _update(
    weight, low, gradient, first, second, start, left, decay, key, other, step, factor,
    lr, rate, unbias, beta1, rest1, beta2, rest2, eps,
    SPLIT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    g = _load(gradient, at, left, MASKED).to(tl.float32) * factor
    m = _load(first, at, left, MASKED).to(tl.float32)
    v = _load(second, at, left, MASKED).to(tl.float32)
    held = _load(weight, at, left, MASKED)
    if SPLIT:
        lower = _load(low, at, left, MASKED).to(tl.int32)
        upper = held.to(tl.int16, bitcast=True).to(tl.int32) << 16
        w = (upper + lower).to(tl.float32, bitcast=True)
    else:
        w = held.to(tl.float32)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w = w * (1 - lr * decay) - rate * m / (tl.sqrt(v) * unbias + eps)

    random = _random_bits(start + at, key, other, step)
    if first.dtype.element_ty == tl.bfloat16:
        _store(first, at, left, _round(m, random & 0xFFFF), MASKED)
        _store(second, at, left, _round(v, random >> 16), MASKED)
    else:
        _store(first, at, left, m, MASKED)
        _store(second, at, left, v, MASKED)
    if SPLIT:
        bits = w.to(tl.int32, bitcast=True)
        upper = (bits + 0x8000) >> 16
        lower = bits - (upper << 16)
        # the sum wraps for some of those that are no number, and would pass for one
        upper, lower = tl.where(w != w, 0x7FC0, upper), tl.where(w != w, 0, lower)
        _store(low, at, left, lower.to(tl.int16), MASKED)
        _store(weight, at, left, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), MASKED)
    elif weight.dtype.element_ty == tl.bfloat16:
        _store(weight, at, left, _round(w, (random * 0x9E3779B1) >> 16), MASKED)
    else:
        _store(weight, at, left, w, MASKED)


@triton.jit(do_not_specialize=["step"])
def _adamw(
    owners, sizes, first_blocks, weights, lows, gradients, firsts, seconds, decays, keys, scalars, step,
    lr, beta1, rest1, beta2, rest2, eps,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, MOMENT: tl.constexpr, SPLIT: tl.constexpr,
    IN_LINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner, start, left = place_of_block(owners, sizes, first_blocks, BLOCK)
    weight = pointer_to(weights, owner, start, WEIGHT, IN_LINE)
    low = pointer_to(lows, owner, start, tl.int16, IN_LINE)
    gradient = pointer_to(gradients, owner, start, GRADIENT, IN_LINE)
    first = pointer_to(firsts, owner, start, MOMENT, IN_LINE)
    second = pointer_to(seconds, owner, start, MOMENT, IN_LINE)
    decay, factor = tl.load(decays + owner), tl.load(scalars)
    rate, unbias, accepted = tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
    key = tl.load(keys + 2 * owner).to(tl.uint32, bitcast=True)
    other = tl.load(keys + 2 * owner + 1).to(tl.uint32, bitcast=True)
    stepped = step.to(tl.uint32)
    if accepted > 0:
        # a mask would forbid wide loads, and almost all blocks are whole
        if left >= BLOCK:
            _update(
                weight, low, gradient, first, second, start, left, decay, key, other, stepped, factor,
                lr, rate, unbias, beta1, rest1, beta2, rest2, eps, SPLIT, False, BLOCK,
            )  # fmt: skip
        else:
            _update(
                weight, low, gradient, first, second, start, left, decay, key, other, stepped, factor,
                lr, rate, unbias, beta1, rest1, beta2, rest2, eps, SPLIT, True, BLOCK,
            )  # fmt: skip
