"""Mamba-2 and its hybrids with attention: blocks with a state-space mixer, some with attention instead.

Shapes: B batch, T tokens, D dim, H state-space heads, P their width, G groups, N state size, C channels.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arriero.model.generation import Exchange, KVCache, RecurrentMixer
from arriero.model.language_model import InitRule, LanguageModel
from arriero.model.layers import Attention, Block, Rope, Rotation, SwiGLU, residual_and_norm
from arriero.model.mamba.family import ROTARY, Shape, attention_layers
from arriero.model.mamba.kernels import convolve, scan
from arriero.model.mamba.scan import ScanInputs, causal_conv, scan_step
from arriero.model.spec import ModelSpec


class OwnParameters(nn.Module):
    """A module that computes with its own parameters: it reads them by `local`, which tensor parallelism
    replaces where a rank holds a part of them."""

    local: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.local = _unchanged

    def use_part(self, part: int, parts: int, rows: int | None = None) -> None:
        """Compute with the parameters of one of `parts` of the heads only.

        With `rows`, each group has that many, and several parts share a group where there are fewer groups.
        """
        self.local = partial(_part, self.local, part, parts, rows)


def _part(
    local: Callable[[Tensor], Tensor], part: int, parts: int, rows: int | None, whole: Tensor
) -> Tensor:
    mine = local(whole)
    groups = parts if rows is None else min(parts, len(mine) // rows)
    return mine.chunk(groups)[part * groups // parts]


def _unchanged(parameter: Tensor) -> Tensor:
    return parameter


class CausalConv(OwnParameters):
    """Convolution of each channel over the last tokens, followed by SiLU."""

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(channels, 1, taps))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x_BTC: Tensor, document_BT: Tensor | None) -> Tensor:
        return convolve(x_BTC, *self.parameters_of_rank(), document_BT)

    def step(self, x_BTC: Tensor, before_BKC: Tensor) -> Tensor:
        """Convolve one token after the K-1 before it."""
        return F.silu(causal_conv(x_BTC, *self.parameters_of_rank(), None, before_BKC))

    def parameters_of_rank(self) -> tuple[Tensor, Tensor | None]:
        return self.local(self.taps).squeeze(1), None if self.bias is None else self.local(self.bias)


class Scan(OwnParameters):
    """The selective state space: decay rate, step size and skip connection of each head."""

    def __init__(self, heads: int, limits: tuple[float, ...], chunk: int) -> None:
        super().__init__()
        self.limits, self.chunk = limits, chunk
        self.a_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.skip = nn.Parameter(torch.ones(heads))

    def forward(self, projected: ScanInputs) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the states after the last token."""
        y_BTHP, state = scan(self._with_rates(projected), self.chunk)
        return y_BTHP + projected.x_BTHP * self.local(self.skip)[:, None], state

    def step(self, state_BHPN: Tensor, projected: ScanInputs) -> tuple[Tensor, Tensor]:
        """Return the output of one token, and the next states."""
        y_BTHP, state = scan_step(state_BHPN, self._with_rates(projected))
        return y_BTHP + projected.x_BTHP * self.local(self.skip)[:, None], state

    def _with_rates(self, projected: ScanInputs) -> ScanInputs:
        """Return the inputs with the step sizes of all tokens and the rates of decay, in fp32."""
        dt_BTH = F.softplus(projected.dt_BTH.float() + self.local(self.dt_bias).float()).clamp(*self.limits)
        return projected._replace(dt_BTH=dt_BTH, rate_H=-self.local(self.a_log).float().exp())


class GatedNorm(OwnParameters):
    """RMSNorm of the gated result, over all heads. `mean_square` is replaced under tensor parallelism."""

    mean_square: Callable[[Tensor], Tensor]

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.mean_square = _mean_square

    def forward(self, y_BTC: Tensor, gate_BTC: Tensor) -> Tensor:
        gated = y_BTC.float() * F.silu(gate_BTC.float())
        scaled = gated * torch.rsqrt(self.mean_square(gated) + self.eps)
        return self.local(self.weight) * scaled.to(y_BTC.dtype)


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


