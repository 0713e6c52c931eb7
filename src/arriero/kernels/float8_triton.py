"""Triton kernels of `arriero.kernels.float8`: the cast to both layouts, and SwiGLU of a joint matrix."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_BLOCK = 8192
_TILE = (64, 128)


def both_layouts(parts: Sequence[Tensor], kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Stack contiguous matrices of one width; return their cast, its transpose, and the scale."""
    rows, width, device = sum(part.shape[0] for part in parts), parts[0].shape[1], parts[0].device
    cast = torch.empty(rows, width, dtype=kind, device=device)
    transposed = torch.empty(width, rows, dtype=kind, device=device)
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
            transposed[:, first:last],
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
    return cast, transposed, scale


@triton.jit
def _magnitude(values):
    """Return absolute values with NaN as inf, because max() ignores NaN."""
    values = tl.abs(values.to(tl.float32))
    return tl.where(values != values, float("inf"), values)


@triton.jit
def _largest(x, found, count, BLOCK: tl.constexpr):
    """Store the largest magnitude that each program finds in every n-th block."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    whole = count // BLOCK
    for block in range(program, whole, programs):
        most = tl.maximum(most, _magnitude(tl.load(x + block * BLOCK + at)))
    # the last, partial block is read by one program
    rest = whole.to(tl.int64) * BLOCK + at
    inside = (rest < count) & (program == 0)
    most = tl.maximum(most, _magnitude(tl.load(x + rest, mask=inside, other=0.0)))
    tl.store(found + program, tl.max(most, 0))


@triton.jit
def _cast_both(
    x, cast, transposed, transposed_stride, largest, scale, rows, columns,
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
    # rounding may exceed the largest float8 number
    values = tl.clamp(values, -MOST, MOST).to(TYPE)
    tl.store(cast + here, values, mask=inside)
    there = j[:, None] * transposed_stride + i[None, :]
    tl.store(transposed + there, tl.trans(values), mask=tl.trans(inside))
    tl.store(scale, most / MOST, mask=(tl.program_id(0) == 0) & (tl.program_id(1) == 0))


@triton.jit
def swiglu_forward(y, h, width, BLOCK: tl.constexpr):
    """Each program computes a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(y + row * 2 * width + at, mask=inside).to(tl.float32)
    up = tl.load(y + row * 2 * width + width + at, mask=inside).to(tl.float32)
    tl.store(h + row * width + at, (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(gradient, y, y_grad, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(y + row * 2 * width + at, mask=inside).to(tl.float32)
    up = tl.load(y + row * 2 * width + width + at, mask=inside).to(tl.float32)
    grad = tl.load(gradient + row * width + at, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    gate_grad = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    kind = y_grad.dtype.element_ty
    tl.store(y_grad + row * 2 * width + at, gate_grad.to(kind), mask=inside)
    tl.store(y_grad + row * 2 * width + width + at, (grad * gate * sigmoid).to(kind), mask=inside)
