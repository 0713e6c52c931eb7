"""Linear cross-entropy a chunk of tokens at a time: the logits of a batch never exist at once.

C tokens of a chunk, N of a batch, V rows of the vocabulary held here.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function

from arriero.data.order.loader import IGNORED
from arriero.kernels import kernels, usable
from arriero.model.layers import HeadLoss
from arriero.train.head_products import SumOfProducts, products_with
from arriero.train.ranges import LOSS


def chunked_loss(chunk: int | Literal[False], z_loss: float = 0.0, float8: bool = False) -> HeadLoss:
    """For `Head.loss`. The value is the cross-entropy alone, and the z-loss is in the gradients only, so that
    what is reported means the same with and without it.

    The weight may be a slice of the vocabulary: a DTensor sharded by rows. The states are then the same on
    all its ranks, and their gradient is this slice's partial sum, for the caller to reduce.
    """

    @record_function(LOSS)
    def loss(x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor) -> Tensor:
        held = _Slice(0, None)
        if isinstance(weight_VD, DTensor):
            weight_VD, held = _local_rows(weight_VD)
        x_ND, labels_N = x_BTD.flatten(0, -2), labels_BT.flatten()
        if torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad):
            return _ChunkedLoss.apply(x_ND, weight_VD, labels_N, chunk, z_loss, float8, held)
        total = x_ND.new_zeros((), dtype=torch.float32)
        for tokens in _chunks(labels_N, chunk):
            logits_CV = x_ND[tokens] @ weight_VD.T
            total += _summed_loss(logits_CV, labels_N[tokens], held)
        return total

    return loss


class _Slice(NamedTuple):
    """Which rows of the vocabulary are held here: from where on, and who holds the others."""

    start: int
    ranks: dist.ProcessGroup | None


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made on the way forward, while a chunk's logits are there; backward only scales them.

    Backward may run more than once: schedules that split it ask for the states' part and the weight's apart.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk: int | Literal[False],
        z_loss: float,
        float8: bool,
        held: _Slice,
    ) -> Tensor:
        ctx.weight_type = weight_VD.dtype
        products = products_with(weight_VD, float8)
        x_grad = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        weight_grad = SumOfProducts(weight_VD) if ctx.needs_input_grad[1] else None
        total = x_ND.new_zeros((), dtype=torch.float32)
        for tokens in _chunks(labels_N, chunk):
            x_CD = x_ND[tokens]
            slope_CV = products.logits(x_CD)
            total += _slope_in_place(slope_CV, len(weight_VD), labels_N[tokens], z_loss, held)
            products.gradients(slope_CV, x_CD, None if x_grad is None else x_grad[tokens], weight_grad)
            # or the next chunk's logits would stand beside it
            del slope_CV
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
        return x_grad, weight_grad, None, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    if usable(gradient):
        return kernels("cross_entropy").scaled(gradient.contiguous(), factor)
    return (gradient.float() * factor).to(gradient.dtype)


class _Targets(NamedTuple):
    """`column` of the slice held here, where it is `mine`; `counted` are the tokens that have a label."""

    column_C1: Tensor
    mine_C1: Tensor
    counted_C1: Tensor

    @classmethod
    def of(cls, labels_C: Tensor, held: _Slice, columns: int) -> "_Targets":
        counted_C1 = labels_C[:, None] != IGNORED
        column_C1 = labels_C[:, None] - held.start
        mine_C1 = counted_C1
        if held.ranks is not None:
            mine_C1 = counted_C1 & (column_C1 >= 0) & (column_C1 < columns)
        return cls(column_C1, mine_C1, counted_C1)

    def column_or(self, other: int) -> Tensor:
        return self.column_C1.where(self.mine_C1, other)


class _Statistics(NamedTuple):
    """Of a softmax, in fp32: its largest logit, the sum of exp beyond that, the target's logit."""

    top_C1: Tensor
    sum_C1: Tensor
    wanted_C1: Tensor

    def loss(self, counted_C1: Tensor) -> Tensor:
        # near the top: far from zero, fp32 would round the small difference away
        return ((self.sum_C1.log() + (self.top_C1 - self.wanted_C1)) * counted_C1).sum()


