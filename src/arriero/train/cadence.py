"""When something that happens every so often is due."""

from typing import Literal

from arriero.units import Span


class Cadence:
    """Due whenever a whole period of tokens, steps or seconds has been completed."""

    def __init__(self, every: Span | Literal[False], tokens_per_step: int) -> None:
        self._every = every
        self._step = tokens_per_step
        self._begun = 0.0

    def restart(self, now: float) -> None:
        """A period in seconds begins now: what is repeated does not count into the time between."""
        self._begun = now

    def due(self, tokens: int, now: float) -> bool:
        """Asked once after each step, with the tokens seen and the seconds gone so far."""
        if not self._every:
            return False
        if self._every.unit == "s":
            return now - self._begun >= self._every.amount
        period = self._every.in_tokens(self._step)
        return tokens // period > (tokens - self._step) // period
