"""Ring attention: each rank keeps its queries, keys and values go round; masked-out work is never begun.

Rank i of r holds chunks i and 2r-1-i of 2r: the early one sees little and the late one much, so that all
ranks have equal causal work at every step.
"""

from bisect import bisect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from arriero.model.attention import Documents
from arriero.parallel.blocks import block_backward, block_forward, merge


def ring_attention(
    q_BtHE: Tensor,
    k_BtKE: Tensor,
    v_BtKE: Tensor,
    documents: Documents | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """`documents` are those of the whole sequences."""
    return _Ring.apply(q_BtHE, torch.stack((k_BtKE, v_BtKE)), documents, group)


class Meeting(NamedTuple):
    """Queries of this rank that attend to keys of another: to all of them, or causally."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


def meetings(rank: int, source: int, ring: int, tokens: int, documents: Documents | None) -> list[Meeting]:
    """Return all attention of the queries of `rank` to the keys of `source`; each has `tokens` tokens.

    Causal meetings come first: of a rank with itself they hold every query exactly once.
    """
    if documents is None:
        queries = slice(tokens // 2 if source > rank else 0, tokens)
        keys = slice(0, tokens // 2 if source < rank else tokens)
        return [Meeting(slice(None), queries, keys, source == rank)]
    size = tokens // 2
    found = []
    for row, edges in enumerate(documents.edges):
        for query_chunk, query_at in ((rank, 0), (2 * ring - 1 - rank, size)):
            for key_chunk, key_at in ((source, 0), (2 * ring - 1 - source, size)):
                pairs = _between(query_chunk * size, key_chunk * size, size, edges)
                found += [
                    Meeting(slice(row, row + 1), _moved(queries, query_at), _moved(keys, key_at), causal)
                    for queries, keys, causal in pairs
                ]
    return sorted(found, key=lambda meeting: not meeting.causal)


def _between(query: int, key: int, size: int, edges: list[int]) -> list[tuple[slice, slice, bool]]:
    """Attention between the chunks that begin at tokens `query` and `key`; slices count from these tokens."""
    if key > query:
        return []
    if key == query:
        inside = [edge - key for edge in edges if key < edge < key + size]
        return [(slice(a, b), slice(a, b), True) for a, b in pairwise([0, *inside, size])]
    # only the document of the last key may reach into a later chunk
    after = bisect(edges, key + size - 1)
    begin, end = edges[after - 1], edges[after]
    if end <= query:
        return []
    return [(slice(0, min(end - query, size)), slice(max(begin - key, 0), size), False)]


def _moved(place: slice, by: int) -> slice:
    return slice(place.start + by, place.stop + by)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BtHE: Tensor, kv_2BtKE: Tensor, documents: Documents | None, group: dist.ProcessGroup
    ) -> Tensor:
        kv_2BtKE = kv_2BtKE.contiguous()
        out = torch.empty_like(q_BtHE, dtype=torch.float32, memory_format=torch.contiguous_format)
        lse = out.new_empty(out.shape[0], out.shape[2], out.shape[1])
        for source, (k, v) in _going_round(kv_2BtKE, group):
            for meeting in meetings(group.rank(), source, group.size(), q_BtHE.shape[1], documents):
                rows, queries, keys, causal = meeting
                block = block_forward(q_BtHE[rows, queries], k[rows, keys], v[rows, keys], causal)
                if not causal:
                    block = merge(out[rows, queries], lse[rows, :, queries], *block)
                out[rows, queries], lse[rows, :, queries] = block
        out = out.to(q_BtHE.dtype)
        ctx.save_for_backward(q_BtHE, kv_2BtKE, out, lse)
        ctx.documents, ctx.group = documents, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q_BtHE, kv_2BtKE, out, lse = ctx.saved_tensors
        group, grad_BtHE = ctx.group, grads[0].contiguous()
        dq = torch.zeros_like(q_BtHE, dtype=torch.float32)
        dkv = torch.zeros_like(kv_2BtKE, dtype=torch.float32)
        # the gradient of keys and values travels a step behind them, and after the last step comes home
        passing = None
        for source, (k, v) in _going_round(kv_2BtKE, group):
            blocks = []
            for meeting in meetings(group.rank(), source, group.size(), q_BtHE.shape[1], ctx.documents):
                rows, queries, keys, causal = meeting
                grad, q, whole = (x[rows, queries] for x in (grad_BtHE, q_BtHE, out))
                dq_block, *dkv_block = block_backward(
                    grad, q, k[rows, keys], v[rows, keys], whole, lse[rows, :, queries], causal
                )
                dq[rows, queries] += dq_block
                blocks.append((rows, keys, dkv_block))
            if passing is not None:
                dkv = passing.received()
            for rows, keys, dkv_block in blocks:
                for held, block in zip(dkv, dkv_block, strict=True):
                    held[rows, keys] += block
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