def _summed_loss(logits_CV: Tensor, labels_C: Tensor, held: _Slice) -> Tensor:
    columns = logits_CV.shape[1]
    targets = _Targets.of(labels_C, held, columns)
    if usable(logits_CV):
        own = _statistics_by_kernel(logits_CV, columns, targets)
    else:
        own, _ = _statistics_and_scores(logits_CV, targets)
    return _of_all_slices(own, held.ranks).loss(targets.counted_C1)


def _slope_in_place(logits_CV: Tensor, columns: int, labels_C: Tensor, z_loss: float, held: _Slice) -> Tensor:
    """The chunk's summed loss; its gradient by the logits takes their place. Columns beyond are padding."""
    if usable(logits_CV) and held.ranks is None:
        return kernels("cross_entropy").loss_and_slope(logits_CV, columns, labels_C, IGNORED, z_loss)
    targets = _Targets.of(labels_C, held, columns)
    if usable(logits_CV):
        own, scores_CV = _statistics_by_kernel(logits_CV, columns, targets), None
    else:
        own, scores_CV = _statistics_and_scores(logits_CV, targets)
    every = _of_all_slices(own, held.ranks)
    share_C1 = targets.counted_C1 * (own.top_C1 - every.top_C1).exp() / every.sum_C1
    if z_loss:
        share_C1 = share_C1 * (1.0 + 2.0 * z_loss * (every.top_C1 + every.sum_C1.log()))
    if scores_CV is None:
        target_C, top_C, share_C = targets.column_or(-1)[:, 0], own.top_C1[:, 0], share_C1[:, 0]
        kernels("cross_entropy").slope_in_place(logits_CV, columns, target_C, top_C, share_C)
    else:
        scores_CV.mul_(share_C1)
        column_C1 = targets.column_or(0)
        scores_CV.scatter_(1, column_C1, scores_CV.gather(1, column_C1) - targets.mine_C1.float())
        # in fp32 both are one buffer, and nothing is copied
        logits_CV.copy_(scores_CV)
    return every.loss(targets.counted_C1)


def _statistics_by_kernel(logits_CV: Tensor, columns: int, targets: _Targets) -> _Statistics:
    found_3C = kernels("cross_entropy").statistics(logits_CV, columns, targets.column_or(-1)[:, 0])
    return _Statistics(*found_3C[..., None])


def _statistics_and_scores(logits_CV: Tensor, targets: _Targets) -> tuple[_Statistics, Tensor]:
    """The scores are exp(logit - top), and take the place of fp32 logits."""
    scores_CV = logits_CV.float()
    wanted_C1 = scores_CV.gather(1, targets.column_or(0)) * targets.mine_C1
    top_C1 = scores_CV.amax(1, keepdim=True)
    sum_C1 = scores_CV.sub_(top_C1).exp_().sum(1, keepdim=True)
    return _Statistics(top_C1, sum_C1, wanted_C1), scores_CV


def _of_all_slices(own: _Statistics, ranks: dist.ProcessGroup | None) -> _Statistics:
    """One exchange of three numbers a token; all ranks add them in the same order, to the same bits."""
    if ranks is None:
        return own
    mine = torch.stack(own)
    every = [torch.empty_like(mine) for _ in range(ranks.size())]
    dist.all_gather(every, mine, group=ranks)
    tops, totals, targets = torch.stack(every).unbind(1)
    top = tops.amax(0)
    return _Statistics(top, (totals * (tops - top).exp()).sum(0), targets.sum(0))


def _chunks(labels_N: Tensor, chunk: int | Literal[False]) -> Iterator[slice]:
    tokens = labels_N.shape[0]
    for first in range(0, tokens, chunk or max(tokens, 1)):
        yield slice(first, first + (chunk or tokens))


def _local_rows(weight_VD: DTensor) -> tuple[Tensor, _Slice]:
    mesh = weight_VD.device_mesh
    if mesh.ndim != 1 or not weight_VD.placements[0].is_shard(0):
        raise ValueError(f"the head's weight must be split by rows over one axis, not {weight_VD.placements}")
    rows = -(-weight_VD.shape[0] // mesh.size())
    if rows * (mesh.size() - 1) >= weight_VD.shape[0]:
        raise ValueError(f"{weight_VD.shape[0]} rows leave one of {mesh.size()} ranks without any")
    local = weight_VD.to_local(grad_placements=[Shard(0)])
    return local, _Slice(rows * mesh.get_local_rank(), mesh.get_group())
