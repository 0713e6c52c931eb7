"""Attention of some queries to some keys, as a part of attention to all of them: exact, forward and back.

A block gives its output and the log of its softmax's sum; by that log blocks merge into what one attention
over all keys would give, and given the merged pair each block's gradients are those of the whole.
B batch, t queries, s keys, H heads, K kv heads, E head dim.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]

_aten = torch.ops.aten


def block_forward(q_BtHE: Tensor, k_BsKE: Tensor, v_BsKE: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out_BtHE, lse_BHt)"""
    q, k, v = (x.transpose(1, 2) for x in (q_BtHE, k_BsKE, v_BsKE))
    out, lse = _kernel(q).forward(q, k, v, causal)
    return out.transpose(1, 2), lse


def block_backward(
    grad_BtHE: Tensor,
    q_BtHE: Tensor,
    k_BsKE: Tensor,
    v_BsKE: Tensor,
    out_BtHE: Tensor,
    lse_BHt: Tensor,
    causal: bool,
) -> Gradients:
    """What this block adds to the gradients of q, k and v; out and lse are those of all blocks merged."""
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BtHE, q_BtHE, k_BsKE, v_BsKE, out_BtHE))
    grads = _kernel(q).backward(grad, q, k, v, out, lse_BHt.contiguous(), causal)
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def merge(
    out_BtHE: Tensor, lse_BHt: Tensor, more_BtHE: Tensor, more_lse_BHt: Tensor
) -> tuple[Tensor, Tensor]:
    """Two blocks of the same queries as one, in fp32; in the first every query has seen some key."""
    lse = torch.logaddexp(lse_BHt, more_lse_BHt)
    share, more_share = ((part - lse).exp().transpose(1, 2)[..., None] for part in (lse_BHt, more_lse_BHt))
    return out_BtHE.float() * share + more_BtHE.float() * more_share, lse


class _Kernel(Protocol):
    """All in (B, heads, tokens, E)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> Gradients: ...


def _kernel(q: Tensor) -> _Kernel:
    if q.device.type == "cpu":
        return _Cpu()
    # the flash kernel of GPUs has no fp32
    return _Efficient() if q.dtype == torch.float32 else _Flash()


class _Cpu:
    def forward(self, q, k, v, causal):
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

    def backward(self, grad, q, k, v, out, lse, causal):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )


class _Flash:
    def forward(self, q, k, v, causal):
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]

    def backward(self, grad, q, k, v, out, lse, causal):
        lengths, dropout = (None, None, q.shape[2], k.shape[2]), _no_dropout(q)
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, causal, *dropout
        )


class _Efficient:
    """It has no grouped-query attention, and pads the queries of its lse."""

    def forward(self, q, k, v, causal):
        k, v = _for_each_head(k, q), _for_each_head(v, q)
        out, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[:2]
        return out, lse[..., : q.shape[2]]

    def backward(self, grad, q, k, v, out, lse, causal):
        queries, kv_heads = q.shape[2], k.shape[1]
        width = queries if torch.version.hip else -(-queries // 32) * 32
        lse = F.pad(lse, (0, width - queries), value=float("inf"))
        # of the output's strides it reads only some
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        k, v = _for_each_head(k, q), _for_each_head(v, q)
        wanted = [True, True, True, False]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, *_no_dropout(q), 0.0, wanted, causal
        )
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float32) for x in (dk, dv))
        return dq, dk, dv


def _for_each_head(x_BKsE: Tensor, q_BHtE: Tensor) -> Tensor:
    return x_BKsE.repeat_interleave(q_BHtE.shape[1] // x_BKsE.shape[1], dim=1)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """A seed and an offset, there to be ignored."""
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    return unused, unused
