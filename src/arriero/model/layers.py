"""Modules of a transformer block, and the head. What a block computes is the modules it holds: faster or
parallel versions replace these modules and keep the names of their parameters.

Shapes: B batch, T tokens, D dim, H heads, K kv heads, E head dim, F ffn, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arriero.model.attention import AttentionCore, Mask
from arriero.model.spec import RopeScaling

# Attention kernels may index the elements of a strided tensor with 32 bits.
_INDEX_LIMIT = 2**31

Rotation = tuple[Tensor, Tensor]
Module = TypeVar("Module", bound=nn.Module)


def converted(module: nn.Module, kind: type[Module]) -> Module:
    """Return a module of the subclass `kind` with the parameters, children and settings of `module`."""
    assert issubclass(kind, type(module)), f"{kind.__name__} is not a kind of {type(module).__name__}"
    new = kind.__new__(kind)
    new.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in vars(module).items()})
    return new


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in the place of the one of that name."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)


class Rope(nn.Module):
    """Rotary position embedding in Hugging Face's order: dimension i is rotated with i + E/2."""

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
        # in bf16 the angles of far positions would be wrong, and to_empty leaves them undefined
        super()._apply(fn, recurse)
        self.reset()
        return self

    def forward(self, positions: Tensor) -> Rotation:
        """Return cosines and sines in fp32, shaped (..., T, 1, E/2) to broadcast over (B, T, H, E/2)."""
        angles = positions[..., None, None].float() * self.frequencies
        if self.scaling is None or (by := self.scaling.amplitude) == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * by, angles.sin() * by


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None or scaling.type == "dynamic":
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "yarn":
        kept = _kept_by_yarn(head_dim, theta, scaling)
        return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _kept_by_yarn(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the share of each frequency that is not scaled: a ramp over the dimensions, not the turns."""
    first, last = (
        head_dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.high_freq_factor, scaling.low_freq_factor)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    at = torch.arange(head_dim // 2, device="cpu", dtype=torch.float32)
    return 1.0 - ((at - first) / (last - first or 0.001)).clamp(0.0, 1.0)


def rotate(x_BTHE: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the heads, or their first dimensions where there are angles for these only."""
    cos, sin = rotation
    width = 2 * cos.shape[-1]
    if width < x_BTHE.shape[-1]:
        return torch.cat((rotate(x_BTHE[..., :width], rotation), x_BTHE[..., width:]), dim=-1)
    a, b = x_BTHE.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTHE.dtype)


