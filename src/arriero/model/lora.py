"""LoRA: linear layers with a trained low-rank product beside their frozen weight.

A layer computes x W^T + alpha / rank * x A^T B^T. A has the shape (rank, in), B (out, rank), as in PEFT.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arriero.errors import UserError, nearest
from arriero.model.layers import converted, replace_module

A, B = ".lora_a", ".lora_b"


@dataclass(frozen=True)
class LoraSettings:
    """`targets` are patterns of the names of linear layers, such as 'blocks.*.attention.q'."""

    merges: ClassVar[bool] = True
    label: ClassVar[str] = "LoRA"
    offset: ClassVar[int] = 0
    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def summary(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}"

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapter's tensors on the meta device; `own` are those of the model without it."""
        made = {}
        for layer in targeted(self, own):
            weight = own[f"{layer}.weight"]
            made[layer + A] = torch.empty(self.rank, weight.shape[1], dtype=weight.dtype, device="meta")
            made[layer + B] = torch.empty(weight.shape[0], self.rank, dtype=weight.dtype, device="meta")
        return made

    def add(self, model: nn.Module, blocks: int) -> None:
        """Replace the targeted linear layers of a model, or of a pipeline stage, by layers with adapters."""
        for name, layer in list(model.named_modules()):
            if type(layer) is nn.Linear and any(fnmatchcase(name, pattern) for pattern in self.targets):
                replace_module(model, name, LoraLinear.of(layer, self))


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank product. `drop` is the dropout function, set by tensor parallelism."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float
    dropout: float
    drop: Callable[..., Tensor]

    @classmethod
    def of(cls, layer: nn.Linear, settings: LoraSettings) -> "LoraLinear":
        new = converted(layer, cls)
        weight = layer.weight
        new.lora_a = nn.Parameter(weight.new_empty(settings.rank, weight.shape[1]))
        new.lora_b = nn.Parameter(weight.new_empty(weight.shape[0], settings.rank))
        new.scale = settings.scale
        new.dropout, new.drop = settings.dropout, F.dropout
        return new

    def forward(self, input: Tensor) -> Tensor:
        dropped = self.drop(input, self.dropout, self.training) if self.dropout else input
        low = F.linear(dropped, self.lora_a)
        return super().forward(input) + self.scale * F.linear(low, self.lora_b)


def linear_layers(names: Iterable[str]) -> list[str]:
    """Return the linear layers inside blocks, by the names of the parameters of a model."""
    layers = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    return [name for name in layers if name.startswith("blocks.") and "norm" not in name.rsplit(".")[-1]]


def targeted(settings: LoraSettings, names: Iterable[str]) -> list[str]:
    """Return the layers that get an adapter; raise UserError for a pattern that matches none."""
    layers = linear_layers(names)
    for pattern in settings.targets:
        if not any(fnmatchcase(layer, pattern) for layer in layers):
            close = nearest(pattern, layers, cutoff=0.3) or layers[0]
            raise UserError(
                f"lora.targets: '{pattern}' matches no linear layer",
                f"names look like '{close}'; '*' stands for anything",
            )
    return [layer for layer in layers if any(fnmatchcase(layer, pattern) for pattern in settings.targets)]


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the weight with the low-rank product added in fp32."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
