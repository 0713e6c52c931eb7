"""Stochastic rounding, and fp32 numbers split into a bf16 number and the rest of their bits.

Stochastic rounding rounds up or down at random such that the mean is the exact value. Updates smaller than a
number format's resolution then add up instead of being lost.
"""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

_HALF = 1 << 16
_NAN = 0x7FC0


class Noise:
    """Random bits that are a function of (seed, step, name, shard).

    A resumed run draws the same bits, and ranks that hold the same shard of a parameter round it alike. They
    are computed where they are needed, inside fused kernels too, and never stored.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self.key = lru_cache(maxsize=None)(self._key)

    def _key(self, name: str, shard: int) -> Tensor:
        """Return two 32-bit numbers."""
        return torch.tensor(self._hash(f"{name}/{shard}"), dtype=torch.int32).to(self._device)

    def step_key(self, step: int) -> int:
        return self._hash(f"step {step}")[0]

    def bits(self, step: int, name: str, shard: int, count: int) -> Tensor:
        return random_bits(self.key(name, shard), self.step_key(step), count)

    def _hash(self, text: str) -> list[int]:
        digest = hashlib.blake2b(f"{self._seed}/{text}".encode(), digest_size=8).digest()
        return [int.from_bytes(part, "big", signed=True) for part in (digest[:4], digest[4:])]


def random_bits(key: Tensor, step_key: int | Tensor, count: int) -> Tensor:
    """Return 32 bits for each of `count` elements: a hash of its index and the keys. Arithmetic wraps."""
    index = torch.arange(count, device=key.device)
    h = index.int() ^ key[0]
    h = h ^ _shift_right(h, 16)
    h = h * 0x21F0AAAD + (key[1] + step_key)
    h = h ^ _shift_right(h, 15)
    h = h * 0x735A2D97
    return h ^ _shift_right(h, 15)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (32 - by)) - 1)


def low_half(bits: Tensor) -> Tensor:
    return bits & (_HALF - 1)


def high_half(bits: Tensor) -> Tensor:
    return _shift_right(bits, 16)


def third_half(bits: Tensor) -> Tensor:
    """Derive 16 more bits, to round a third number beside the two that use the low and high half."""
    return high_half(bits * (0x9E3779B1 - (1 << 32)))


def uniform(half: Tensor) -> Tensor:
    """Map 16 bits to a number in (0, 1)."""
    return (half.float() + 0.5) * (1.0 / _HALF)


def to_bf16(values: Tensor, half: Tensor) -> Tensor:
    """Round stochastically to one of the two bf16 neighbours; the mean over the random bits is the value."""
    raised = (values.view(torch.int32) + half) & ~(_HALF - 1)
    return torch.where(values.isfinite(), raised.view(torch.float32), values).to(torch.bfloat16)


def split_fp32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 losslessly into the nearest bf16 and the remaining 16 bits.

    Ties round away from zero: rounded to even they could leave 17 bits.
    """
    bits = values.view(torch.int32)
    upper = (bits + _HALF // 2) >> 16
    lower = bits - (upper << 16)
    # the sum wraps for some NaNs and would then be a number
    upper, lower = torch.where(values.isnan(), _NAN, upper), torch.where(values.isnan(), 0, lower)
    return upper.short().view(torch.bfloat16), lower.short()


def merge_fp32(upper: Tensor, lower: Tensor) -> Tensor:
    """Undo `split_fp32`."""
    return ((upper.view(torch.int16).int() << 16) + lower.int()).view(torch.float32)


def store(target: Tensor, new: Tensor, accepted: Tensor | None = None) -> None:
    """Overwrite the target unless the update was not accepted."""
    target.copy_(new if accepted is None else torch.where(accepted, new, target))
