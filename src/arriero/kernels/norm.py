"""LayerNorm and RMSNorm of a stream of states that also goes on past them.

The compiler makes a good kernel of them forward. Backward it sums the weight's gradient in a second pass, at
half the memory's speed; here one pass does all, and adds the gradient of what went past on the way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arriero.kernels.partial_sums import total

_WIDEST = 16384
# backward a row of each of three inputs is computed with while those of the next two are on their way
_INPUTS, _STAGES = 3, 3


def normed_on(device: torch.device) -> Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]:
    processor = _Processor.of(device)

    def normed(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """x, and its norm. Use the first in place of x, so that both gradients meet in one kernel."""
        if isinstance(norm, nn.RMSNorm):
            known = norm.weight is not None and norm.eps is not None
            bias = None
        else:
            known = isinstance(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None
            bias = norm.bias if known else None
        if not known or x.dtype == torch.float64 or x.shape[-1] > _WIDEST:
            return x, norm(x)
        return _Normed.apply(x, norm.weight, bias, norm.eps, processor)  # pyrefly: ignore

    return normed


class _Processor(NamedTuple):
    """How many there are, and the memory that each has for itself."""

    count: int
    memory: int

    @classmethod
    def of(cls, device: torch.device) -> "_Processor":
        found = torch.cuda.get_device_properties(device)
        # AMD's have none of that name: there nothing is loaded ahead
        return cls(found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 0))


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, processor: _Processor
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        y = torch.empty_like(x)
        mean = torch.empty(rows, dtype=torch.float32, device=x.device)
        scale = torch.empty_like(mean)
        _forward[(rows,)](
            x, weight, weight if bias is None else bias, y, mean, scale, width, eps,
            BLOCK=_block(width), CENTRED=bias is not None, num_warps=_warps(width),
        )  # fmt: skip
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.centred, ctx.processor = bias is not None, processor
        return x.view_as(x), y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor, gradient: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        x, weight, mean, scale = ctx.saved_tensors
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        block = _block(width)
        # wide rows fill a processor alone
        programs = ctx.processor.count * (2 if width <= 4096 else 1)
        x_grad = torch.empty_like(x)
        sums = torch.empty(1 + ctx.centred, programs, width, dtype=torch.float32, device=x.device)
        ahead = _INPUTS * _STAGES * block * x.element_size() <= ctx.processor.memory
        _backward[(programs,)](
            gradient.contiguous(), past.contiguous(), x, weight, mean, scale, x_grad, sums, rows, width,
            BLOCK=block, CENTRED=ctx.centred, STAGES=_STAGES if ahead else 1, num_warps=_warps(width),
        )  # fmt: skip
        found = total(sums, weight.dtype)
        return x_grad, found[0], found[1] if ctx.centred else None, None, None


def _block(width: int) -> int:
    return 1 << (width - 1).bit_length()


def _warps(width: int) -> int:
    return 4 if width <= 4096 else 8 if width <= 8192 else 16


@triton.jit
def _forward(
    x, weight, bias, y, means, scales, width, eps, BLOCK: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """A program has one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(values, 0) / width
        tl.store(means + row, mean)
        values = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    tl.store(scales + row, scale)
    values = values * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        values += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    y_grad, past_grad, x, weight, means, scales, x_grad, sums, rows, width,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program goes over every n-th row. It leaves the weight's gradient and, below those of all programs,
    the bias's."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(program, rows, programs, num_stages=STAGES):
        here = row * width + at
        slope = tl.load(y_grad + here, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        past = tl.load(past_grad + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        if CENTRED:
            values -= tl.load(means + row)
        values = tl.where(inside, values * scale, 0.0)
        weight_sum += slope * values
        bias_sum += slope
        slope *= weights
        along = values * (tl.sum(slope * values, 0) / width)
        if CENTRED:
            along += tl.sum(slope, 0) / width
        found = past + scale * (slope - along)
        tl.store(x_grad + here, found.to(x_grad.dtype.element_ty), mask=inside)
    tl.store(sums + program * width + at, weight_sum, mask=inside)
    if CENTRED:
        tl.store(sums + (programs + program) * width + at, bias_sum, mask=inside)
