"""Context parallelism: the tokens of a sequence are divided over `cp` ranks.

Ulysses: an all-to-all exchanges tokens for heads, so that each rank of a group has all the group's tokens for
some heads. Where there are fewer heads than ranks, several Ulysses groups form a ring (`ring.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arriero.data.order.loader import Batch
from arriero.model.attention import AttentionCore, Documents, Mask
from arriero.model.generation import Exchange, RecurrentMixer
from arriero.model.language_model import LanguageModel
from arriero.parallel.ring import ring_attention
from arriero.plan.layout import tokens_divisor


def local_positions(seq_len: int, cp_rank: int, ulysses: int, ring: int) -> Tensor:
    """Return the positions of this rank's tokens in a sequence. Ranks of a Ulysses group are consecutive."""
    divisor = tokens_divisor(ulysses, ring)
    if seq_len % divisor:
        raise ValueError(f"{seq_len} tokens cannot be divided: not a multiple of {divisor}")
    ring_rank, part = divmod(cp_rank, ulysses)
    positions = torch.arange(seq_len)
    if ring > 1:
        chunks = positions.chunk(2 * ring)
        positions = torch.cat((chunks[ring_rank], chunks[2 * ring - 1 - ring_rank]))
    return positions.chunk(ulysses)[part]


def shard_batch(batch: Batch, held_t: Tensor) -> Batch:
    """Select this rank's tokens of each sequence; document numbers stay those of the whole sequences."""

    def cut(whole_BT: Tensor) -> Tensor:
        return whole_BT.index_select(1, held_t.to(whole_BT.device))

    tokens_Bt = cut(batch.tokens_BT)
    positions = held_t.to(tokens_Bt.device).expand_as(tokens_Bt)
    return replace(
        batch,
        tokens_BT=tokens_Bt,
        labels_BT=cut(batch.labels_BT),
        positions_BT=positions if batch.positions_BT is None else cut(batch.positions_BT),
    )


def apply_context_parallel(
    model: LanguageModel, ring: dist.ProcessGroup | None, ulysses: dist.ProcessGroup | None
) -> None:
    """Replace the attention of the blocks. The model then takes this rank's part of each sequence."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, AttentionCore):
                setattr(module, name, ContextParallelAttention(ring, ulysses, child.window))
        if isinstance(module, RecurrentMixer):
            assert ulysses is not None, (
                "a recurrent mixer needs whole sequences, which a ring does not gather"
            )
            there, back = (partial(move, group=ulysses) for move in (_tokens_for_heads, _heads_for_tokens))
            module.divide_heads(Exchange(there, back), ulysses.rank(), ulysses.size())


class ContextParallelAttention(AttentionCore):
    """Attention to whole sequences where each rank has a part of each; a group of one rank is not used."""

    def __init__(
        self,
        ring: dist.ProcessGroup | None,
        ulysses: dist.ProcessGroup | None,
        window: int | None = None,
    ) -> None:
        super().__init__(window)
        self.ring = ring if ring is not None and ring.size() > 1 else None
        self.ulysses = ulysses if ulysses is not None and ulysses.size() > 1 else None

    # its collectives cannot be traced
    @torch.compiler.disable
    def forward(self, q_BtHE: Tensor, k_BtKE: Tensor, v_BtKE: Tensor, mask: Mask) -> Tensor:
        q, k, v = q_BtHE, k_BtKE, v_BtKE
        if self.ulysses is not None:
            q, k, v = _tokens_for_heads((q, k, v), self.ulysses)
        if self.ring is None:
            out = super().forward(q, k, v, mask)
        else:
            assert mask is None or isinstance(mask, Documents)
            out = ring_attention(q, k, v, mask, self.ring)
        return out if self.ulysses is None else _heads_for_tokens(out, self.ulysses)

    def mask(self, shape: tuple[int, int], documents_BT: Tensor | None, device: torch.device) -> Mask:
        """Return the mask of whole sequences: Ulysses gathers all tokens, a ring visits all ranks."""
        if self.ring is not None:
            return None if documents_BT is None else Documents(documents_BT)
        tokens = shape[1] * (1 if self.ulysses is None else self.ulysses.size())
        return super().mask((shape[0], tokens), documents_BT, device)


@torch.compiler.disable
def _tokens_for_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Exchange all heads of this rank's tokens for some heads of all tokens of the Ulysses group.

    All tensors go in one all-to-all; where there are fewer heads than ranks, some ranks share one.
    """
    size = group.size()
    copied = [x.repeat_interleave(n, dim=2) if (n := size // x.shape[2]) > 1 else x for x in tensors]
    shares = [x.unflatten(2, (size, -1)).movedim(2, 0) for x in copied]
    arrived_UBtW = _AllToAll.apply(torch.cat([x.flatten(3) for x in shares], dim=3), group)
    whole_BTW = arrived_UBtW.transpose(0, 1).flatten(1, 2)
    parts = whole_BTW.split([x[0, 0, 0].numel() for x in shares], dim=2)
    return [part.unflatten(2, x.shape[3:]) for part, x in zip(parts, shares, strict=True)]


@torch.compiler.disable
def _heads_for_tokens(out_BThE: Tensor, group: dist.ProcessGroup) -> Tensor:
    arrived_UBthE = _AllToAll.apply(out_BThE.unflatten(1, (group.size(), -1)).transpose(0, 1), group)
    return arrived_UBthE.movedim(0, 2).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """All-to-all: part i goes to rank i, part j of the result is from rank j. It is its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts_U: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts_U.contiguous()
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None
