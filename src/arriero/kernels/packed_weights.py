"""Dequantise weights of 8 or 4 bits in one pass. The PyTorch reference is in `arriero.model.quantized`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = 32
_SCALE = 4


def unpack(packed: Tensor, columns: int, dtype: torch.dtype, levels: Tensor) -> Tensor:
    """Return the weight (rows, columns) of a stored form (rows, blocks, bytes); `levels` are those of nf4."""
    rows, blocks, size = packed.shape
    weight = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    packed, count = packed.contiguous(), rows * blocks
    grid = (triton.cdiv(count, _BLOCKS),)
    scales = packed.view(torch.float32)
    _unpack[grid](
        packed,
        scales,
        levels,
        weight,
        count,
        blocks,
        columns,
        BYTES=size - _SCALE,
        BLOCKS=_BLOCKS,
        num_warps=4,
    )
    return weight


@triton.jit
def _unpack(
    packed, scales, levels, weight, count, blocks, columns, BYTES: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Each program dequantises some blocks of 64 elements: 64 bytes in int8, 32 in nf4, then the scale."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < count
    begin = block.to(tl.int64) * (BYTES + 4)
    codes = tl.load(packed + begin[:, None] + tl.arange(0, BYTES)[None, :], mask=inside[:, None], other=0)
    scale = tl.load(scales + begin // 4 + BYTES // 4, mask=inside, other=0.0)
    if BYTES == 32:
        unit = tl.load(levels + tl.interleave(codes >> 4, codes & 15).to(tl.int32))
    else:
        unit = codes.to(tl.int8, bitcast=True).to(tl.float32) * (1.0 / 127.0)
    column = (block % blocks)[:, None] * 64 + tl.arange(0, 64)[None, :]
    row = (block // blocks).to(tl.int64)
    values = (unit * scale[:, None]).to(weight.dtype.element_ty)
    tl.store(weight + row[:, None] * columns + column, values, mask=inside[:, None] & (column < columns))