class Attention(nn.Module):
    """Self-attention. The number of heads follows from the width of q, k and v: under tensor parallelism
    these are slices. `core` is replaced under context parallelism. `bias` is that of q, k and v, and of the
    output projection unless `o_bias` is given; with `norm_eps` each head of q and k is normalised."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool,
        o_bias: bool | None = None,
        norm_eps: float | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(dim, heads * head_dim, bias=bias)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.q_norm = None if norm_eps is None else nn.RMSNorm(head_dim, eps=norm_eps)
        self.k_norm = None if norm_eps is None else nn.RMSNorm(head_dim, eps=norm_eps)
        self.core = AttentionCore(window)
        self.o = nn.Linear(heads * head_dim, dim, bias=bias if o_bias is None else o_bias)

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, mask: Mask) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self.project(x_BTD))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return self.o(self.attend(q, k, v, mask).flatten(-2))

    def attend(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Mask) -> Tensor:
        return self.core(q_BTHE, k_BTKE, v_BTKE, mask)

    def project(self, x_BTD: Tensor) -> Iterable[Tensor]:
        return [self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)]


class FusedQKVAttention(Attention):
    """Attention with q, k and v in one matmul of concatenated weights, which is faster on a GPU."""

    def project(self, x_BTD: Tensor) -> Iterable[Tensor]:
        layers = (self.q, self.k, self.v)
        widths = [layer.out_features for layer in layers]
        if x_BTD.numel() // x_BTD.shape[-1] * sum(widths) >= _INDEX_LIMIT:
            return super().project(x_BTD)
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if self.q.bias is None else torch.cat([layer.bias for layer in layers])
        return F.linear(x_BTD, weight, bias).split(widths, dim=-1)


class SwiGLU(nn.Module):
    """Gated feed-forward layer: down(activation(gate(x)) * up(x)), with SiLU unless another is given."""

    def __init__(self, dim: int, ffn: int, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.activation = nn.SiLU() if activation is None else activation
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))


class MLP(nn.Module):
    """Feed-forward layer with biases: down(activation(up(x))), with tanh-approximated GELU by default."""

    def __init__(self, dim: int, ffn: int, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn)
        self.activation = nn.GELU(approximate="tanh") if activation is None else activation
        self.down = nn.Linear(ffn, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))


def residual_and_norm(norm: nn.Module, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return x, to be used for the residual connection, and the norm of x.

    A kernel norm returns both itself, so that their gradients are added in one pass.
    """
    y = norm(x_BTD)
    return y if isinstance(y, tuple) else (x_BTD, y)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(
        self, attention_norm: nn.Module, attention: Attention, ffn_norm: nn.Module, ffn: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.ffn = ffn

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, mask: Any) -> Tensor:
        return self.feed_forward(self.mix(x_BTD, rotation, mask))

    def mix(self, x_BTD: Tensor, rotation: Rotation | None, mask: Any) -> Tensor:
        """Compute the half of the block that mixes tokens: norm, attention, residual."""
        x_BTD, y_BTD = residual_and_norm(self.attention_norm, x_BTD)
        return x_BTD + self.attention(y_BTD, rotation, mask)

    def feed_forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the half of the block that treats each token independently."""
        x_BTD, y_BTD = residual_and_norm(self.ffn_norm, x_BTD)
        return x_BTD + self.ffn(y_BTD)


class TiledBlock(Block):
    """Block whose feed-forward half processes at most `tile` tokens of a sequence at a time, and recomputes
    each tile in the backward pass: its activations never exist for a whole sequence."""

    tile: int
    feed_forward_of_tile: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, block: Block, tile: int, compiler: Callable[..., Any] | None) -> "TiledBlock":
        """Convert a block; `compiler` compiles the function of one tile."""
        new = converted(block, cls if type(block) is Block else _tiled(type(block)))
        new.tile = tile
        function = MethodType(Block.feed_forward, new)
        new.feed_forward_of_tile = function if compiler is None else compiler(function)
        return new

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, mask: Any) -> Tensor:
        x_BTD = self.mix(x_BTD, rotation, mask)
        if x_BTD.shape[1] <= self.tile:
            return self.feed_forward_of_tile(x_BTD)
        weights = [p for part in (self.ffn_norm, self.ffn) for p in part.parameters() if p.requires_grad]
        return apply_in_tiles(self.feed_forward_of_tile, x_BTD, self.tile, weights)


@cache
def _tiled(kind: type[Block]) -> type[TiledBlock]:
    """Return the tiled version of a subclass of Block with its own way to mix tokens."""
    return type(f"Tiled{kind.__name__}", (TiledBlock, kind), {})


@torch.compiler.disable
def apply_in_tiles(
    function: Callable[[Tensor], Tensor], x_BTD: Tensor, tokens: int, weights: Sequence[Tensor]
) -> Tensor:
    """Apply a function of single tokens to `tokens` of each sequence at a time, recomputing it in backward.

    `weights` are the parameters that the function uses.
    """
    if not torch.is_grad_enabled():
        return torch.cat([function(tile) for tile in x_BTD.split(tokens, dim=1)], dim=1)
    return _Tiles.apply(function, tokens, x_BTD, *weights)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function, tokens: int, x_BTD: Tensor, *weights: Tensor) -> Tensor:
        ctx.function, ctx.tokens = function, tokens
        ctx.save_for_backward(x_BTD, *weights)
        y_BTD = torch.empty_like(x_BTD)
        for x, y in zip(x_BTD.split(tokens, dim=1), y_BTD.split(tokens, dim=1), strict=True):
            y.copy_(function(x))
        return y_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        x_BTD, *weights = ctx.saved_tensors
        x_grad = torch.empty_like(x_BTD)
        # in fp32, because many small gradients are added
        sums: list[Tensor] = []
        tiles = (t.split(ctx.tokens, dim=1) for t in (x_BTD, *grad_outputs, x_grad))
        for x, gradient, out in zip(*tiles, strict=True):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                found, *own = torch.autograd.grad(ctx.function(x), [x, *weights], gradient)
            out.copy_(found)
            if sums:
                sums = [total.add_(g) for total, g in zip(sums, own, strict=True)]
            else:
                sums = [g.float() for g in own]
        grads = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return None, None, x_grad, *grads


def logits_loss(x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the summed next-token loss from logits in fp32; labels of -100 are excluded from the loss."""
    logits_BTV = F.linear(x_BTD, weight_VD).float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum")


class Head(nn.Module):
    """Hidden states to logits; with labels, to their summed loss. Training replaces it by a head that
    computes the loss without holding all logits at once."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.zeros(vocab_size, dim))

    def forward(self, x_BTD: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        if labels_BT is None:
            return F.linear(x_BTD, self.weight)
        return logits_loss(x_BTD, self.weight, labels_BT)
