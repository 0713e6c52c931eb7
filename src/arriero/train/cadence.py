"""When something that happens every so often is due."""

from typing import Literal

from arriero.units import Span


class Cadence:
    """Due whenever a whole period of tokens, steps or seconds has been completed."""

    def __init__(self, every: Span | Literal[False]) -> None:
        self._every = every
        self._begun = 0.0

    def restart(self, now: float) -> None:
        """A period in seconds begins now: what is repeated does not count into the time between."""
        self._begun = now

    def due(self, steps: int, tokens: int, batch: int, now: float) -> bool:
        """Called once after each step, which read `batch` of the `tokens`; `now` is in seconds."""
        if not self._every:
            return False
        if self._every.unit == "s":
            return now - self._begun >= self._every.amount
        if self._every.unit == "steps":
            return steps % self._every.amount == 0
        return tokens // self._every.amount > (tokens - batch) // self._every.amount
