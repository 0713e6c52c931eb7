"""Sums over all rows, when each program of a kernel has some of them: every program leaves its own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 64, 64


def total(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """(kinds, programs, width) to (kinds, width)."""
    kinds, programs, width = sums.shape
    result = torch.empty(kinds, width, dtype=dtype, device=sums.device)
    _total[(-(-width // _COLUMNS), kinds)](sums, result, programs, width, ROWS=_ROWS, COLUMNS=_COLUMNS)
    return result


@triton.jit
def _total(sums, result, programs, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    kind = tl.program_id(1)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < programs) & (at[None, :] < width)
        here = (kind * programs + row[:, None]) * width + at[None, :]
        found += tl.load(sums + here, mask=inside, other=0.0)
    tl.store(result + kind * width + at, tl.sum(found, 0).to(result.dtype.element_ty), mask=at < width)
