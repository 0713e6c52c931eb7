"""LayerNorm with its residual, and GELU with its bias, as modules that replace PyTorch's.

The compiler's forward kernels are as good. In backward it sums the gradients of weight and bias over tokens
in a second pass; here one pass computes all gradients, and adds the gradient of the residual connection.
The kernels are called as plain Triton kernels, which the compiler launches itself: a custom operator would
cost 100 us of Python per call.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_WIDEST_NORM = 16384
# backward of the norm: three inputs per row, loaded up to two rows ahead
_NORM_INPUTS, _NORM_STAGES = 3, 3
_GELU_ROWS, _GELU_COLUMNS = 16, 128
# programs per block of columns in backward of GELU
_GELU_PROGRAMS = 32
# sqrt(2 / pi), and the coefficient of the cube
_ROOT = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)
_SUM_ROWS, _SUM_COLUMNS = 64, 64


class Processors(NamedTuple):
    """The number of processors of a GPU, and the shared memory of each in bytes."""

    count: int
    memory: int

    @classmethod
    def of(cls, device: torch.device) -> "Processors":
        found = torch.cuda.get_device_properties(device)
        # AMD GPUs do not report it: nothing is loaded ahead there
        return cls(found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 0))


class ResidualLayerNorm(nn.LayerNorm):
    """LayerNorm that returns (x, norm of x). The caller uses the returned x for the residual connection, so
    that both gradients are added in one kernel."""

    processors: Processors

    def forward(self, input: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        if input.dtype == torch.float64 or input.shape[-1] > _WIDEST_NORM:
            return input, super().forward(input)
        return _ResidualLayerNorm.apply(input, self.weight, self.bias, self.eps, self.processors)


class LinearGelu(nn.Linear):
    """Linear layer followed by tanh-approximated GELU; bias and GELU are one kernel."""

    def forward(self, input: Tensor) -> Tensor:
        return _BiasGelu.apply(F.linear(input, self.weight), self.bias)  # pyrefly: ignore


class _ResidualLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, processors: Processors
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        y = torch.empty_like(x)
        mean = torch.empty(rows, dtype=torch.float32, device=x.device)
        scale = torch.empty_like(mean)
        _norm_forward[(rows,)](
            x, weight, bias, y, mean, scale, width, eps, BLOCK=_block(width), num_warps=_warps(width)
        )
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.processors = processors
        return x.view_as(x), y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, residual: Tensor, gradient: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        x, weight, mean, scale = ctx.saved_tensors
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        block = _block(width)
        # one program with wide rows occupies a processor
        programs = ctx.processors.count * (2 if width <= 4096 else 1)
        x_grad = torch.empty_like(x)
        sums = torch.empty(2, programs, width, dtype=torch.float32, device=x.device)
        ahead = _NORM_INPUTS * _NORM_STAGES * block * x.element_size() <= ctx.processors.memory
        _norm_backward[(programs,)](
            gradient.contiguous(), residual.contiguous(), x, weight, mean, scale, x_grad, sums, rows, width,
            BLOCK=block, STAGES=_NORM_STAGES if ahead else 1, num_warps=_warps(width),
        )  # fmt: skip
        weight_grad, bias_grad = _sum_over_programs(sums, weight.dtype)
        return x_grad, weight_grad, bias_grad, None, None


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor) -> Tensor:
        z = z.contiguous()
        rows, width = z.numel() // z.shape[-1], z.shape[-1]
        h = torch.empty_like(z)
        # rows are the first grid dimension, because the others are limited to 65,535
        _gelu_forward[(-(-rows // _GELU_ROWS), -(-width // _GELU_COLUMNS))](
            z, bias, h, rows, width, ROWS=_GELU_ROWS, COLUMNS=_GELU_COLUMNS
        )
        ctx.save_for_backward(z, bias)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        z, bias = ctx.saved_tensors
        rows, width = z.numel() // z.shape[-1], z.shape[-1]
        z_grad = torch.empty_like(z)
        sums = torch.empty(1, _GELU_PROGRAMS, width, dtype=torch.float32, device=z.device)
        _gelu_backward[(-(-width // _GELU_COLUMNS), _GELU_PROGRAMS)](
            gradient.contiguous(), z, bias, z_grad, sums, rows, width,
            ROWS=_GELU_ROWS, COLUMNS=_GELU_COLUMNS, STAGES=1 if torch.version.hip else 3,
        )  # fmt: skip
        return z_grad, _sum_over_programs(sums, bias.dtype)[0]


def _block(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _warps(width: int) -> int:
    return 4 if width <= 4096 else 8 if width <= 8192 else 16


def _sum_over_programs(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up the sums of all programs of a kernel: (kinds, programs, width) to (kinds, width)."""
    kinds, programs, width = sums.shape
    result = torch.empty(kinds, width, dtype=dtype, device=sums.device)
    _sum_kernel[(-(-width // _SUM_COLUMNS), kinds)](
        sums, result, programs, width, ROWS=_SUM_ROWS, COLUMNS=_SUM_COLUMNS
    )
    return result


@triton.jit
def _sum_kernel(sums, result, programs, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    kind = tl.program_id(1)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < programs) & (at[None, :] < width)
        here = (kind * programs + row[:, None]) * width + at[None, :]
        found += tl.load(sums + here, mask=inside, other=0.0)
    tl.store(result + kind * width + at, tl.sum(found, 0).to(result.dtype.element_ty), mask=at < width)


@triton.jit
def _norm_forward(x, weight, bias, y, means, scales, width, eps, BLOCK: tl.constexpr):
    """Each program computes one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / width
    tl.store(means + row, mean)
    values = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    tl.store(scales + row, scale)
    values = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    y_grad, residual_grad, x, weight, means, scales, x_grad, sums, rows, width,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program computes every n-th row, and stores its sums for the gradients of weight and bias."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(program, rows, programs, num_stages=STAGES):
        here = row * width + at
        grad = tl.load(y_grad + here, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_grad + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        values -= tl.load(means + row)
        values = tl.where(inside, values * scale, 0.0)
        weight_sum += grad * values
        bias_sum += grad
        grad *= weights
        along = values * (tl.sum(grad * values, 0) / width)
        along += tl.sum(grad, 0) / width
        found = residual + scale * (grad - along)
        tl.store(x_grad + here, found.to(x_grad.dtype.element_ty), mask=inside)
    tl.store(sums + program * width + at, weight_sum, mask=inside)
    tl.store(sums + (programs + program) * width + at, bias_sum, mask=inside)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _gelu_forward(z, bias, h, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Each program computes one tile."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i[:, None] < rows) & (j[None, :] < width)
    here = i[:, None] * width + j[None, :]
    x = tl.load(z + here, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + j, mask=j < width, other=0.0).to(tl.float32)[None, :]
    y = 0.5 * x * (1.0 + _tanh(_ROOT * (x + _CUBIC * x * x * x)))
    tl.store(h + here, y.to(h.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(
    h_grad, z, bias, z_grad, sums, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program computes every n-th tile of its columns, and stores its sum for the bias's gradient."""
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    biases = tl.load(bias + j, mask=j < width, other=0.0).to(tl.float32)[None, :]
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    first, step = tl.program_id(1).to(tl.int64) * ROWS, tl.num_programs(1) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        i = start + tl.arange(0, ROWS)
        inside = (i[:, None] < rows) & (j[None, :] < width)
        here = i[:, None] * width + j[None, :]
        x = tl.load(z + here, mask=inside, other=0.0).to(tl.float32) + biases
        grad = tl.load(h_grad + here, mask=inside, other=0.0).to(tl.float32)
        tanh = _tanh(_ROOT * (x + _CUBIC * x * x * x))
        inner = _ROOT * (1.0 + 3.0 * _CUBIC * x * x)
        grad *= 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
        tl.store(z_grad + here, grad.to(z_grad.dtype.element_ty), mask=inside)
        found += grad
    at = tl.program_id(1).to(tl.int64) * width + j
    tl.store(sums + at, tl.sum(found, 0), mask=j < width)
