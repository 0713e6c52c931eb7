"""What an optimizer remembers about a parameter, in 32, 16 or 8 bits an element.

Eight bits hold the place of an element on a scale between zero and the largest of its block of 256. The
places lie denser towards zero: an Adam step divides by the root of the second moment, so small ones count.
While training they are rounded by chance, without which a decay of 0.1 % a step would always be lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from arriero.train.optim.rounding import chance, to_bf16
from arriero.train.optim.weight import store

BLOCK = 256


class Format(Protocol):
    """`read` undoes `write`; without random bits `write` takes the nearest, and undoes `read` to the bit."""

    @property
    def rounds(self) -> bool: ...

    def empty(self, count: int, device: torch.device) -> tuple[Tensor, ...]: ...

    def read(self, stored: Sequence[Tensor], count: int) -> Tensor: ...

    def write(self, values: Tensor, half: Tensor | None) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Plain:
    dtype: torch.dtype

    @property
    def rounds(self) -> bool:
        return self.dtype != torch.float32

    def empty(self, count: int, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(count, dtype=self.dtype, device=device),)

    def read(self, stored: Sequence[Tensor], count: int) -> Tensor:
        return stored[0].float()

    def write(self, values: Tensor, half: Tensor | None) -> tuple[Tensor, ...]:
        if half is None or not self.rounds:
            return (values.to(self.dtype),)
        return (to_bf16(values, half),)


@dataclass(frozen=True)
class Blocks:
    """Element = largest of its block x (level(code) / top level) ** power, with its sign.

    With no mantissa bits level(code) is the code itself; else the code is a small floating-point number.
    """

    signed: bool
    mantissa: int
    power: int

    @property
    def rounds(self) -> bool:
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
        values = _raised(self._level(codes.abs()) / self._top_level, self.power) * largest
        return torch.where(codes < 0, -values, values).flatten()[:count]

    def write(self, values: Tensor, half: Tensor | None) -> tuple[Tensor, ...]:
        blocks = _in_blocks(values)
        sizes = blocks.abs()
        largest = sizes.amax(dim=1, keepdim=True)
        share = sizes / torch.where(largest > 0, largest, 1.0)
        place = _rooted(share, self.power) * self._top_level
        codes = self._code_below(place).clamp(max=self.top - 1)
        below, above = self._level(codes), self._level(codes + 1)
        if half is None:
            up = place - below >= above - place
        else:
            low, high = _raised(below, self.power), _raised(above, self.power)
            up = chance(_in_blocks(half)) * (high - low) < _raised(place, self.power) - low
        # the largest keeps its place whatever the division left of it: reading must find it again
        codes = torch.where(sizes == largest, self.top, codes + up.int())
        if not self.signed:
            codes = codes.clamp(min=1)  # a root of zero would make a step without bound
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

    def _code_below(self, place: Tensor) -> Tensor:
        if not self.mantissa:
            return place.floor().int()
        one = 1 << self.mantissa
        normal = (place.view(torch.int32) >> (23 - self.mantissa)) - ((126 + self.mantissa) << self.mantissa)
        return torch.where(place >= one, normal, place.floor().int())


def _in_blocks(flat: Tensor) -> Tensor:
    missing = -flat.shape[0] % BLOCK
    return (F.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)


def _raised(x: Tensor, power: int) -> Tensor:
    while power > 1:
        x, power = x * x, power // 2
    return x


def _rooted(x: Tensor, power: int) -> Tensor:
    while power > 1:
        x, power = x.sqrt(), power // 2
    return x


SIGNED: dict[str, Format] = {
    "fp32": Plain(torch.float32),
    "bf16": Plain(torch.bfloat16),
    "int8": Blocks(signed=True, mantissa=0, power=2),
    "float8": Blocks(signed=True, mantissa=3, power=1),
}
UNSIGNED: dict[str, Format] = {
    "fp32": Plain(torch.float32),
    "bf16": Plain(torch.bfloat16),
    "int8": Blocks(signed=False, mantissa=0, power=4),
    "float8": Blocks(signed=False, mantissa=4, power=2),
}


class Moment:
    """One remembered tensor of one parameter: as many elements as this rank holds of it."""

    def __init__(self, held: Format, like: Tensor) -> None:
        self.format = held
        self._shape = like.shape
        self.stored = held.empty(like.numel(), like.device)

    def values(self) -> Tensor:
        """The stored numbers themselves where they are plain; eight bits are read into fp32."""
        if isinstance(self.format, Plain):
            return self.stored[0].view(self._shape)
        return self.format.read(self.stored, self._shape.numel()).view(self._shape)

    def load(self, values: Tensor) -> None:
        self.keep(self.format.write(values.to(self.stored[0].device, torch.float32).flatten(), None))

    def keep(self, written: Sequence[Tensor], accepted: Tensor | None = None) -> None:
        for mine, new in zip(self.stored, written, strict=True):
            store(mine, new, accepted)
