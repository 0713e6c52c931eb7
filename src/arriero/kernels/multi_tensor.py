"""Optimizer kernels over many tensors in one launch: the gradient norm, and AdamW.

A launch has one program per block of elements; tables on the device map a block to its tensor and its
address. AdamW reads and writes every number once. Its PyTorch reference is `arriero.train.optim.rules`, and
its random bits are those of `arriero.train.optim.number_formats`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arriero.kernels import ALIGNMENT

_BLOCK = 1024
_WARPS = 4
# a kernel that only reads needs larger blocks to fill the memory bus
_READ_BLOCK = 8192


class _BlockTable(NamedTuple):
    """The tensor of each block (`owner`), and the size and the first block of each tensor."""

    count: int
    owner: Tensor
    sizes: Tensor
    first: Tensor


@lru_cache(maxsize=16)
def _block_table(sizes: tuple[int, ...], device: torch.device, block: int = _BLOCK) -> _BlockTable:
    counts = torch.tensor([-(-size // block) for size in sizes])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts).int()
    first = (counts.cumsum(0) - counts).int()
    return _BlockTable(len(owner), owner.to(device), torch.tensor(sizes).to(device), first.to(device))


def _addresses(*tables: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Return the addresses of the tensors, one row per table on the device, and whether all are aligned."""
    if not all(tensor.is_contiguous() for tensors in tables for tensor in tensors):
        raise ValueError("a multi-tensor kernel needs contiguous tensors")
    found = [[tensor.data_ptr() for tensor in tensors] for tensors in tables]
    # a copy from memory that is not pinned would wait for the GPU
    rows = torch.tensor(found, pin_memory=True).to(tables[0][0].device, non_blocking=True)
    return rows, not any(address % ALIGNMENT for row in found for address in row)


def _triton_type(tensor: Tensor) -> tl.dtype:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[tensor.dtype]


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of tensors of one dtype; the sums of blocks are added in fp64."""
    tensors = [tensor.contiguous() for tensor in tensors]
    blocks = _block_table(tuple(tensor.numel() for tensor in tensors), tensors[0].device, _READ_BLOCK)
    sums = torch.empty(blocks.count, dtype=torch.float32, device=tensors[0].device)
    rows, aligned = _addresses(tensors)
    _sum_of_squares[(blocks.count,)](
        sums,
        blocks.owner,
        blocks.sizes,
        blocks.first,
        rows,
        TYPE=_triton_type(tensors[0]),
        ALIGNED=aligned,
        BLOCK=_READ_BLOCK,
        num_warps=_WARPS,
    )
    return sums.double().sum()


@triton.jit
def _locate(owners, sizes, first_blocks, BLOCK: tl.constexpr):
    """Return the number of the block's tensor, the block's start in it, and the elements from there on."""
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    start = (block - tl.load(first_blocks + owner)).to(tl.int64) * BLOCK
    return owner, start, tl.load(sizes + owner) - start


@triton.jit
def _pointer(table, owner, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + owner).to(tl.pointer_type(TYPE)) + start
    # if tensors are aligned, so are blocks, and wide loads are possible
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _sum_of_squares(
    sums, owners, sizes, first_blocks, table,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner, start, left = _locate(owners, sizes, first_blocks, BLOCK)
    pointer = _pointer(table, owner, start, TYPE, ALIGNED)
    at = tl.arange(0, BLOCK)
    # a mask would prevent wide loads, and almost all blocks are full
    if left >= BLOCK:
        x = tl.load(pointer + at).to(tl.float32)
    else:
        x = tl.load(pointer + at, mask=at < left, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(x * x, 0))


class Rates(NamedTuple):
    """`rest1` and `rest2` are 1 - beta1 and 1 - beta2, rounded once."""

    lr: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    eps: float


class Parameters(NamedTuple):
    """Parameters of equal dtypes. `lows` are the lower halves of fp32 master weights whose upper halves are
    `weights`, else empty. `keys` (n, 2) int32 and `decays` (n,) fp32 are on the device."""

    weights: Sequence[Tensor]
    lows: Sequence[Tensor]
    gradients: Sequence[Tensor]
    first: Sequence[Tensor]
    second: Sequence[Tensor]
    decays: Tensor
    keys: Tensor


def adamw_(parameters: Parameters, rates: Rates, scalars: Tensor, step_key: int) -> None:
    """Update all parameters in place.

    `scalars` are four fp32 numbers on the device: the gradient's factor, the learning rate divided by the
    bias correction of the first moment, one over the root of the second's, and 1, or 0 to change nothing.
    """
    weights, lows = parameters.weights, parameters.lows
    blocks = _block_table(tuple(weight.numel() for weight in weights), weights[0].device)
    # the kernel does not read `lows` where there are none
    rows, aligned = _addresses(weights, lows or weights, *parameters[2:5])
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
        WEIGHT=_triton_type(weights[0]),
        GRADIENT=_triton_type(parameters.gradients[0]),
        MOMENT=_triton_type(parameters.first[0]),
        SPLIT=bool(lows),
        ALIGNED=aligned,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
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
    """Round to bf16 stochastically, with 16 random bits."""
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
        # for some NaNs the sum wraps and would look like a number
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
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner, start, left = _locate(owners, sizes, first_blocks, BLOCK)
    weight = _pointer(weights, owner, start, WEIGHT, ALIGNED)
    low = _pointer(lows, owner, start, tl.int16, ALIGNED)
    gradient = _pointer(gradients, owner, start, GRADIENT, ALIGNED)
    first = _pointer(firsts, owner, start, MOMENT, ALIGNED)
    second = _pointer(seconds, owner, start, MOMENT, ALIGNED)
    decay, factor = tl.load(decays + owner), tl.load(scalars)
    rate, unbias, accepted = tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
    key = tl.load(keys + 2 * owner).to(tl.uint32, bitcast=True)
    other = tl.load(keys + 2 * owner + 1).to(tl.uint32, bitcast=True)
    stepped = step.to(tl.uint32)
    if accepted > 0:
        # a mask would prevent wide loads, and almost all blocks are full
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