class Mixer(RecurrentMixer):
    """Mamba-2: project, convolve, scan, gate, normalise, project. Heads and groups follow from the width of
    the projections: under tensor parallelism these are slices.

    `cache` is set while tokens are generated; the mixer then keeps its states there.
    """

    cache: KVCache | None

    def __init__(self, dim: int, shape: Shape, eps: float) -> None:
        super().__init__()
        self.head_dim, self.state, self.taps = shape.head_dim, shape.state, shape.conv
        self.groups = shape.groups
        width, grouped, bias = shape.heads * shape.head_dim, shape.groups * shape.state, shape.bias
        self.z = nn.Linear(dim, width, bias=bias)
        self.x = nn.Linear(dim, width, bias=bias)
        self.b = nn.Linear(dim, grouped, bias=bias)
        self.c = nn.Linear(dim, grouped, bias=bias)
        self.dt = nn.Linear(dim, shape.heads, bias=bias)
        self.conv_x = CausalConv(width, shape.conv, shape.conv_bias)
        self.conv_b = CausalConv(grouped, shape.conv, shape.conv_bias)
        self.conv_c = CausalConv(grouped, shape.conv, shape.conv_bias)
        self.scan = Scan(shape.heads, shape.dt_limits, shape.chunk)
        self.norm = GatedNorm(width, eps)
        self.o = nn.Linear(width, dim, bias=bias)
        self.cache = None
        self.exchange: Exchange | None = None

    def forward(self, x_BTD: Tensor, document_BT: Tensor | None) -> Tensor:
        inputs = self._project(x_BTD)
        gate, *mixed, dt_BTH = inputs
        if self.cache is None:
            y_BTHP, _ = self._scan(mixed, dt_BTH, document_BT)
        else:
            y_BTHP = self._cached(self.cache, mixed, dt_BTH)
        return self.o(self.norm(y_BTHP.flatten(-2), gate))

    def mask(
        self, shape: tuple[int, int], documents_BT: Tensor | None, device: torch.device
    ) -> Tensor | None:
        return None if documents_BT is None else documents_BT.to(device, non_blocking=True)

    def _project(self, x_BTD: Tensor) -> list[Tensor]:
        """Return z, x, b, c and dt; the three narrow ones are one matmul where they are plain layers."""
        wide, narrow = [self.z(x_BTD), self.x(x_BTD)], (self.b, self.c, self.dt)
        if not all(type(each) is nn.Linear and not each._forward_hooks for each in narrow):
            return [*wide, *(each(x_BTD) for each in narrow)]
        weight = torch.cat([each.weight for each in narrow])
        bias = None if self.b.bias is None else torch.cat([each.bias for each in narrow])
        return [*wide, *F.linear(x_BTD, weight, bias).split([each.out_features for each in narrow], dim=-1)]

    def _scan(self, mixed: list[Tensor], dt_BTH: Tensor, document_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.exchange is not None:
            x, dt, _, b, c, _ = self._heads(mixed, dt_BTH)
            x, dt, b, c = self.exchange.to_heads((x, dt[..., None], b, c))
            mixed, dt_BTH = [each.flatten(-2) for each in (x, b, c)], dt[..., 0]
        convolutions = (self.conv_x, self.conv_b, self.conv_c)
        done = [conv(each, document_BT) for conv, each in zip(convolutions, mixed, strict=True)]
        y_BTHP, state = self.scan(self._heads(done, dt_BTH)._replace(document_BT=document_BT))
        return y_BTHP if self.exchange is None else self.exchange.to_tokens(y_BTHP), state

    def divide_heads(self, exchange: Exchange, part: int, parts: int) -> None:
        self.exchange = exchange
        for module in (self.conv_x, self.scan):
            module.use_part(part, parts)
        for module in (self.conv_b, self.conv_c):
            module.use_part(part, parts, self.state)

    def _heads(self, mixed: list[Tensor], dt_BTH: Tensor) -> ScanInputs:
        x, b, c = mixed
        b, c = (each.unflatten(-1, (-1, self.state)) for each in (b, c))
        # the scan computes the rates, and the step sizes, from its own parameters
        return ScanInputs(x.unflatten(-1, (-1, self.head_dim)), dt_BTH, self.scan.a_log, b, c)

    def _cached(self, cache: KVCache, mixed: list[Tensor], dt_BTH: Tensor) -> Tensor:
        """Compute a prompt, or one new token of each row, and keep the states."""
        if cache.is_prompt:
            y_BTHP, state = self._scan(mixed, dt_BTH, None)
            before = [F.pad(each, (0, 0, self.taps - 1, 0))[:, each.shape[1] :] for each in mixed]
        else:
            *kept, state = [each[cache.rows] for each in cache.stored[self]]
            convolutions = (self.conv_x, self.conv_b, self.conv_c)
            done = [conv.step(x, k) for conv, x, k in zip(convolutions, mixed, kept, strict=True)]
            y_BTHP, state = self.scan.step(state, self._heads(done, dt_BTH))
            before = [torch.cat((k, x), dim=1)[:, 1:] for x, k in zip(mixed, kept, strict=True)]
        found = [*before, state]
        if self not in cache.stored:
            cache.stored[self] = [each.new_zeros(cache.batch, *each.shape[1:]) for each in found]
        for kept, new in zip(cache.stored[self], found, strict=True):
            kept[cache.rows] = new
        return y_BTHP

    def use_cache(self, cache: KVCache | None) -> None:
        self.cache = cache


class MambaBlock(Block):
    """Pre-norm block with a state-space mixer, and a feed-forward layer unless `ffn` is None."""

    # the places of attention in a block, which this one does not have
    attention_norm: Any = None
    attention: Any = None
    ffn_norm: Any
    ffn: Any

    def __init__(
        self, mixer_norm: nn.Module, mixer: Mixer, ffn_norm: nn.Module | None, ffn: nn.Module | None
    ) -> None:
        nn.Module.__init__(self)
        self.mixer_norm, self.mixer = mixer_norm, mixer
        self.ffn_norm, self.ffn = ffn_norm, ffn

    def mix(self, x_BTD: Tensor, rotation: Rotation | None, mask: Any) -> Tensor:
        x_BTD, y_BTD = residual_and_norm(self.mixer_norm, x_BTD)
        return x_BTD + self.mixer(y_BTD, mask)

    def feed_forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD if self.ffn is None else super().feed_forward(x_BTD)


class Mamba(LanguageModel):
    def __init__(self, spec: ModelSpec) -> None:
        shape, attention = Shape.of(spec), attention_layers(spec)
        blocks = [_attention(spec) if i in attention else _mamba(spec, shape) for i in range(spec.layers)]
        super().__init__(spec, blocks, _norm(spec))
        self.rope = None
        if attention and spec.rope_theta is not None:
            self.rope = Rope(round(ROTARY * spec.head_dim), spec.rope_theta, spec.rope_scaling)
        self._shape = shape

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        return self.embedding(tokens_BT)

    def rotation(self, positions: Tensor) -> Rotation | None:
        return None if self.rope is None else self.rope(positions)

    def init_rule(self, name: str) -> InitRule:
        module, kind = name.split(".")[-2:]
        if "norm" in module or kind == "skip":
            return InitRule(constant=1.0)
        if kind == "a_log":
            return InitRule(quantiles=_decay_rates)
        if kind == "dt_bias":
            return InitRule(quantiles=_step_sizes)
        if kind == "bias":
            return InitRule()
        if kind == "taps":
            # the variance of torch's uniform default
            return InitRule(std=(3 * self._shape.conv) ** -0.5)
        residual = (2 * self.spec.layers) ** -0.5 if module in ("o", "down") else 1.0
        return InitRule(std=0.02 * residual)


def _decay_rates(share: Tensor) -> Tensor:
    """Return logarithms of decay rates that are uniform from 1 to 16, as the authors of Mamba-2 chose."""
    return torch.log(1.0 + 15.0 * share)


def _step_sizes(share: Tensor) -> Tensor:
    """Return the inverse softplus of step sizes that are log-uniform from 0.001 to 0.1."""
    dt = torch.exp(math.log(1e-3) + share * (math.log(0.1) - math.log(1e-3)))
    return dt + torch.log(-torch.expm1(-dt))


def _norm(spec: ModelSpec) -> nn.Module:
    return nn.RMSNorm(spec.dim, eps=spec.norm_eps)


def _mamba(spec: ModelSpec, shape: Shape) -> Block:
    mixer = Mixer(spec.dim, shape, spec.norm_eps)
    if not spec.ffn:
        return MambaBlock(_norm(spec), mixer, None, None)
    return MambaBlock(_norm(spec), mixer, _norm(spec), SwiGLU(spec.dim, spec.ffn))


def _attention(spec: ModelSpec) -> Block:
    attention = Attention(spec.dim, spec.heads, spec.kv_heads, spec.head_dim, bias=False)
    return Block(_norm(spec), attention, _norm(spec), SwiGLU(spec.dim, spec.ffn))
