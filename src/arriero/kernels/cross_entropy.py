"""Cross-entropy over rows of logits, and its gradient written in their place.

Logits are read once from memory: a row is still in the cache when its gradient is computed. With the
vocabulary split over ranks, statistics and gradient are separate kernels, and the ranks exchange the
statistics in between. The PyTorch reference is in `arriero.parallel.loss`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def loss_and_logits_grad_(
    logits_CV: Tensor, columns: int, labels_C: Tensor, ignored: int, z_loss: float
) -> Tensor:
    """Return the summed loss and overwrite the logits by their gradient; later columns are padding."""
    loss_C = torch.empty(logits_CV.shape[0], dtype=torch.float32, device=logits_CV.device)
    _launch(_whole, logits_CV, labels_C, loss_C, columns, ignored, z_loss)
    return loss_C.sum()


def softmax_statistics(logits_CV: Tensor, columns: int, target_C: Tensor) -> Tensor:
    """Return (3, C): the largest logit of a row, the sum of exp(logit - it), the logit of a target >= 0."""
    found_3C = torch.empty(3, logits_CV.shape[0], dtype=torch.float32, device=logits_CV.device)
    _launch(_statistics, logits_CV, target_C, found_3C, columns, logits_CV.shape[0])
    return found_3C


def logits_grad_(logits_CV: Tensor, columns: int, target_C: Tensor, top_C: Tensor, factor_C: Tensor) -> None:
    """Overwrite logits by factor x exp(logit - top), minus one at a target >= 0."""
    _launch(_gradient, logits_CV, target_C, top_C.contiguous(), factor_C.contiguous(), columns)


def scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """Multiply by an fp32 scalar on the device; PyTorch's product of two dtypes is four times as slow."""
    result = torch.empty_like(tensor)
    blocks = triton.cdiv(tensor.numel(), _BLOCK)
    _scaled[(blocks,)](tensor, result, factor, tensor.numel(), BLOCK=_BLOCK, num_warps=_WARPS)
    return result


def _launch(kernel, logits_CV: Tensor, *arguments) -> None:
    rows, width = logits_CV.shape
    if logits_CV.stride(1) != 1:
        raise ValueError("rows of logits must be contiguous")
    kernel[(rows,)](logits_CV, logits_CV.stride(0), width, *arguments, BLOCK=_BLOCK, num_warps=_WARPS)


@triton.jit
def _scaled(tensor, result, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(tensor + at, mask=at < count) * tl.load(factor)
    tl.store(result + at, values.to(tensor.dtype.element_ty), mask=at < count)


@triton.jit
def _row_statistics(row, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # finite, because inf - inf is NaN
    top_B = tl.full((BLOCK,), -3.0e38, tl.float32)
    sum_B = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        x = tl.load(row + start + at, mask=inside, other=-3.0e38).to(tl.float32)
        higher = tl.maximum(top_B, x)
        sum_B = sum_B * tl.exp(top_B - higher) + tl.where(inside, tl.exp(x - higher), 0.0)
        top_B = higher
    top = tl.max(top_B, 0)
    return top, tl.sum(sum_B * tl.exp(top_B - top), 0)


@triton.jit
def _row_gradient(row, columns, width, target, top, factor, less, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        column = start + at
        x = tl.load(row + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        gradient = factor * tl.exp(x - top) - tl.where(column == target, less, 0.0)
        tl.store(row + column, gradient.to(row.dtype.element_ty), mask=column < width)


@triton.jit
def _whole(logits, stride, width, labels, losses, columns, ignored, z_loss, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    label = tl.load(labels + number)
    counts = tl.where(label == ignored, 0.0, 1.0)
    wanted = tl.load(row + label, mask=label != ignored, other=0.0).to(tl.float32)
    top, total = _row_statistics(row, columns, BLOCK)
    log_total = tl.log(total)
    # subtract before adding: fp32 would lose a small difference of large numbers
    tl.store(losses + number, (log_total + (top - wanted)) * counts)
    factor = counts * (1.0 + 2.0 * z_loss * (top + log_total)) / total
    _row_gradient(row, columns, width, label, top, factor, counts, BLOCK)


@triton.jit
def _statistics(logits, stride, width, targets, found, columns, rows, BLOCK: tl.constexpr):  # noqa: ARG001
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    target = tl.load(targets + number)
    wanted = tl.load(row + target, mask=target >= 0, other=0.0).to(tl.float32)
    top, total = _row_statistics(row, columns, BLOCK)
    tl.store(found + number, top)
    tl.store(found + rows + number, total)
    tl.store(found + 2 * rows + number, wanted)


@triton.jit
def _gradient(logits, stride, width, targets, tops, factors, columns, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    target = tl.load(targets + number)
    top, factor = tl.load(tops + number), tl.load(factors + number)
    _row_gradient(row, columns, width, target, top, factor, 1.0, BLOCK)
