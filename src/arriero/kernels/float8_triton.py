"""Triton kernels of `arriero.kernels.float8`: the cast to both layouts, and SwiGLU of a joint matrix."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

_BLOCK = 8192
_TILE = (64, 128)


def both_layouts(parts: Sequence[Tensor], kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Stack contiguous matrices of one width; return their cast, its transpose, and the scale."""
    rows, width, device = sum(part.shape[0] for part in parts), parts[0].shape[1], parts[0].device
    cast = torch.empty(rows, width, dtype=kind, device=device)
    transposed = torch.empty(width, rows, dtype=kind, device=device)
    # one element, not a scalar: the compiler would launch a kernel to fill a scalar
    scale = torch.empty(1, dtype=torch.float32, device=device)
    programs = 1 << max(0, min(1024, triton.cdiv(parts[0].numel(), _BLOCK)).bit_length() - 1)
    largest = torch.empty(len(parts), programs, dtype=torch.float32, device=device)
    for i, part in enumerate(parts):
        wrap_triton(_largest)[(programs,)](part, largest, i, part.numel(), BLOCK=_BLOCK, num_warps=8)
    first = 0
    for part in parts:
        grid = (triton.cdiv(part.shape[0], _TILE[0]), triton.cdiv(width, _TILE[1]))
        # whole outputs and a first row, not slices: the compiler would copy slices that a kernel writes to
        wrap_triton(_cast_both)[grid](
            part,
            cast,
            transposed,
            rows,
            largest,
            scale,
            first,
            part.shape[0],
            width,
            FOUND=largest.numel(),
            HELD=triton.next_power_of_2(largest.numel()),
            WIDE_RANGE=kind == torch.float8_e5m2,
            MOST=torch.finfo(kind).max,
            ROWS=_TILE[0],
            COLUMNS=_TILE[1],
            num_warps=4,
        )
        first += part.shape[0]
    return cast, transposed, scale


@triton.jit
def _magnitude(values):
    """Return absolute values with NaN as inf, because max() ignores NaN."""
    values = tl.abs(values.to(tl.float32))
    return tl.where(values != values, float("inf"), values)


@triton.jit
def _largest(x, found, row, count, BLOCK: tl.constexpr):
    """Store in a row of `found` the largest magnitude that each program finds in every n-th block."""
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
    tl.store(found + row * programs + program, tl.max(most, 0))


@triton.jit
def _cast_both(
    x, cast, transposed, transposed_stride, largest, scale, first, rows, columns,
    FOUND: tl.constexpr, HELD: tl.constexpr, WIDE_RANGE: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast the rows of x, which begin at row `first` of the outputs; WIDE_RANGE is e5m2, else e4m3."""
    at = tl.arange(0, HELD)
    most = tl.maximum(tl.max(tl.load(largest + at, mask=at < FOUND, other=0.0), 0), 1e-12)
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i[:, None] < rows) & (j[None, :] < columns)
    here = i[:, None] * columns + j[None, :]
    values = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) * (MOST / most)
    # rounding may exceed the largest float8 number
    values = tl.clamp(values, -MOST, MOST)
    values = values.to(tl.float8e5) if WIDE_RANGE else values.to(tl.float8e4nv)
    row = first + i
    tl.store(cast + row[:, None] * columns + j[None, :], values, mask=inside)
    there = j[:, None] * transposed_stride + row[None, :]
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
