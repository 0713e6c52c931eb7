"""The training loss: chunked linear cross-entropy over a vocabulary that may be split over ranks.

The head computes the logits of one chunk of tokens at a time, their loss and both gradients, so that the
logits of a batch never exist at once. `ChunkedLossHead` replaces the model's head in training.
Shapes: C tokens of a chunk, N tokens of a batch, V local rows of the vocabulary, D model width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function

from arriero.data.order.loader import IGNORED
from arriero.kernels import kernels, usable
from arriero.kernels.float8 import GRADIENTS, VALUES, both_layouts, padded_rows, product
from arriero.model.layers import Head, converted

# The name of the loss in a profile.
LOSS = "arriero.loss"
# GPUs multiply by 50,257 rows at a fifth of the speed of 50,304; float8 needs multiples of 16.
_ROW_MULTIPLE = 64


@dataclass(frozen=True)
class LossOptions:
    """`chunk` is the number of tokens whose logits exist at once, False for all. The z-loss contributes to
    gradients only, so that the reported loss is always the cross-entropy."""

    chunk: int | Literal[False]
    z_loss: float = 0.0
    float8: bool = False


class ChunkedLossHead(Head):
    """Head that computes the loss in chunks; without labels it returns logits."""

    options: LossOptions

    @classmethod
    def of(cls, head: Head, options: LossOptions) -> "ChunkedLossHead":
        new = converted(head, cls)
        new.options = options
        return new

    def forward(self, x_BTD: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        if labels_BT is None:
            return F.linear(x_BTD, self.weight)
        return chunked_loss(x_BTD, self.weight, labels_BT, self.options)


@record_function(LOSS)
def chunked_loss(x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, options: LossOptions) -> Tensor:
    """Return the summed cross-entropy of the labels.

    The weight may be a DTensor sharded by rows of the vocabulary. The hidden states are then the same on all
    its ranks, and their gradient is a partial sum that the caller must reduce.
    """
    held = _VocabularySlice(0, None)
    if isinstance(weight_VD, DTensor):
        weight_VD, held = _local_rows(weight_VD)
    x_ND, labels_N = x_BTD.flatten(0, -2), labels_BT.flatten()
    if torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad):
        return _ChunkedLoss.apply(x_ND, weight_VD, labels_N, options, held)
    total = x_ND.new_zeros((), dtype=torch.float32)
    for tokens in _chunks(labels_N, options.chunk):
        logits_CV = x_ND[tokens] @ weight_VD.T
        total += _summed_loss(logits_CV, labels_N[tokens], held)
    return total


class _VocabularySlice(NamedTuple):
    """The rows of the vocabulary from `start` that are local, and the ranks that share the vocabulary."""

    start: int
    ranks: dist.ProcessGroup | None


class _ChunkedLoss(torch.autograd.Function):
    """Compute gradients in the forward pass, while the logits of a chunk exist; backward only scales them.

    Backward may run twice: zero-bubble schedules compute the gradients of states and weight separately.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        options: LossOptions,
        held: _VocabularySlice,
    ) -> Tensor:
        ctx.weight_type = weight_VD.dtype
        matmuls = _Float8Matmuls(weight_VD) if options.float8 else _Matmuls(weight_VD)
        x_grad = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        weight_grad = _WeightGradient(weight_VD) if ctx.needs_input_grad[1] else None
        total = x_ND.new_zeros((), dtype=torch.float32)
        for tokens in _chunks(labels_N, options.chunk):
            x_CD = x_ND[tokens]
            logits_CV = matmuls.logits(x_CD)
            total += _logits_grad_(logits_CV, len(weight_VD), labels_N[tokens], options.z_loss, held)
            matmuls.gradients(logits_CV, x_CD, None if x_grad is None else x_grad[tokens], weight_grad)
            # or two chunks of logits would exist at once
            del logits_CV
        ctx.save_for_backward(x_grad, None if weight_grad is None else weight_grad.value())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        x_grad, weight_grad = (
            None if saved is None else _scaled(saved, grad_outputs[0]) for saved in ctx.saved_tensors
        )
        if weight_grad is not None:
            weight_grad = weight_grad.to(ctx.weight_type)
        return x_grad, weight_grad, None, None, None


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    if usable(gradient):
        return kernels("cross_entropy").scaled(gradient.contiguous(), factor)
    return (gradient.float() * factor).to(gradient.dtype)


