"""Ring attention: each rank keeps its queries, keys and values go round; masked-out work is never begun.

Rank i of r holds chunks i and 2r-1-i of 2r: the early one sees little and the late one much, so that all
ranks have equal causal work at every step.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from arriero.parallel.blocks import block_backward, block_forward, merge


def ring_attention(
    q_BtHE: Tensor, k_BtKE: Tensor, v_BtKE: Tensor, documents_RBt: Tensor | None, group: dist.ProcessGroup
) -> Tensor:
    """`documents_RBt` holds every rank's document numbers, in the order of the ranks."""
    return _Ring.apply(q_BtHE, torch.stack((k_BtKE, v_BtKE)), documents_RBt, group)


class Meeting(NamedTuple):
    """Those of a rank's queries and of another's keys between which there is attention.

    A mask, where there is one, says causality too: not every kernel takes both.
    """

    queries: slice
    keys: slice
    causal: bool
    seen_Bts: Tensor | None


def meeting(rank: int, source: int, tokens: int, documents_RBt: Tensor | None = None) -> Meeting:
    """Of the queries of `rank` and the keys of `source`, each with so many tokens in two chunks."""
    queries = slice(tokens // 2 if source > rank else 0, tokens)
    keys = slice(0, tokens // 2 if source < rank else tokens)
    seen_Bts = None
    if documents_RBt is not None:
        seen_Bts = documents_RBt[rank, :, queries, None] == documents_RBt[source, :, None, keys]
        seen_Bts = seen_Bts.tril() if source == rank else seen_Bts
    return Meeting(queries, keys, source == rank and seen_Bts is None, seen_Bts)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BtHE: Tensor, kv_2BtKE: Tensor, documents_RBt: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        kv_2BtKE = kv_2BtKE.contiguous()
        out = torch.empty_like(q_BtHE, dtype=torch.float32, memory_format=torch.contiguous_format)
        lse = out.new_empty(out.shape[0], out.shape[2], out.shape[1])
        for source, (k, v) in _going_round(kv_2BtKE, group):
            queries, keys, causal, seen = meeting(group.rank(), source, q_BtHE.shape[1], documents_RBt)
            block = block_forward(q_BtHE[:, queries], k[:, keys], v[:, keys], causal, seen)
            if source != group.rank():
                block = merge(out[:, queries], lse[..., queries], *block)
            out[:, queries], lse[..., queries] = block
        out = out.to(q_BtHE.dtype)
        ctx.save_for_backward(q_BtHE, kv_2BtKE, documents_RBt, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q_BtHE, kv_2BtKE, documents_RBt, out, lse = ctx.saved_tensors
        group, grad_BtHE = ctx.group, grads[0].contiguous()
        dq = torch.zeros_like(q_BtHE, dtype=torch.float32)
        dkv = torch.zeros_like(kv_2BtKE, dtype=torch.float32)
        # the gradient of keys and values travels a step behind them, and after the last step comes home
        passing = None
        for source, (k, v) in _going_round(kv_2BtKE, group):
            queries, keys, causal, seen = meeting(group.rank(), source, q_BtHE.shape[1], documents_RBt)
            grad, q, whole = (x[:, queries] for x in (grad_BtHE, q_BtHE, out))
            dq_block, *dkv_block = block_backward(
                grad, q, k[:, keys], v[:, keys], whole, lse[..., queries], causal, seen
            )
            dq[:, queries] += dq_block
            if passing is not None:
                dkv = passing.received()
            for held, block in zip(dkv, dkv_block, strict=True):
                held[:, keys] += block
            passing = _Passing(dkv, group)
        assert passing is not None
        return dq.to(q_BtHE.dtype), passing.received().to(kv_2BtKE.dtype), None, None


def _going_round(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Every rank and its keys and values, this one's first; the next come in while these are in use."""
    for step in range(group.size()):
        passing = _Passing(kv, group) if step < group.size() - 1 else None
        yield (group.rank() - step) % group.size(), kv
        if passing is not None:
            kv = passing.received()


class _Passing:
    """A tensor on its way to the next rank, while the one of the rank before comes in."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        before, after = (dist.get_global_rank(group, (group.rank() + way) % group.size()) for way in (-1, 1))
        self._sent = sent
        self._received = torch.empty_like(sent)
        self._requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group),
                dist.P2POp(dist.irecv, self._received, before, group),
            ]
        )

    def received(self) -> Tensor:
        for request in self._requests:
            request.wait()
        return self._received
