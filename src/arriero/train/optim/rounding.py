"""Rounding up or down by chance, so that changes below a number format's resolution add up on average."""

import hashlib

import torch
from torch import Tensor

_HALF = 1 << 16


class Noise:
    """Random bits that are a function of (seed, step, name, piece): a resumed run draws them again, and ranks
    that hold the same piece of a parameter round it alike."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = torch.Generator(device)

    def bits(self, step: int, name: str, piece: int, count: int) -> Tensor:
        """32 random bits for each of `count` elements."""
        key = hashlib.blake2b(f"{self._seed}/{step}/{name}/{piece}".encode(), digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(key, "big"))
        empty = torch.empty(count, dtype=torch.int32, device=self._generator.device)
        return empty.random_(-(1 << 31), 1 << 31, generator=self._generator)


def low_half(bits: Tensor) -> Tensor:
    return bits & (_HALF - 1)


def high_half(bits: Tensor) -> Tensor:
    return (bits >> 16) & (_HALF - 1)


def chance(half: Tensor) -> Tensor:
    """16 bits to a number in (0, 1)."""
    return (half.float() + 0.5) * (1.0 / _HALF)


def to_bf16(values: Tensor, half: Tensor) -> Tensor:
    """One of the two bf16 neighbours, such that the mean over the random bits is the fp32 value."""
    raised = (values.view(torch.int32) + half) & ~(_HALF - 1)
    return torch.where(values.isfinite(), raised.view(torch.float32), values).to(torch.bfloat16)
