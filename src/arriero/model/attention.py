"""Causal attention, also inside the documents of packed sequences, without a T x T mask.

With a document mask, a token attends to the tokens of its own document up to itself. On GPUs this is one
FlexAttention kernel, which skips blocks between documents; elsewhere one causal attention per document.
Shapes: B batch, T tokens, H heads, K kv heads, E head dim, N blocks of tokens.
"""

from collections.abc import Callable, Hashable
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from arriero.kernels import usable_on

# FlexAttention skips whole blocks of this many queries and keys
_BLOCK = 128
# measured on Hopper; elsewhere torch chooses
_NARROW_HEADS = {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 64,
    "fwd_num_warps": 4,
    "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4,
    "bwd_num_stages": 2,
}


class SequenceMixer(nn.Module):
    """The module of a block that mixes the tokens of a sequence, and therefore keeps documents apart.

    Blocks whose mixers have an equal `mask_key` receive the same mask as their third argument.
    """

    @property
    def mask_key(self) -> Hashable:
        return type(self)

    def mask(self, shape: tuple[int, int], documents_BT: Tensor | None, device: torch.device) -> Any:
        """Return the mask of a batch of `shape` (rows, tokens), with documents numbered in the tensor."""
        raise NotImplementedError


class AttentionCore(SequenceMixer):
    """Causal attention: inside documents, and inside a sliding window where there is one.

    Context parallelism replaces it.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    @property
    def mask_key(self) -> Hashable:
        return type(self), self.window

    def mask(self, shape: tuple[int, int], documents_BT: Tensor | None, device: torch.device) -> "Mask":
        by_blocks = usable_on(device) and shape[1] >= _BLOCK
        if documents_BT is not None:
            return document_mask(documents_BT, device, self.window)
        if not by_blocks or self.window is None or shape[1] <= self.window:
            return None
        return block_mask(torch.zeros(shape, dtype=torch.int32, device=device), self.window)

    def forward(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: "Mask") -> Tensor:
        if mask is None:
            return attend_causally(q_BTHE, k_BTKE, v_BTKE, self.window)
        if isinstance(mask, BlockMask):
            return attend_by_blocks(q_BTHE, k_BTKE, v_BTKE, mask)
        return attend_by_document(q_BTHE, k_BTKE, v_BTKE, mask, self.window)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


class Documents:
    """The boundaries of the documents of each row, on the host: `edges[b]` is 0, ..., T.

    Compiled code receives it as an opaque object, so that other edges do not recompile a block.
    """

    def __init__(self, documents_BT: Tensor) -> None:
        changes = (documents_BT[:, 1:] != documents_BT[:, :-1]).cpu()
        tokens = documents_BT.shape[1]
        self.edges = [[0, *(row.nonzero().flatten() + 1).tolist(), tokens] for row in changes]


Mask = BlockMask | Documents | None


def document_mask(
    documents_BT: Tensor, device: torch.device, window: int | None = None
) -> BlockMask | Documents:
    """Return the mask of documents: blocks for FlexAttention on a GPU, else the edges of the documents."""
    if usable_on(device) and documents_BT.shape[1] >= _BLOCK:
        return block_mask(documents_BT.to(device, non_blocking=True), window)
    return Documents(documents_BT)


def block_mask(documents_BT: Tensor, window: int | None = None) -> BlockMask:
    """Build FlexAttention's mask from the first token that each token attends to, which never decreases."""
    tokens = documents_BT.shape[1]
    starts_BT = document_starts(documents_BT)
    if window is not None:
        starts_BT = starts_BT.maximum(torch.arange(tokens, device=starts_BT.device) - window + 1)
    query_block = torch.arange(-(-tokens // _BLOCK), device=documents_BT.device)
    last_query = (query_block + 1) * _BLOCK - 1
    first_BN = starts_BT[:, query_block * _BLOCK] // _BLOCK
    # a key block is full if every query of a block attends to all its keys; the diagonal never is,
    # nor is any block for a last query block that is not filled
    first_full_BN = -(-starts_BT[:, last_query.clamp(max=tokens - 1)] // _BLOCK)
    first_full_BN = torch.where(last_query < tokens, first_full_BN.minimum(query_block), query_block)
    full_BN = query_block - first_full_BN
    before_BN = first_full_BN - first_BN
    step = query_block
    full_BNN = (first_full_BN[..., None] + step).clamp(max=len(step) - 1)
    partial_BNN = torch.where(step < before_BN[..., None], first_BN[..., None] + step, query_block[:, None])

    def sees(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= starts_BT[b, query])

    counts_and_indices = [before_BN + 1, partial_BNN, full_BN, full_BNN]
    return BlockMask.from_kv_blocks(
        *(x.int()[:, None].contiguous() for x in counts_and_indices),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(tokens, tokens),
    )


def document_starts(documents_BT: Tensor) -> Tensor:
    """Return the index in its row of the first token of each token's document."""
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
    return (begins_BT * index_T).cummax(dim=1).values


@overload
def attend_by_blocks(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: BlockMask) -> Tensor: ...
@overload
def attend_by_blocks(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: BlockMask, with_lse: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def attend_by_blocks(
    q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: BlockMask, with_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend by FlexAttention; `with_lse` adds the logarithm of the sum of exponentials (B, T, H)."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
    options: dict[str, Any] = {"BACKEND": "TRITON"} | _measured_options(q)
    # uncompiled, it would compute all T x T scores
    flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    grouped = q.shape[1] != k.shape[1]
    common: dict[str, Any] = {"block_mask": mask, "enable_gqa": grouped, "kernel_options": options}
    if with_lse:
        out, found = cast(Any, flex(q, k, v, **common, return_aux=AuxRequest(lse=True)))
        return out.transpose(1, 2), found.lse.transpose(1, 2)
    return cast(Tensor, flex(q, k, v, **common)).transpose(1, 2)


def _measured_options(q_BHTE: Tensor) -> dict[str, int]:
    if not q_BHTE.is_cuda or torch.version.hip or torch.cuda.get_device_capability(q_BHTE.device)[0] != 9:
        return {}
    return _NARROW_HEADS if q_BHTE.shape[-1] <= 64 and q_BHTE.dtype.itemsize == 2 else {}


# every batch has other lengths, and each would be compiled again
@torch.compiler.disable
def attend_by_document(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    documents: Documents,
    window: int | None = None,
    attend: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Attend inside each document, causally unless another attention is given."""
    attend = attend or partial(attend_causally, window=window)
    rows = []
    for edges, *row in zip(documents.edges, *(x.split(1) for x in (q_BTHE, k_BTKE, v_BTKE)), strict=True):
        lengths = [end - begin for begin, end in pairwise(edges)]
        parts = zip(*(x.split(lengths, dim=1) for x in row), strict=True)
        rows.append(torch.cat([attend(*part) for part in parts], dim=1))
    return torch.cat(rows)


def attend_causally(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
    grouped, tokens = q.shape[1] != k.shape[1], q.shape[2]
    if window is not None and window < tokens:
        # the keys of one chunk of queries at a time, so that no mask of T x T exists
        at, parts = torch.arange(tokens, device=q.device), []
        for queries in at.split(max(window, _BLOCK)):
            begin, end = int(queries[0]), int(queries[-1]) + 1
            first = max(0, begin - window + 1)
            keys, query = at[first:end], queries[:, None]
            seen = (keys <= query) & (keys > query - window)
            chunk = (q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end])
            parts.append(F.scaled_dot_product_attention(*chunk, attn_mask=seen, enable_gqa=grouped))
        return torch.cat(parts, dim=2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
