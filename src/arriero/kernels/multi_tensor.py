"""Many tensors in one launch: which tensor a block of elements belongs to, and where each tensor lies."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arriero.kernels import LINE

BLOCK = 1024
WARPS = 4
# of reads alone more are in flight
_READ_BLOCK = 8192


class Blocks(NamedTuple):
    """`owner` of each block, and of each tensor its size and its first block."""

    count: int
    owner: Tensor
    sizes: Tensor
    first: Tensor


@lru_cache(maxsize=16)
def blocks_of(sizes: tuple[int, ...], device: torch.device, block: int = BLOCK) -> Blocks:
    counts = torch.tensor([-(-size // block) for size in sizes])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts).int()
    first = (counts.cumsum(0) - counts).int()
    return Blocks(len(owner), owner.to(device), torch.tensor(sizes).to(device), first.to(device))


def addresses(*tables: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Where the tensors of each table lie, in a row of its own on the device; and whether all are in line."""
    if not all(tensor.is_contiguous() for tensors in tables for tensor in tensors):
        raise ValueError("a kernel over many tensors takes contiguous ones")
    found = [[tensor.data_ptr() for tensor in tensors] for tensors in tables]
    # from other memory than pinned, the copy would wait for all that the GPU has yet to do
    rows = torch.tensor(found, pin_memory=True).to(tables[0][0].device, non_blocking=True)
    return rows, not any(place % LINE for places in found for place in places)


def triton_type(tensor: Tensor) -> tl.dtype:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[tensor.dtype]


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of tensors of one type; the sums of blocks are added in fp64."""
    tensors = [tensor.contiguous() for tensor in tensors]
    blocks = blocks_of(tuple(tensor.numel() for tensor in tensors), tensors[0].device, _READ_BLOCK)
    sums = torch.empty(blocks.count, dtype=torch.float32, device=tensors[0].device)
    rows, in_line = addresses(tensors)
    _sum_of_squares[(blocks.count,)](
        sums,
        blocks.owner,
        blocks.sizes,
        blocks.first,
        rows,
        TYPE=triton_type(tensors[0]),
        IN_LINE=in_line,
        BLOCK=_READ_BLOCK,
        num_warps=WARPS,
    )
    return sums.double().sum()


@triton.jit
def place_of_block(owners, sizes, first_blocks, BLOCK: tl.constexpr):
    """The tensor's number, where in it the block begins, and how many elements are left from there."""
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    start = (block - tl.load(first_blocks + owner)).to(tl.int64) * BLOCK
    return owner, start, tl.load(sizes + owner) - start


@triton.jit
def pointer_to(table, owner, start, TYPE: tl.constexpr, IN_LINE: tl.constexpr):
    pointer = tl.load(table + owner).to(tl.pointer_type(TYPE)) + start
    # what begins in line does so in each block, and may be read in wide steps
    if IN_LINE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _sum_of_squares(
    sums, owners, sizes, first_blocks, table,
    TYPE: tl.constexpr, IN_LINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner, start, left = place_of_block(owners, sizes, first_blocks, BLOCK)
    pointer = pointer_to(table, owner, start, TYPE, IN_LINE)
    at = tl.arange(0, BLOCK)
    # a mask would forbid wide loads, and almost all blocks are whole
    if left >= BLOCK:
        x = tl.load(pointer + at).to(tl.float32)
    else:
        x = tl.load(pointer + at, mask=at < left, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(x * x, 0))
