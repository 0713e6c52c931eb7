"""Ring attention: each rank keeps its queries, and keys and values are passed around; masked work is skipped.

Rank i of r holds chunks i and 2r-1-i of 2r: the early one attends to few keys and the late one to many, so
that all ranks have equal causal work in every step. Attention to some of the keys returns its output and the
log of the sum of its softmax (lse), by which partial results are merged exactly. The fused kernels are
private operators of torch, tested with 2.11 and 2.13.
Shapes: B batch, t queries, s keys, H heads, K kv heads, E head dim.
"""

from bisect import bisect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from arriero.model.attention import Documents

Gradients = tuple[Tensor, Tensor, Tensor]

_aten = torch.ops.aten


def ring_attention(
    q_BtHE: Tensor,
    k_BtKE: Tensor,
    v_BtKE: Tensor,
    documents: Documents | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute causal attention over the ring; `documents` are those of the whole sequences."""
    return _Ring.apply(q_BtHE, torch.stack((k_BtKE, v_BtKE)), documents, group)


class Tile(NamedTuple):
    """Queries of this rank that attend to keys of another: to all of them, or causally."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool


def attention_tiles(
    rank: int, source: int, ring: int, tokens: int, documents: Documents | None
) -> list[Tile]:
    """Return all attention of the queries of `rank` to the keys of `source`; each has `tokens` tokens.

    Causal tiles come first: those of a rank with itself hold every query exactly once.
    """
    if documents is None:
        queries = slice(tokens // 2 if source > rank else 0, tokens)
        keys = slice(0, tokens // 2 if source < rank else tokens)
        return [Tile(slice(None), queries, keys, source == rank)]
    size = tokens // 2
    found = []
    for row, edges in enumerate(documents.edges):
        for query_chunk, query_at in ((rank, 0), (2 * ring - 1 - rank, size)):
            for key_chunk, key_at in ((source, 0), (2 * ring - 1 - source, size)):
                pairs = _between(query_chunk * size, key_chunk * size, size, edges)
                found += [
                    Tile(slice(row, row + 1), _moved(queries, query_at), _moved(keys, key_at), causal)
                    for queries, keys, causal in pairs
                ]
    return sorted(found, key=lambda tile: not tile.causal)


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
        for source, (k, v) in _around_ring(kv_2BtKE, group):
            for tile in attention_tiles(group.rank(), source, group.size(), q_BtHE.shape[1], documents):
                rows, queries, keys, causal = tile
                part = partial_attention(q_BtHE[rows, queries], k[rows, keys], v[rows, keys], causal)
                if not causal:
                    part = merge(out[rows, queries], lse[rows, :, queries], *part)
                out[rows, queries], lse[rows, :, queries] = part
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
        # the gradient of keys and values follows them one step behind and ends at its own rank
        sending = None
        for source, (k, v) in _around_ring(kv_2BtKE, group):
            parts = []
            for tile in attention_tiles(group.rank(), source, group.size(), q_BtHE.shape[1], ctx.documents):
                rows, queries, keys, causal = tile
                grad, q, whole = (x[rows, queries] for x in (grad_BtHE, q_BtHE, out))
                dq_part, *dkv_part = partial_attention_backward(
                    grad, q, k[rows, keys], v[rows, keys], whole, lse[rows, :, queries], causal
                )
                dq[rows, queries] += dq_part
                parts.append((rows, keys, dkv_part))
            if sending is not None:
                dkv = sending.received()
            for rows, keys, dkv_part in parts:
                for held, part in zip(dkv, dkv_part, strict=True):
                    held[rows, keys] += part
            sending = _RingSend(dkv, group)
        assert sending is not None
        return dq.to(q_BtHE.dtype), sending.received().to(kv_2BtKE.dtype), None, None


def _around_ring(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank with its keys and values, this rank first; the next arrive while these are used."""
    for step in range(group.size()):
        sending = _RingSend(kv, group) if step < group.size() - 1 else None
        yield (group.rank() - step) % group.size(), kv
        if sending is not None:
            kv = sending.received()


class _RingSend:
    """An asynchronous send to the next rank and receive from the previous one."""

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


def partial_attention(q_BtHE: Tensor, k_BsKE: Tensor, v_BsKE: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output (BtHE) and the log of the sum of the softmax (BHt) over the given keys."""
    q, k, v = (x.transpose(1, 2) for x in (q_BtHE, k_BsKE, v_BsKE))
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif q.dtype == torch.float32:
        # the flash kernel of GPUs does not support fp32, and this one no grouped-query attention
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        out, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
        lse = lse[..., : q.shape[2]]
    else:
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return out.transpose(1, 2), lse


def partial_attention_backward(
    grad_BtHE: Tensor,
    q_BtHE: Tensor,
    k_BsKE: Tensor,
    v_BsKE: Tensor,
    out_BtHE: Tensor,
    lse_BHt: Tensor,
    causal: bool,
) -> Gradients:
    """Return the contribution to the gradients of q, k and v; out and lse are the merged ones."""
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BtHE, q_BtHE, k_BsKE, v_BsKE, out_BtHE))
    saved = (grad, q, k, v, out, lse_BHt.contiguous())
    if q.device.type == "cpu":
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, 0.0, causal)
    elif q.dtype == torch.float32:
        grads = _efficient_backward(*saved, causal)
    else:
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *saved, *lengths, 0.0, causal, *_no_dropout(q)
        )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    """Call the memory-efficient kernel, which has no grouped-query attention and needs a padded lse."""
    queries, kv_heads = q.shape[2], k.shape[1]
    width = queries if torch.version.hip else -(-queries // 32) * 32
    lse = F.pad(lse, (0, width - queries), value=float("inf"))
    # it ignores some strides of the output
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    wanted = [True, True, True, False]
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, *_no_dropout(q), 0.0, wanted, causal
    )
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float32) for x in (dk, dv))
    return dq, dk, dv


def merge(
    out_BtHE: Tensor, lse_BHt: Tensor, more_BtHE: Tensor, more_lse_BHt: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge two results for the same queries in fp32; in the first, every query has attended to some key."""
    lse = torch.logaddexp(lse_BHt, more_lse_BHt)
    share, more_share = ((part - lse).exp().transpose(1, 2)[..., None] for part in (lse_BHt, more_lse_BHt))
    return out_BtHE.float() * share + more_BtHE.float() * more_share, lse


def _repeat_heads(x_BKsE: Tensor, q_BHtE: Tensor) -> Tensor:
    return x_BKsE.repeat_interleave(q_BHtE.shape[1] // x_BKsE.shape[1], dim=1)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the seed and offset that the kernels require and ignore."""
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    return unused, unused
