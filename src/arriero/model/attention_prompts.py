"""Adapters in the attention: trained vectors that every token attends to, in a frozen model.

Prefix tuning (arXiv:2101.00190) puts trained keys and values before those of each document. LLaMA-Adapter
(arXiv:2303.16199) adds the attention to trained prompts, times a gate that is zero at first. Both compute
what PEFT computes. Shapes: B batch, T tokens, H heads, K kv heads, E head dim, D dim, P trained vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arriero.errors import UserError
from arriero.model.attention import (
    AttentionCore,
    Documents,
    Mask,
    attend_by_blocks,
    attend_by_document,
    attend_causally,
)
from arriero.model.layers import Attention, converted, replace_module

PREFIX_K, PREFIX_V = ".core.prefix.k", ".core.prefix.v"
PROMPT, GATE = ".prompt.vectors", ".prompt.gate"
_KEYS = ".attention.k.weight"


class Prefix(nn.Module):
    """Trained keys and values (P, K x E); tensor parallelism splits them and returns the heads of a rank."""

    def __init__(self, tokens: int, like: Tensor) -> None:
        super().__init__()
        self.k = nn.Parameter(like.new_empty(tokens, like.shape[0]))
        self.v = nn.Parameter(like.new_empty(tokens, like.shape[0]))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v


class PrefixCore(AttentionCore):
    """Causal attention of each document to itself and to a prefix."""

    def __init__(self, tokens: int, attention: Attention) -> None:
        super().__init__()
        self.prefix = Prefix(tokens, attention.k.weight)
        self._head_dim = attention.head_dim

    def prefix_states(self, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, P, K, E)."""
        k, v = (x.to(dtype).unflatten(-1, (-1, self._head_dim)) for x in self.prefix())
        return k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)

    def forward(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Mask) -> Tensor:
        if mask is None:
            return self._attend(q_BTHE, k_BTKE, v_BTKE)
        if isinstance(mask, Documents):
            return attend_by_document(q_BTHE, k_BTKE, v_BTKE, mask, attend=self._attend)
        prefix_k, prefix_v = self.prefix_states(q_BTHE.shape[0], q_BTHE.dtype)
        own, own_lse_BTH = attend_by_blocks(q_BTHE, k_BTKE, v_BTKE, mask, with_lse=True)
        found, lse_BTH = _attend_to(q_BTHE, prefix_k, prefix_v)
        share_BTH1 = (lse_BTH - own_lse_BTH).sigmoid()[..., None].to(own.dtype)
        return own + share_BTH1 * (found - own)

    def _attend(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
        prefix = self.prefix_states(q_BTHE.shape[0], q_BTHE.dtype)
        k, v = (torch.cat(both, dim=1) for both in zip(prefix, (k_BTKE, v_BTKE), strict=True))
        # queries of the prefix, whose results are dropped, make the plain causal kernel usable
        tokens = prefix[0].shape[1]
        q = F.pad(q_BTHE, (0, 0, 0, 0, tokens, 0))
        return attend_causally(q, k, v)[:, tokens:]


def _attend_to(q_BTHE: Tensor, k_BPKE: Tensor, v_BPKE: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention to a few keys without a mask, and the logarithm of its sum of exponentials."""
    grouped = q_BTHE.unflatten(2, (k_BPKE.shape[2], -1))
    scores = torch.einsum("btkge,bpke->btkgp", grouped, k_BPKE).float() * q_BTHE.shape[-1] ** -0.5
    shares = scores.softmax(-1).to(v_BPKE.dtype)
    out = torch.einsum("btkgp,bpke->btkge", shares, v_BPKE)
    return out.flatten(2, 3), scores.logsumexp(-1).flatten(2, 3)


class Prompt(nn.Module):
    """Trained prompts (P, D) and their gate."""

    def __init__(self, tokens: int, like: Tensor) -> None:
        super().__init__()
        self.vectors = nn.Parameter(like.new_empty(tokens, like.shape[1]))
        self.gate = nn.Parameter(like.new_empty(1))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.vectors, self.gate


class GatedPromptAttention(Attention):
    """Attention plus the gated attention to prompts, whose keys and values the frozen layers compute."""

    prompt: Prompt

    def attend(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Mask) -> Tensor:
        vectors_PD, gate = self.prompt()
        heads = (layer(vectors_PD[None].to(q_BTHE.dtype)) for layer in (self.k, self.v))
        k_BPKE, v_BPKE = (x.unflatten(-1, (-1, self.head_dim)).expand(len(q_BTHE), -1, -1, -1) for x in heads)
        if self.k_norm is not None:
            k_BPKE = self.k_norm(k_BPKE)
        found, _ = _attend_to(q_BTHE, k_BPKE, v_BPKE)
        return super().attend(q_BTHE, k_BTKE, v_BTKE, mask) + gate.to(found.dtype) * found


def _attentions(model: nn.Module) -> list[tuple[str, Attention]]:
    found = [(name, each) for name, each in model.named_modules() if isinstance(each, Attention)]
    if odd := [name for name, each in found if type(each).forward is not Attention.forward]:
        raise UserError(f"{odd[0]} has an attention of its own, without a place for prompts", "use [lora]")
    return found


def _layers(own: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the attention modules by the parameters of a model."""
    layers = [name.removesuffix(".k.weight") for name in own if name.endswith(_KEYS)]
    if not layers:
        raise UserError("the model has no attention for prompts", "use [lora]")
    return layers


@dataclass(frozen=True)
class PrefixSettings:
    """Prefix tuning with `tokens` trained keys and values per block."""

    merges: ClassVar[bool] = False
    label: ClassVar[str] = "prefix tuning"
    dropout: ClassVar[float] = 0.0
    tokens: int

    @property
    def summary(self) -> str:
        return f"{self.tokens} keys and values per block"

    @property
    def offset(self) -> int:
        """By how much it moves the positions of all tokens."""
        return self.tokens

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = {}
        for layer in _layers(own):
            for end in (PREFIX_K, PREFIX_V):
                made[layer + end] = own[f"{layer}.k.weight"].new_empty(
                    self.tokens, own[f"{layer}.k.weight"].shape[0], device="meta"
                )
        return made

    def add(self, model: nn.Module, blocks: int) -> None:
        for name, attention in _attentions(model):
            if attention.core.window is not None:
                raise UserError(
                    f"prefix tuning does not work with the sliding window of {name}", "use [lora]"
                )
            attention.core = PrefixCore(self.tokens, attention)


@dataclass(frozen=True)
class GatedPromptSettings:
    """LLaMA-Adapter: prompts in the last `layers` blocks, or in all of them."""

    merges: ClassVar[bool] = False
    label: ClassVar[str] = "LLaMA-Adapter"
    dropout: ClassVar[float] = 0.0
    offset: ClassVar[int] = 0
    tokens: int
    layers: int | None = None

    @property
    def summary(self) -> str:
        return f"{self.tokens} prompts in {f'the last {self.layers}' if self.layers else 'all'} blocks"

    def _has_prompts(self, name: str, blocks: int) -> bool:
        if self.layers and self.layers > blocks:
            what = f"llama_adapter.layers is {self.layers}, and the model has {blocks} blocks"
            raise UserError(what, "use at most as many")
        return int(name.split(".")[1]) >= blocks - (self.layers or blocks)

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layers, made = _layers(own), {}
        blocks = 1 + max(int(name.split(".")[1]) for name in own if name.startswith("blocks."))
        for layer in (name for name in layers if self._has_prompts(name, blocks)):
            weight = own[f"{layer}.k.weight"]
            made[layer + PROMPT] = weight.new_empty(self.tokens, weight.shape[1], device="meta")
            made[layer + GATE] = weight.new_empty(1, device="meta")
        return made

    def add(self, model: nn.Module, blocks: int) -> None:
        for name, attention in _attentions(model):
            if self._has_prompts(name, blocks):
                new = converted(attention, GatedPromptAttention)
                new.prompt = Prompt(self.tokens, attention.k.weight)
                replace_module(model, name, new)
