"""Softmax cross-entropy over rows of logits, and its slope written in their place.

Read once and written once: a row is still in the cache when its slope is made. For a slice of the vocabulary
the two halves are called apart, and the ranks exchange their statistics between them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def loss_and_slope(logits_CV: Tensor, columns: int, labels_C: Tensor, ignored: int, z_loss: float) -> Tensor:
    """The summed loss. Columns from `columns` on are padding: they count for nothing and get no slope."""
    loss_C = torch.empty(logits_CV.shape[0], dtype=torch.float32, device=logits_CV.device)
    _launch(_whole, logits_CV, labels_C, loss_C, columns, ignored, z_loss)
    return loss_C.sum()


def statistics(logits_CV: Tensor, columns: int, target_C: Tensor) -> Tensor:
    """(3, C): the largest of a row, the sum of exp beyond it, the target's logit or 0 where that is < 0."""
    found_3C = torch.empty(3, logits_CV.shape[0], dtype=torch.float32, device=logits_CV.device)
    _launch(_statistics, logits_CV, target_C, found_3C, columns, logits_CV.shape[0])
    return found_3C


def slope_in_place(logits_CV: Tensor, columns: int, target_C: Tensor, top_C: Tensor, share_C: Tensor) -> None:
    """share x exp(logit - top), less one at the target where there is one."""
    _launch(_slope, logits_CV, target_C, top_C.contiguous(), share_C.contiguous(), columns)


def scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """By an fp32 number on the device: PyTorch's own product of two types is four times as slow."""
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
    # finite, for the difference of two infinities is no number
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
def _row_slope(row, columns, width, target, top, share, less, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        column = start + at
        x = tl.load(row + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        slope = share * tl.exp(x - top) - tl.where(column == target, less, 0.0)
        tl.store(row + column, slope.to(row.dtype.element_ty), mask=column < width)


@triton.jit
def _whole(logits, stride, width, labels, losses, columns, ignored, z_loss, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    label = tl.load(labels + number)
    counts = tl.where(label == ignored, 0.0, 1.0)
    wanted = tl.load(row + label, mask=label != ignored, other=0.0).to(tl.float32)
    top, total = _row_statistics(row, columns, BLOCK)
    log_total = tl.log(total)
    # near the top: far from zero, fp32 would round the small difference away
    tl.store(losses + number, (log_total + (top - wanted)) * counts)
    share = counts * (1.0 + 2.0 * z_loss * (top + log_total)) / total
    _row_slope(row, columns, width, label, top, share, counts, BLOCK)


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
def _slope(logits, stride, width, targets, tops, shares, columns, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    target = tl.load(targets + number)
    top, share = tl.load(tops + number), tl.load(shares + number)
    _row_slope(row, columns, width, target, top, share, 1.0, BLOCK)
