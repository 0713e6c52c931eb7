"""Number formats of the optimizer: stochastic rounding, split fp32 weights, and state in 32, 16 or 8 bits.

Stochastic rounding rounds up or down at random such that the mean is the exact value. Updates smaller than a
number format's resolution then add up instead of being lost. An fp32 weight may be split into a bf16 weight
and the rest of its bits.

An 8-bit element of the state is a code between zero and the largest magnitude of its block of 256 elements.
Codes are denser towards zero: an Adam step divides by the root of the second moment, so small values matter.
Rounded to nearest, a decay of 0.1 % per step would always be lost.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
_HALF = 1 << 16
_NAN = 0x7FC0


class Noise:
    """Random bits that are a function of (seed, step, name, shard).

    A resumed run draws the same bits, and ranks that hold the same shard of a parameter round it identically.
    The bits are computed where they are needed, inside fused kernels too, and never stored.
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


def store_all(targets: Sequence[Tensor], new: Sequence[Tensor], accepted: Tensor | None = None) -> None:
    for target, written in zip(targets, new, strict=True):
        store(target, written, accepted)


class Format(Protocol):
    """A number format of optimizer state.

    `read` undoes `write`. Without random bits `write` rounds to nearest and undoes `read` bit by bit.
    """

    @property
    def is_rounded(self) -> bool: ...

    def empty(self, count: int, device: torch.device) -> tuple[Tensor, ...]: ...

    def read(self, stored: Sequence[Tensor], count: int) -> Tensor: ...

    def write(self, values: Tensor, half: Tensor | None) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class PlainFormat:
    dtype: torch.dtype

    @property
    def is_rounded(self) -> bool:
        return self.dtype != torch.float32

    def empty(self, count: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(count, dtype=self.dtype, device=device),)

    def read(self, stored: Sequence[Tensor], count: int) -> Tensor:
        return stored[0].float()

    def write(self, values: Tensor, half: Tensor | None) -> tuple[Tensor, ...]:
        if half is None or not self.is_rounded:
            return (values.to(self.dtype),)
        return (to_bf16(values, half),)


@dataclass(frozen=True)
class BlockFormat:
    """8-bit format: element = sign x largest of its block x (level(code) / top level) ** power.

    Without mantissa bits level(code) is the code itself; else the code is a small floating-point number.
    """

    signed: bool
    mantissa: int
    power: int

    @property
    def is_rounded(self) -> bool:
        return True

    @property
    def top(self) -> int:
        return 127 if self.signed else 255

    def empty(self, count: int, device: torch.device) -> tuple[Tensor, ...]:
        blocks = -(-count // BLOCK)
        codes = torch.zeros(blocks, BLOCK, dtype=torch.int8 if self.signed else torch.uint8, device=device)
        return codes, torch.zeros(blocks, 1, device=device)

    def read(self, stored: Sequence[Tensor], count: int) -> Tensor:
        codes, largest = stored
        codes = codes.int()
        values = _power(self._level(codes.abs()) / self._top_level, self.power) * largest
        return torch.where(codes < 0, -values, values).flatten()[:count]

    def write(self, values: Tensor, half: Tensor | None) -> tuple[Tensor, ...]:
        blocks = _to_blocks(values)
        sizes = blocks.abs()
        largest = sizes.amax(dim=1, keepdim=True)
        fraction = sizes / torch.where(largest > 0, largest, 1.0)
        level = _root(fraction, self.power) * self._top_level
        codes = self._code_below(level).clamp(max=self.top - 1)
        below, above = self._level(codes), self._level(codes + 1)
        if half is None:
            up = level - below >= above - level
        else:
            low, high = _power(below, self.power), _power(above, self.power)
            up = uniform(_to_blocks(half)) * (high - low) < _power(level, self.power) - low
        # division may round the largest down, and reading must find it again
        codes = torch.where(sizes == largest, self.top, codes + up.int())
        if not self.signed:
            codes = codes.clamp(min=1)  # dividing by the root of zero would make the step infinite
        codes = torch.where(sizes > 0, codes, 0)
        if self.signed:
            return torch.where(blocks < 0, -codes, codes).to(torch.int8), largest
        return codes.to(torch.uint8), largest

    @property
    def _top_level(self) -> float:
        if not self.mantissa:
            return float(self.top)
        exponent, fraction = divmod(self.top, 1 << self.mantissa)
        return float(((1 << self.mantissa) + fraction) << (exponent - 1))

    def _level(self, codes: Tensor) -> Tensor:
        if not self.mantissa:
            return codes.float()
        exponent, fraction = codes >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        whole = torch.where(exponent > 0, fraction + (1 << self.mantissa), fraction)
        return whole.float() * (((exponent - 1).clamp(min=0) + 127) << 23).view(torch.float32)

    def _code_below(self, level: Tensor) -> Tensor:
        if not self.mantissa:
            return level.floor().int()
        one = 1 << self.mantissa
        normal = (level.view(torch.int32) >> (23 - self.mantissa)) - ((126 + self.mantissa) << self.mantissa)
        return torch.where(level >= one, normal, level.floor().int())


def _to_blocks(flat: Tensor) -> Tensor:
    missing = -flat.shape[0] % BLOCK
    return (F.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


def _power(x: Tensor, power: int) -> Tensor:
    while power > 1:
        x, power = x * x, power // 2
    return x


def _root(x: Tensor, power: int) -> Tensor:
    while power > 1:
        x, power = x.sqrt(), power // 2
    return x


SIGNED: dict[str, Format] = {
    "fp32": PlainFormat(torch.float32),
    "bf16": PlainFormat(torch.bfloat16),
    "int8": BlockFormat(signed=True, mantissa=0, power=2),
    "float8": BlockFormat(signed=True, mantissa=3, power=1),
}
UNSIGNED: dict[str, Format] = {
    "fp32": PlainFormat(torch.float32),
    "bf16": PlainFormat(torch.bfloat16),
    "int8": BlockFormat(signed=False, mantissa=0, power=4),
    "float8": BlockFormat(signed=False, mantissa=4, power=2),
}


class Moment:
    """One state tensor of one parameter, as large as the parameter's local part."""

    def __init__(self, number_format: Format, like: Tensor) -> None:
        self.format = number_format
        self._shape = like.shape
        self.stored = number_format.empty(like.numel(), like.device)

    def values(self) -> Tensor:
        """Return the stored tensor itself if its format is plain, else an fp32 copy."""
        if isinstance(self.format, PlainFormat):
            return self.stored[0].view(self._shape)
        return self.format.read(self.stored, self._shape.numel()).view(self._shape)

    def load(self, values: Tensor) -> None:
        values = values.to(self.stored[0].device, torch.float32).flatten()
        store_all(self.stored, self.format.write(values, None))
