"""Which blocks forget their activations and compute them again: what people write, and what it means."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, cast

Kind = Literal["auto", "none", "full", "selective", "attention", "every", "fraction", "budget"]

_AMOUNT = re.compile(r"-?\d{1,9}/\d{1,9}|-?\d{0,9}\.?\d{1,9}")
_HOW = (
    "write it like 'auto', 'none', 'full', 'selective', 'attention', 'every:2', "
    "'fraction:1/3' or 'budget:0.5'"
)
_WORDS = ("auto", "none", "full", "selective", "attention")


@dataclass(frozen=True)
class Remat:
    """`amount` is the K of every:K, the P of fraction:P, the B of budget:B; one for the other kinds."""

    kind: Kind = "none"
    amount: Fraction = Fraction(1)

    def __str__(self) -> str:
        if self.kind in _WORDS:
            return self.kind
        return f"{self.kind}:{float(self.amount) if self.kind == 'budget' else self.amount}"

    @property
    def keeps_some(self) -> bool:
        """Of what a block computes, where others keep all or nothing."""
        return self.kind in ("selective", "attention")

    def blocks(self, layers: int) -> frozenset[int]:
        """Those recomputed, wholly or in part, counted from 0 over the whole model, whatever the layout."""
        match self.kind:
            case "full" | "selective" | "attention":
                return frozenset(range(layers))
            case "every":
                return frozenset(range(int(self.amount) - 1, layers, int(self.amount)))
            case "fraction":
                return evenly(self.amount, layers)
            case "none" | "budget":
                return frozenset()
            case "auto":
                raise ValueError("'auto' must be resolved first")


def evenly(share: Fraction, layers: int) -> frozenset[int]:
    """Spread and centred: block i of 1..layers is taken when i * share reaches 1/2, 3/2, 5/2, ..."""
    taken, next_at = set(), Fraction(1, 2)
    for block in range(layers):
        if (block + 1) * share >= next_at:
            taken.add(block)
            next_at += 1
    return frozenset(taken)


def parse_remat(text: str) -> Remat:
    kind, colon, written = text.strip().partition(":")
    if kind in _WORDS and not colon:
        return Remat(cast(Kind, kind))
    if kind not in ("every", "fraction", "budget"):
        raise ValueError(f"'{text}' is no way to recompute; {_HOW}")
    amount = _amount(written.strip())
    if kind == "every" and (amount is None or amount < 1 or amount.denominator != 1):
        raise ValueError(f"'{text}' does not say every how many blocks; write it like 'every:2'")
    if kind == "budget" and (amount is None or not 0 <= amount <= 1):
        raise ValueError(f"'{text}' is no share of memory between 0 and 1; write it like 'budget:0.5'")
    if amount is None:
        raise ValueError(
            f"'{text}' is no share of the blocks; write it like 'fraction:1/3' or 'fraction:0.4'"
        )
    return Remat(cast(Kind, kind), amount)


def _amount(text: str) -> Fraction | None:
    if not _AMOUNT.fullmatch(text):
        return None
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None
