"""MLP speculator: small heads that predict several tokens from one hidden state of a frozen base model.

Head i gets the state of head i - 1 and the token that it predicted, and predicts the next one. State 0 is the
base model's hidden state before its head. Shapes: B batch, T tokens, D inner width, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arriero.config.schema import SpeculatorSection
from arriero.model.layers import Head, converted, logits_loss
from arriero.model.spec import ModelSpec
from arriero.model.speculator.settings import inner_dim

_IGNORED = -100
_EPS = 1e-6


class ScaledNorm(nn.Module):
    """RMSNorm with a bias."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * _normalised(x) + self.bias


def _normalised(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)).to(x.dtype)


class Speculator(nn.Module):
    """With tied weights, all heads share embedding, norm and output, and all but the first the projection."""

    def __init__(self, section: SpeculatorSection, spec: ModelSpec) -> None:
        super().__init__()
        self.count, self.scales_input = int(section.n_predict), section.scale_input
        inner, own = inner_dim(section, spec), 1 if section.tie_weights else self.count
        self.emb = nn.ModuleList(nn.Embedding(spec.vocab_size, inner) for _ in range(own))
        projections = min(2, self.count) if section.tie_weights else self.count
        self.proj = nn.ModuleList(
            nn.Linear(inner if i else spec.dim, inner, bias=False) for i in range(projections)
        )
        self.head = nn.ModuleList(nn.Linear(inner, spec.vocab_size, bias=False) for _ in range(own))
        self.ln = nn.ModuleList(ScaledNorm(inner) for _ in range(own))
        # after the last head, state 0 and the embeddings contribute equally
        self.state_weight = 0.5 ** (0.5 / self.count)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)

    def start(self, hidden: Tensor) -> Tensor:
        """Return state 0 of the base model's hidden states."""
        return _normalised(hidden) / math.sqrt(2) if self.scales_input else hidden

    def step(self, i: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the state of head `i` after the tokens before the one it predicts."""
        embedded = _of(self.emb, i)(tokens) * self.token_weight
        return F.gelu(_of(self.ln, i)(_of(self.proj, i)(state) * self.state_weight + embedded))

    def weight(self, i: int) -> Tensor:
        """Return the output weight of head `i`."""
        return self.head[min(i, len(self.head) - 1)].get_parameter("weight")

    @torch.no_grad()
    def propose(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the greedy proposals (..., n_predict) that follow the base model's `tokens`."""
        state, found = self.start(hidden), []
        for i in range(self.count):
            state = self.step(i, state, tokens)
            tokens = F.linear(state, self.weight(i)).argmax(-1)
            found.append(tokens)
        return torch.stack(found, dim=-1)


def _of(modules: nn.ModuleList, i: int) -> nn.Module:
    return modules[min(i, len(modules) - 1)]


class SpeculatorHead(Head):
    """The base model's head with a speculator. With labels it returns the summed loss of the speculator, as a
    mean over its heads; without, the base model's logits. `loss` is replaced by one that does not hold all
    logits."""

    speculator: Speculator
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]

    @classmethod
    def of(cls, head: Head, section: SpeculatorSection, spec: ModelSpec) -> "SpeculatorHead":
        new = converted(head, cls)
        new.speculator = Speculator(section, spec)
        new.loss = logits_loss
        return new

    def forward(self, x_BTD: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        if labels_BT is None:
            return F.linear(x_BTD, self.weight)
        state, tokens = self.speculator.start(x_BTD.detach()), labels_BT.shape[1]
        known_BT = torch.ones_like(labels_BT, dtype=torch.bool)
        total = x_BTD.new_zeros((), dtype=torch.float32)
        for i in range(self.speculator.count):
            # token t knows the labels up to t + i, and predicts the next
            left = max(0, tokens - i - 1)
            given, wanted = labels_BT[:, i : i + left], labels_BT[:, i + 1 : i + 1 + left]
            known_BT = known_BT[:, :left] & (given != _IGNORED)
            state = self.speculator.step(i, state[:, :left], given.clamp(min=0))
            labels = wanted.where(known_BT, _IGNORED)
            total = total + self.loss(state, self.speculator.weight(i), labels)
        return total / self.speculator.count


def add_speculator(head: Head | None, section: SpeculatorSection, spec: ModelSpec) -> Head | None:
    """Return the head of a model with a speculator; a model without head has none."""
    return None if head is None else SpeculatorHead.of(head, section, spec)
