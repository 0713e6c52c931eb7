"""Which checkpoints may go."""

from collections.abc import Sequence
from typing import NamedTuple


class Mark(NamedTuple):
    step: int
    tokens: int


def to_delete(saved: Sequence[Mark], keep: int, period: int | None) -> list[int]:
    """Steps of all but the newest `keep` and the first after each whole `period` of tokens."""
    ordered = sorted(saved)
    gone, before = [], 0
    for number, mark in enumerate(ordered):
        stays_for_ever = period is not None and mark.tokens // period > before // period
        if number < len(ordered) - keep and not stays_for_ever:
            gone.append(mark.step)
        before = mark.tokens
    return gone
