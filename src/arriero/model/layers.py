"""What a block is made of. B batch, T tokens, D dim, H heads, K kv heads, E head dim, F ffn."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from arriero.model.attention import Documents, attend_by_blocks, attend_by_document, attend_causally
from arriero.model.spec import RopeScaling
from arriero.model.tiles import in_tiles

# attention's kernels may count the elements from a tensor's first to its last in 32 bits
_COUNTED = 2**31

Rotation = tuple[Tensor, Tensor]
Mask = BlockMask | Documents | None
MaskOf = Callable[[Tensor, torch.device], Any]
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
Project = Callable[[Tensor, Sequence[nn.Linear]], Iterable[Tensor]]
Gated = Callable[[Tensor, nn.Linear, nn.Linear], Tensor]
Activated = Callable[[Tensor, nn.Linear], Tensor]
Normed = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]
HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rope(nn.Module):
    """Rotary positions in Hugging Face's half-split order: dimension i turns with i + E/2."""

    frequencies: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.register_buffer("frequencies", torch.empty(head_dim // 2), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        if not self.frequencies.is_meta:
            frequencies = rope_frequencies(self.head_dim, self.theta, self.scaling)
            self.frequencies = frequencies.to(self.frequencies.device)

    def _apply(self, fn, recurse=True):
        # a cast to bf16 or a to_empty would spoil the angles of far positions
        super()._apply(fn, recurse)
        self.reset()
        return self

    def forward(self, positions: Tensor) -> Rotation:
        """Cosines and sines in fp32, shaped (..., T, 1, E/2) to meet (B, T, H, E/2)."""
        angles = positions[..., None, None].float() * self.frequencies
        return angles.cos(), angles.sin()


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def rotate(x_BTHE: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    a, b = x_BTHE.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTHE.dtype)


def attend(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Mask) -> Tensor:
    """Causal attention, inside documents where there is a mask."""
    if mask is None:
        return attend_causally(q_BTHE, k_BTKE, v_BTKE)
    if isinstance(mask, BlockMask):
        return attend_by_blocks(q_BTHE, k_BTKE, v_BTKE, mask)
    return attend_by_document(q_BTHE, k_BTKE, v_BTKE, mask)


def one_by_one(x_BTD: Tensor, layers: Sequence[nn.Linear]) -> Iterable[Tensor]:
    return [layer(x_BTD) for layer in layers]


def by_one_matmul(x_BTD: Tensor, layers: Sequence[nn.Linear]) -> Iterable[Tensor]:
    """Faster on a GPU than narrow ones apart, for all that the weights are copied side by side."""
    if x_BTD.numel() // x_BTD.shape[-1] * sum(layer.out_features for layer in layers) >= _COUNTED:
        return one_by_one(x_BTD, layers)
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return F.linear(x_BTD, weight, bias).split([layer.out_features for layer in layers], dim=-1)


class Attention(nn.Module):
    """Heads are counted from the projections' width, so a slice of them is an Attention too."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(dim, heads * head_dim, bias=bias)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.o = nn.Linear(heads * head_dim, dim, bias=bias)
        self.project: Project = one_by_one
        self.attend: Attend = attend

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, mask: Mask) -> Tensor:
        projected = self.project(x_BTD, (self.q, self.k, self.v))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return self.o(self.attend(q, k, v, mask).flatten(-2))


def gated(x_BTD: Tensor, gate: nn.Linear, up: nn.Linear) -> Tensor:
    return F.silu(gate(x_BTD)) * up(x_BTD)


class SwiGLU(nn.Module):
    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)
        self.gated: Gated = gated

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.gated(x_BTD, self.gate, self.up))


def gelu_of(x_BTD: Tensor, up: nn.Linear) -> Tensor:
    return F.gelu(up(x_BTD), approximate="tanh")


class Gelu(nn.Module):
    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn)
        self.down = nn.Linear(ffn, dim)
        self.activated: Activated = gelu_of

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activated(x_BTD, self.up))


def normed(norm: nn.Module, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """The states as they go on past the norm, and what comes out of it."""
    return x_BTD, norm(x_BTD)


class Block(nn.Module):
    def __init__(
        self, attention_norm: nn.Module, attention: Attention, ffn_norm: nn.Module, ffn: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.ffn = ffn
        self.normed: Normed = normed
        self.tile: int | None = None

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, mask: Mask) -> Tensor:
        x_BTD, y_BTD = self.normed(self.attention_norm, x_BTD)
        x_BTD = x_BTD + self.attention(y_BTD, rotation, mask)
        if self.tile is None or x_BTD.shape[1] <= self.tile:
            return self.feed_forward(x_BTD)
        weights = [*self.ffn_norm.parameters(), *self.ffn.parameters()]
        return in_tiles(self.feed_forward, x_BTD, self.tile, weights)

    def feed_forward(self, x_BTD: Tensor) -> Tensor:
        """The half of the block that looks at each token alone."""
        x_BTD, y_BTD = self.normed(self.ffn_norm, x_BTD)
        return x_BTD + self.ffn(y_BTD)


def logits_loss(x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor) -> Tensor:
    """Summed next-token loss by whole logits in fp32; labels of -100 do not count."""
    logits_BTV = F.linear(x_BTD, weight_VD).float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")


class Head(nn.Module):
    """States to logits; given labels, straight to their summed loss, so that logits need never be whole."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.zeros(vocab_size, dim))
        self.loss: HeadLoss = logits_loss

    def forward(self, x_BTD: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        if labels_BT is None:
            return F.linear(x_BTD, self.weight)
        return self.loss(x_BTD, self.weight, labels_BT)
