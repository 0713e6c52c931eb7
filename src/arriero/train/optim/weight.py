"""A parameter, and one update of it, as the update rules see them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from arriero.parallel.dtensor import from_local, local_part, redistribute_like, shard_index
from arriero.train.optim.rounding import Noise, joined, split, third_half, to_bf16


@dataclass(frozen=True)
class Update:
    """One optimizer step. Tensors are scalars on the device, so that deciding needs no host sync.

    Gradients are multiplied by `factor`. Where `accepted` is false, no weight and no state may change.
    `taken` counts the accepted updates with this one; `number` counts all, and keys the random bits.
    """

    lr: float
    factor: Tensor
    accepted: Tensor
    taken: Tensor
    number: int


def store(target: Tensor, new: Tensor, accepted: Tensor | None = None) -> None:
    """Overwrite the target unless the update was not accepted."""
    target.copy_(new if accepted is None else torch.where(accepted, new, target))


@dataclass(frozen=True)
class Weight:
    """`parameter` is the model's own. In bf16 it may be the upper half of an fp32 weight, `low` the lower;
    of an fp16 one `shadow` is the fp32 weight; both are local. In bf16 without either it is rounded by
    chance. `known_as` is its name in checkpoints."""

    known_as: str
    parameter: Tensor
    decay: float
    low: Tensor | None = None
    shadow: Tensor | None = None

    @property
    def local(self) -> Tensor:
        return local_part(self.parameter)

    @property
    def rounds(self) -> bool:
        return self.parameter.dtype != torch.float32 and self.low is None and self.shadow is None

    def key(self, noise: Noise) -> Tensor:
        return noise.key(self.known_as, shard_index(self.parameter))

    def bits(self, noise: Noise, step: int) -> Tensor:
        return noise.bits(step, self.known_as, shard_index(self.parameter), self.local.numel())

    def values(self) -> Tensor:
        """In fp32; of an fp32 parameter itself."""
        if self.low is not None:
            return joined(self.local, self.low)
        return (self.local if self.shadow is None else self.shadow).float()

    def write(self, values: Tensor, bits: Tensor | None = None, accepted: Tensor | None = None) -> None:
        """New fp32 values; without random bits they are rounded to the nearest."""
        if self.low is not None:
            upper, lower = split(values.contiguous())
            store(self.low, lower, accepted)
            values = upper
        elif self.shadow is not None:
            store(self.shadow, values, accepted)
        elif bits is not None and self.rounds:
            values = to_bf16(values.flatten(), third_half(bits))
        local = self.local
        store(local, values.view(local.shape).to(local.dtype), accepted)

    @torch.no_grad()
    def kept(self) -> Tensor:
        """What a checkpoint holds of it: all its bits."""
        if self.low is None and self.shadow is None:
            return self.parameter.detach()
        return from_local(self.values(), self.parameter)

    def load(self, kept: Tensor) -> None:
        self.write(local_part(redistribute_like(kept, self.parameter)).to(self.local.device, torch.float32))
