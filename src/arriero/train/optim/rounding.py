"""Rounding up or down by chance, so that changes below a number format's resolution add up on average."""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

_HALF = 1 << 16
_NAN = 0x7FC0


class Noise:
    """Random bits that are a function of (seed, step, name, piece): a resumed run draws them again, and ranks
    that hold the same piece of a parameter round it alike. They are computed, not stored: a fused update
    makes its own on the way."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self.key = lru_cache(maxsize=None)(self._key)

    def _key(self, name: str, piece: int) -> Tensor:
        """Two numbers of 32 bits."""
        return torch.tensor(self._hashed(f"{name}/{piece}"), dtype=torch.int32).to(self._device)

    def step_key(self, step: int) -> int:
        return self._hashed(f"step {step}")[0]

    def bits(self, step: int, name: str, piece: int, count: int) -> Tensor:
        return random_bits(self.key(name, piece), self.step_key(step), count)

    def _hashed(self, text: str) -> list[int]:
        digest = hashlib.blake2b(f"{self._seed}/{text}".encode(), digest_size=8).digest()
        return [int.from_bytes(part, "big", signed=True) for part in (digest[:4], digest[4:])]


def random_bits(key: Tensor, step_key: int | Tensor, count: int) -> Tensor:
    """32 bits for each of `count` elements: its number, mixed with the keys. All arithmetic wraps."""
    index = torch.arange(count, device=key.device)
    h = index.int() ^ key[0]
    h = h ^ _shifted(h, 16)
    h = h * 0x21F0AAAD + (key[1] + step_key)
    h = h ^ _shifted(h, 15)
    h = h * 0x735A2D97
    return h ^ _shifted(h, 15)


def _shifted(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (32 - by)) - 1)


def low_half(bits: Tensor) -> Tensor:
    return bits & (_HALF - 1)


def high_half(bits: Tensor) -> Tensor:
    return _shifted(bits, 16)


def third_half(bits: Tensor) -> Tensor:
    """Of the same bits, for a third number that is rounded beside the two others."""
    return high_half(bits * (0x9E3779B1 - (1 << 32)))


def chance(half: Tensor) -> Tensor:
    """16 bits to a number in (0, 1)."""
    return (half.float() + 0.5) * (1.0 / _HALF)


def to_bf16(values: Tensor, half: Tensor) -> Tensor:
    """One of the two bf16 neighbours, such that the mean over the random bits is the fp32 value."""
    raised = (values.view(torch.int32) + half) & ~(_HALF - 1)
    return torch.where(values.isfinite(), raised.view(torch.float32), values).to(torch.bfloat16)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as the nearest bf16 and what is left of its bits: 16 each, and nothing lost. Ties go away from
    zero, since to even they could leave 17 bits."""
    bits = values.view(torch.int32)
    upper = (bits + _HALF // 2) >> 16
    lower = bits - (upper << 16)
    # the sum wraps for some of those that are no number, and would pass for one
    upper, lower = torch.where(values.isnan(), _NAN, upper), torch.where(values.isnan(), 0, lower)
    return upper.short().view(torch.bfloat16), lower.short()


def joined(upper: Tensor, lower: Tensor) -> Tensor:
    return ((upper.view(torch.int16).int() << 16) + lower.int()).view(torch.float32)