class _Targets(NamedTuple):
    """The local column of each token's label, whether the label is local, whether it counts in the loss."""

    column_C1: Tensor
    local_C1: Tensor
    counted_C1: Tensor

    @classmethod
    def of(cls, labels_C: Tensor, held: _VocabularySlice, columns: int) -> "_Targets":
        counted_C1 = labels_C[:, None] != IGNORED
        column_C1 = labels_C[:, None] - held.start
        local_C1 = counted_C1
        if held.ranks is not None:
            local_C1 = counted_C1 & (column_C1 >= 0) & (column_C1 < columns)
        return cls(column_C1, local_C1, counted_C1)

    def column_or(self, other: int) -> Tensor:
        return self.column_C1.where(self.local_C1, other)


class _Softmax(NamedTuple):
    """Statistics of a softmax in fp32: the largest logit, the sum of exp(logit - it), the target's logit."""

    top_C1: Tensor
    sum_C1: Tensor
    target_C1: Tensor

    def loss(self, counted_C1: Tensor) -> Tensor:
        # subtract before adding: fp32 would lose a small difference of large numbers
        return ((self.sum_C1.log() + (self.top_C1 - self.target_C1)) * counted_C1).sum()


def _summed_loss(logits_CV: Tensor, labels_C: Tensor, held: _VocabularySlice) -> Tensor:
    columns = logits_CV.shape[1]
    targets = _Targets.of(labels_C, held, columns)
    if usable(logits_CV):
        own = _softmax_by_kernel(logits_CV, columns, targets)
    else:
        own, _ = _softmax_and_scores(logits_CV, targets)
    return _over_all_slices(own, held.ranks).loss(targets.counted_C1)


def _logits_grad_(
    logits_CV: Tensor, columns: int, labels_C: Tensor, z_loss: float, held: _VocabularySlice
) -> Tensor:
    """Return the summed loss of a chunk and overwrite the logits by their gradient.

    Columns from `columns` on are padding.
    """
    if usable(logits_CV) and held.ranks is None:
        return kernels("cross_entropy").loss_and_logits_grad_(logits_CV, columns, labels_C, IGNORED, z_loss)
    targets = _Targets.of(labels_C, held, columns)
    if usable(logits_CV):
        own, scores_CV = _softmax_by_kernel(logits_CV, columns, targets), None
    else:
        own, scores_CV = _softmax_and_scores(logits_CV, targets)
    every = _over_all_slices(own, held.ranks)
    factor_C1 = targets.counted_C1 * (own.top_C1 - every.top_C1).exp() / every.sum_C1
    if z_loss:
        factor_C1 = factor_C1 * (1.0 + 2.0 * z_loss * (every.top_C1 + every.sum_C1.log()))
    if scores_CV is None:
        target_C, top_C, factor_C = targets.column_or(-1)[:, 0], own.top_C1[:, 0], factor_C1[:, 0]
        kernels("cross_entropy").logits_grad_(logits_CV, columns, target_C, top_C, factor_C)
    else:
        scores_CV.mul_(factor_C1)
        column_C1 = targets.column_or(0)
        scores_CV.scatter_(1, column_C1, scores_CV.gather(1, column_C1) - targets.local_C1.float())
        # in fp32 both are one buffer, and nothing is copied
        logits_CV.copy_(scores_CV)
    return every.loss(targets.counted_C1)


def _softmax_by_kernel(logits_CV: Tensor, columns: int, targets: _Targets) -> _Softmax:
    found_3C = kernels("cross_entropy").softmax_statistics(logits_CV, columns, targets.column_or(-1)[:, 0])
    return _Softmax(*found_3C[..., None])


def _softmax_and_scores(logits_CV: Tensor, targets: _Targets) -> tuple[_Softmax, Tensor]:
    """Return the statistics, and the scores exp(logit - top), which overwrite fp32 logits."""
    scores_CV = logits_CV.float()
    target_C1 = scores_CV.gather(1, targets.column_or(0)) * targets.local_C1
    top_C1 = scores_CV.amax(1, keepdim=True)
    sum_C1 = scores_CV.sub_(top_C1).exp_().sum(1, keepdim=True)
    return _Softmax(top_C1, sum_C1, target_C1), scores_CV


def _over_all_slices(own: _Softmax, ranks: dist.ProcessGroup | None) -> _Softmax:
    """Combine the statistics of all slices by one all-gather of three numbers per token.

    All ranks add in the same order and get the same bits.
    """
    if ranks is None:
        return own
    mine = torch.stack(own)
    every = [torch.empty_like(mine) for _ in range(ranks.size())]
    dist.all_gather(every, mine, group=ranks)
    tops, sums, targets = torch.stack(every).unbind(1)
    top = tops.amax(0)
    return _Softmax(top, (sums * (tops - top).exp()).sum(0), targets.sum(0))


def _chunks(labels_N: Tensor, chunk: int | Literal[False]) -> Iterator[slice]:
    tokens = labels_N.shape[0]
    for first in range(0, tokens, chunk or max(tokens, 1)):
        yield slice(first, first + (chunk or tokens))


