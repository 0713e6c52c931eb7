"""GELU, as GPT-2 has it, of a matmul's result and its bias.

The compiler needs a second pass over the gradient for the bias's; here it is summed on the way.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arriero.kernels.partial_sums import total

_ROWS, _COLUMNS = 16, 128
# for each block of columns, backward
_PROGRAMS = 32
# the root of 2 / pi, and the share of the cube
_ROOT = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)


def gelu_of(x: Tensor, layer: nn.Linear) -> Tensor:
    return _Gelu.apply(F.linear(x, layer.weight), layer.bias)  # pyrefly: ignore


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor) -> Tensor:
        z = z.contiguous()
        rows, width = z.numel() // z.shape[-1], z.shape[-1]
        h = torch.empty_like(z)
        # tiles of rows first: of the others a GPU counts no more than 65,535
        _forward[(-(-rows // _ROWS), -(-width // _COLUMNS))](
            z, bias, h, rows, width, ROWS=_ROWS, COLUMNS=_COLUMNS
        )
        ctx.save_for_backward(z, bias)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        z, bias = ctx.saved_tensors
        rows, width = z.numel() // z.shape[-1], z.shape[-1]
        z_grad = torch.empty_like(z)
        sums = torch.empty(1, _PROGRAMS, width, dtype=torch.float32, device=z.device)
        _backward[(-(-width // _COLUMNS), _PROGRAMS)](
            gradient.contiguous(), z, bias, z_grad, sums, rows, width,
            ROWS=_ROWS, COLUMNS=_COLUMNS, STAGES=1 if torch.version.hip else 3,
        )  # fmt: skip
        return z_grad, total(sums, bias.dtype)[0]


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _forward(z, bias, h, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program has one tile."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i[:, None] < rows) & (j[None, :] < width)
    here = i[:, None] * width + j[None, :]
    x = tl.load(z + here, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + j, mask=j < width, other=0.0).to(tl.float32)[None, :]
    y = 0.5 * x * (1.0 + _tanh(_ROOT * (x + _CUBIC * x * x * x)))
    tl.store(h + here, y.to(h.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    h_grad, z, bias, z_grad, sums, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program goes over every n-th tile of its columns, and leaves the bias's gradient."""
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    biases = tl.load(bias + j, mask=j < width, other=0.0).to(tl.float32)[None, :]
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    first, step = tl.program_id(1).to(tl.int64) * ROWS, tl.num_programs(1) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        i = start + tl.arange(0, ROWS)
        inside = (i[:, None] < rows) & (j[None, :] < width)
        here = i[:, None] * width + j[None, :]
        x = tl.load(z + here, mask=inside, other=0.0).to(tl.float32) + biases
        slope = tl.load(h_grad + here, mask=inside, other=0.0).to(tl.float32)
        tanh = _tanh(_ROOT * (x + _CUBIC * x * x * x))
        inner = _ROOT * (1.0 + 3.0 * _CUBIC * x * x)
        slope *= 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
        tl.store(z_grad + here, slope.to(z_grad.dtype.element_ty), mask=inside)
        found += slope
    at = tl.program_id(1).to(tl.int64) * width + j
    tl.store(sums + at, tl.sum(found, 0), mask=j < width)
