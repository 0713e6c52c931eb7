"""bf16 to float8 in two layouts: one pass for the largest element, one for both casts."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_BLOCK = 8192
_TILE = (64, 128)


def both_layouts(parts: Sequence[Tensor], kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of contiguous matrices of one width, stacked: the cast, its transpose, and their scale."""
    rows, width, device = sum(part.shape[0] for part in parts), parts[0].shape[1], parts[0].device
    cast = torch.empty(rows, width, dtype=kind, device=device)
    turned = torch.empty(width, rows, dtype=kind, device=device)
    scale = torch.empty((), dtype=torch.float32, device=device)
    programs = 1 << max(0, min(1024, triton.cdiv(parts[0].numel(), _BLOCK)).bit_length() - 1)
    largest = torch.empty(len(parts), programs, dtype=torch.float32, device=device)
    for part, found in zip(parts, largest, strict=True):
        _largest[(programs,)](part, found, part.numel(), BLOCK=_BLOCK, num_warps=8)
    first = 0
    for part in parts:
        last = first + part.shape[0]
        grid = (triton.cdiv(part.shape[0], _TILE[0]), triton.cdiv(width, _TILE[1]))
        _cast_both[grid](
            part,
            cast[first:last],
            turned[:, first:last],
            rows,
            largest,
            scale,
            part.shape[0],
            width,
            FOUND=largest.numel(),
            HELD=triton.next_power_of_2(largest.numel()),
            TYPE=_TYPES[kind],
            MOST=torch.finfo(kind).max,
            ROWS=_TILE[0],
            COLUMNS=_TILE[1],
            num_warps=4,
        )
        first = last
    return cast, turned, scale


@triton.jit
def _size(values):
    """Infinite for what is no number: a maximum would pass over it, and of an infinite scale all is lost."""
    values = tl.abs(values.to(tl.float32))
    return tl.where(values != values, float("inf"), values)


@triton.jit
def _largest(x, found, count, BLOCK: tl.constexpr):
    """Each program goes over every n-th block."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    whole = count // BLOCK
    for block in range(program, whole, programs):
        most = tl.maximum(most, _size(tl.load(x + block * BLOCK + at)))
    # the rest, which only one program has
    rest = whole.to(tl.int64) * BLOCK + at
    inside = (rest < count) & (program == 0)
    most = tl.maximum(most, _size(tl.load(x + rest, mask=inside, other=0.0)))
    tl.store(found + program, tl.max(most, 0))


@triton.jit
def _cast_both(
    x, cast, turned, turned_stride, largest, scale, rows, columns,
    FOUND: tl.constexpr, HELD: tl.constexpr, TYPE: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, HELD)
    most = tl.maximum(tl.max(tl.load(largest + at, mask=at < FOUND, other=0.0), 0), 1e-12)
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    here = i[:, None] * columns + j[None, :]
    values = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) * (MOST / most)
    # rounding may step over the largest number there is
    values = tl.clamp(values, -MOST, MOST).to(TYPE)
    tl.store(cast + here, values, mask=inside)
    there = j[:, None] * turned_stride + i[None, :]
    tl.store(turned + there, tl.trans(values), mask=tl.trans(inside))
    tl.store(scale, most / MOST, mask=(tl.program_id(0) == 0) & (tl.program_id(1) == 0))