def _local_rows(weight_VD: DTensor) -> tuple[Tensor, _VocabularySlice]:
    mesh = weight_VD.device_mesh
    rows = -(-weight_VD.shape[0] // mesh.size())
    if mesh.ndim != 1 or not weight_VD.placements[0].is_shard(0):
        raise ValueError(f"the head's weight must be split by rows over one axis, not {weight_VD.placements}")
    if rows * (mesh.size() - 1) >= weight_VD.shape[0]:
        raise ValueError(f"{weight_VD.shape[0]} rows leave one of {mesh.size()} ranks without any")
    local = weight_VD.to_local(grad_placements=[Shard(0)])
    return local, _VocabularySlice(rows * mesh.get_local_rank(), mesh.get_group())


class _Matmuls:
    """The matmuls of the head for one chunk: logits, then the gradients of its states and the weight."""

    def __init__(self, weight_VD: Tensor) -> None:
        self._weight_VD = _padded_vocabulary(weight_VD)

    def logits(self, x_CD: Tensor) -> Tensor:
        return x_CD @ self._weight_VD.T

    def gradients(
        self,
        logits_grad_CV: Tensor,
        x_CD: Tensor,
        x_grad_CD: Tensor | None,
        weight_grad: "_WeightGradient | None",
    ) -> None:
        if x_grad_CD is not None:
            torch.mm(logits_grad_CV, self._weight_VD, out=x_grad_CD)
        if weight_grad is not None:
            weight_grad.add_matmul(logits_grad_CV, x_CD)


class _Float8Matmuls(_Matmuls):
    """Matmuls in float8 with one scale for the weight, for the states and for the gradient of a chunk."""

    def __init__(self, weight_VD: Tensor) -> None:
        padded = _padded_vocabulary(weight_VD)
        self._weight8_VD, self._weight8_DV, self._weight_scale = both_layouts([padded], VALUES)

    def logits(self, x_CD):
        x8_CD, self._x8_DC, self._x_scale = both_layouts([padded_rows(x_CD)], VALUES)
        scales = (self._x_scale, self._weight_scale)
        return product(x8_CD, self._weight8_VD, *scales, x_CD.dtype, fast=True)[: len(x_CD)]

    def gradients(self, logits_grad_CV, x_CD, x_grad_CD, weight_grad):
        grad8_CV, grad8_VC, scale = both_layouts([padded_rows(logits_grad_CV)], GRADIENTS)
        if x_grad_CD is not None:
            scales = (scale, self._weight_scale)
            found = product(grad8_CV, self._weight8_DV, *scales, x_CD.dtype, fast=False)
            x_grad_CD.copy_(found[: len(x_CD)])
        if weight_grad is not None:
            weight_grad.add(product(grad8_VC, self._x8_DC, scale, self._x_scale, x_CD.dtype, fast=False))


class _WeightGradient:
    """The sum of logits_grad.T @ x over chunks: one chunk is kept in its dtype, several are added in fp32."""

    def __init__(self, like_VD: Tensor) -> None:
        self._like = like_VD
        self._sum: Tensor | None = None

    def add_matmul(self, logits_grad_CV: Tensor, x_CD: Tensor) -> None:
        # in fp16 even one chunk is summed in fp32: the unscaled sum over a batch may overflow
        if self._sum is None and logits_grad_CV.dtype != torch.float16:
            self._sum = logits_grad_CV.T @ x_CD
            return
        if self._sum is None:
            self._sum = torch.zeros(logits_grad_CV.shape[1], x_CD.shape[1], device=x_CD.device)
        self._sum = self._sum.float()
        if logits_grad_CV.dtype == torch.float32:
            self._sum.addmm_(logits_grad_CV.T, x_CD)
        elif logits_grad_CV.is_cuda and torch.version.hip is None:
            torch.addmm(self._sum, logits_grad_CV.T, x_CD, out_dtype=torch.float32, out=self._sum)
        elif logits_grad_CV.dtype == torch.float16:
            self._sum.addmm_(logits_grad_CV.T.float(), x_CD.float())
        else:
            self._sum += logits_grad_CV.T @ x_CD

    def add(self, product_VD: Tensor) -> None:
        self._sum = product_VD if self._sum is None else self._sum.float().add_(product_VD)

    def value(self) -> Tensor:
        """Return the gradient without the rows of padding."""
        if self._sum is None:
            return torch.zeros_like(self._like)
        kept = self._sum[: len(self._like)]
        return kept if self._like.dtype == torch.float16 else kept.to(self._like.dtype)


def _padded_vocabulary(weight_VD: Tensor) -> Tensor:
    missing = -len(weight_VD) % _ROW_MULTIPLE if usable(weight_VD) else 0
    return F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD
