"""Parse and print quantities: "4M tok", "500 steps", "2h", "80GiB"."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

JOULES_PER_KWH = 3.6e6
SpanUnit = Literal["tok", "steps", "s"]

_SCALES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_TIMES = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_BYTES = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_MAX_VALUE = 10**18
_MAX_CHARACTERS = 64
_MAX_EXPONENT = 99

_NUMBER = r"(\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_COUNT = re.compile(rf"{_NUMBER}\s*([kKMBGT]?)\s*(tok|tokens?|steps?)")
_TIME = re.compile(rf"{_NUMBER}\s*({'|'.join(_TIMES)})")
_SIZE = re.compile(rf"{_NUMBER}\s*({'|'.join(_BYTES)})")


@dataclass(frozen=True)
class Span:
    """An amount of training, in tokens, optimizer steps or seconds of wall time."""

    amount: int
    unit: SpanUnit

    def __str__(self) -> str:
        if self.unit == "s":
            name = next(n for n in ("d", "h", "min", "s") if self.amount % _TIMES[n] == 0)
            return f"{self.amount // _TIMES[name]}{name}"
        exact = (s for s in ("T", "B", "M", "k") if self.amount and self.amount % _SCALES[s] == 0)
        suffix = next(exact, "")
        return f"{self.amount // _SCALES[suffix]}{suffix} {self.unit}"

    def in_tokens(self, tokens_per_step: int) -> int:
        if self.unit == "s":
            raise ValueError(f"{self} is wall time: it has no token count")
        return self.amount * (tokens_per_step if self.unit == "steps" else 1)


def parse_span(text: str) -> Span:
    text = _short(text)
    if match := _COUNT.fullmatch(text):
        number, scale, word = match.groups()
        return Span(_whole(number, _SCALES[scale], text), "steps" if word.startswith("step") else "tok")
    if match := _TIME.fullmatch(text):
        return Span(_whole(match[1], _TIMES[match[2]], text), "s")
    raise ValueError(f"'{text}' is not a quantity of tokens, steps or time")


def parse_bytes(text: str) -> int:
    text = _short(text)
    if match := _SIZE.fullmatch(text):
        return _whole(match[1], _BYTES[match[2]], text)
    raise ValueError(f"'{text}' is not a size like '80GiB' or '500MB'")


def _short(text: str) -> str:
    text = text.strip()
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"'{text[:20]}...' is too long for a quantity ({len(text):,} characters)")
    return text


def _whole(number: str, scale: int, text: str) -> int:
    digits, _, exponent = number.replace("_", "").lower().partition("e")
    # clamped, because the power of 1e99999999 has a hundred million digits
    power = max(-_MAX_EXPONENT, min(int(exponent or 0), _MAX_EXPONENT))
    value = Fraction(digits) * scale * Fraction(10) ** power
    if value.denominator != 1:
        raise ValueError(f"'{text}' is not a whole number of its unit")
    if value > _MAX_VALUE:
        raise ValueError(f"'{text}' is too large (at most 1e18)")
    return int(value)


def human_count(n: float) -> str:
    """1234567 -> '1.23M'."""
    for suffix in ("T", "B", "M", "k"):
        if abs(n) >= 0.9995 * _SCALES[suffix]:
            return f"{n / _SCALES[suffix]:.3g}{suffix}"
    return f"{n:.3g}"


def human_bytes(n: float) -> str:
    for suffix in ("TiB", "GiB", "MiB", "KiB"):
        if n >= _BYTES[suffix]:
            return f"{n / _BYTES[suffix]:.1f} {suffix}"
    return f"{n:.0f} B"


def human_time(seconds: float) -> str:
    """75 -> '1:15', 7325 -> '2:02:05'."""
    minutes, s = divmod(round(seconds), 60)
    h, m = divmod(minutes, 60)
    return f"{h}:{m:02d}:{s:02d}" if h else f"{m}:{s:02d}"


def counted(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
