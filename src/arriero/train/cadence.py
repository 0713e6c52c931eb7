"""When something that happens every so often is due."""

import time
from typing import Literal

from arriero.units import Span


class Cadence:
    """Due whenever a whole period of tokens, steps or seconds has been completed."""

    def __init__(self, every: Span | Literal[False], tokens_per_step: int) -> None:
        self._every = every
        self._step = tokens_per_step
        self._last = time.monotonic()

    def due(self, tokens: int) -> bool:
        """Asked once after each step, with the tokens seen so far."""
        if not self._every:
            return False
        if self._every.unit == "s":
            if time.monotonic() - self._last < self._every.amount:
                return False
            self._last = time.monotonic()
            return True
        period = self._every.in_tokens(self._step)
        return tokens // period > (tokens - self._step) // period
