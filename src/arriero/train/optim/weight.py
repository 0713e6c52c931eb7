"""A parameter as the update rules see it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from arriero.train.optim.rounding import Noise, low_half, to_bf16
from arriero.train.optim.shards import local_of, piece_number


@dataclass(frozen=True)
class Weight:
    """`master` is what is updated: fp32, or bf16 rounded by chance. `known_as` is its name in checkpoints."""

    known_as: str
    master: Tensor
    decay: float

    @property
    def local(self) -> Tensor:
        return local_of(self.master)

    @property
    def rounds(self) -> bool:
        return self.master.dtype != torch.float32

    def bits(self, noise: Noise, step: int, purpose: str) -> Tensor:
        name = f"{self.known_as}/{purpose}"
        return noise.bits(step, name, piece_number(self.master), self.local.numel())


def write(weight: Tensor, values: Tensor, bits: Tensor | None) -> None:
    """New fp32 values into a local weight of any type."""
    values = values if bits is None else to_bf16(values.flatten(), low_half(bits))
    weight.copy_(values.view(weight.shape))
