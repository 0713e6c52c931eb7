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

from arriero.data.order.rows import IGNORED
from arriero.model.layers import HeadLoss


def chunked_loss(chunk: int | Literal[False], z_loss: float = 0.0) -> HeadLoss:
    """For `Head.loss`. The value is the cross-entropy alone, and the z-loss is in the gradients only, so that
    what is reported means the same with and without it.

    The weight may be a slice of the vocabulary: a DTensor sharded by rows. The states are then the same on
    all its ranks, and their gradient is this slice's partial sum, for the caller to reduce.
    """

    @record_function("arriero.loss")
    def loss(x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor) -> Tensor:
        held = _Slice(0, None)
        if isinstance(weight_VD, DTensor):
            weight_VD, held = _local_rows(weight_VD)
        x_ND, labels_N = x_BTD.flatten(0, -2), labels_BT.flatten()
        if torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad):
            return _ChunkedLoss.apply(x_ND, weight_VD, labels_N, chunk, z_loss, held)
        total = x_ND.new_zeros((), dtype=torch.float32)
        for tokens in _chunks(labels_N, chunk):
            total += _softmax(x_ND[tokens] @ weight_VD.T, labels_N[tokens], held).loss
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
        held: _Slice,
    ) -> Tensor:
        x_grad = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32)
        total = x_ND.new_zeros((), dtype=torch.float32)
        for tokens in _chunks(labels_N, chunk):
            x_CD = x_ND[tokens]
            loss, slope_CV = _loss_and_slope(x_CD @ weight_VD.T, labels_N[tokens], z_loss, held)
            total += loss
            if x_grad is not None:
                torch.mm(slope_CV, weight_VD, out=x_grad[tokens])
            if weight_grad is not None and slope_CV.dtype == torch.float32:
                weight_grad.addmm_(slope_CV.T, x_CD)
            elif weight_grad is not None:
                weight_grad += slope_CV.T @ x_CD
            # or the next chunk's logits would stand beside it
            del slope_CV
        ctx.save_for_backward(x_grad, None if weight_grad is None else weight_grad.to(weight_VD.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        scaled = (None if saved is None else saved * grad_outputs[0] for saved in ctx.saved_tensors)
        return (*scaled, None, None, None, None)


def _loss_and_slope(
    logits_CV: Tensor, labels_C: Tensor, z_loss: float, held: _Slice
) -> tuple[Tensor, Tensor]:
    """The chunk's summed loss, and its gradient by the logits, in whose place it is written."""
    softmax = _softmax(logits_CV, labels_C, held)
    scores_CV, share_C1 = softmax.scores_CV, softmax.share_C1
    if z_loss:
        share_C1 = share_C1 * (1.0 + 2.0 * z_loss * softmax.log_sum_C1)
    scores_CV *= share_C1
    target_C1 = softmax.target_C1
    scores_CV.scatter_(1, target_C1, scores_CV.gather(1, target_C1) - softmax.mine_C1.float())
    # in fp32 both are one buffer, and nothing is copied
    return softmax.loss, logits_CV.copy_(scores_CV)


class _Softmax(NamedTuple):
    """`scores` are exp(logit - the slice's largest); `share` makes probabilities of them, and zeros for
    tokens that do not count. `target` is a column of this slice where `mine` says so, else any."""

    loss: Tensor
    scores_CV: Tensor
    share_C1: Tensor
    log_sum_C1: Tensor
    target_C1: Tensor
    mine_C1: Tensor


def _softmax(logits_CV: Tensor, labels_C: Tensor, held: _Slice) -> _Softmax:
    """Statistics in fp32; the scores take the place of fp32 logits."""
    counted_C1 = labels_C[:, None] != IGNORED
    target_C1 = labels_C[:, None] - held.start
    mine_C1 = counted_C1
    if held.ranks is not None:
        mine_C1 = counted_C1 & (target_C1 >= 0) & (target_C1 < logits_CV.shape[1])
    target_C1 = target_C1.where(mine_C1, 0)

    scores_CV = logits_CV.float()
    wanted_C1 = scores_CV.gather(1, target_C1) * mine_C1
    top_C1 = scores_CV.amax(1, keepdim=True)
    sum_C1 = scores_CV.sub_(top_C1).exp_().sum(1, keepdim=True)
    share_C1 = counted_C1 / sum_C1
    if held.ranks is not None:
        here_C1 = top_C1
        top_C1, sum_C1, wanted_C1 = _of_all_slices(top_C1, sum_C1, wanted_C1, held.ranks)
        share_C1 = counted_C1 * (here_C1 - top_C1).exp() / sum_C1
    # near the top: far from zero, fp32 would round the small difference away
    loss = ((sum_C1.log() + (top_C1 - wanted_C1)) * counted_C1).sum()
    return _Softmax(loss, scores_CV, share_C1, top_C1 + sum_C1.log(), target_C1, mine_C1)


def _of_all_slices(
    top: Tensor, total: Tensor, wanted: Tensor, ranks: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """One exchange of three numbers a token; all ranks add them in the same order, to the same bits."""
    own = torch.stack((top, total, wanted))
    every = [torch.empty_like(own) for _ in range(ranks.size())]
    dist.all_gather(every, own, group=ranks)
    tops, totals, targets = torch.stack(every).unbind(1)
    top = tops.amax(0)
    return top, (totals * (tops - top).exp()).sum(0), targets.sum(0)


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
