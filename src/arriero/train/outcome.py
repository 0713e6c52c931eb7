"""What a run has to show for itself so far; what of it outlives a restart."""

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_REMEMBERED = (
    "steps",
    "tokens",
    "seconds",
    "first_loss",
    "last_loss",
    "first_eval_loss",
    "last_eval_loss",
)


@dataclass
class Outcome:
    """`seconds` are those of all processes that trained what is kept."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    model: Path | None = None
    rates: list[float] = field(default_factory=list)

    def saw(self, loss: float, tokens_per_s: float) -> None:
        """The loss of a skipped update may not be finite, and is not the run's."""
        self.rates.append(tokens_per_s)
        if math.isfinite(loss):
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss = loss

    @property
    def trained(self) -> bool:
        """False where there was nothing left to do."""
        return bool(self.rates)

    @property
    def tokens_per_s(self) -> float:
        """The median of the logged rates: the first step, compilation and evaluation do not blur it."""
        return statistics.median(self.rates[1:] or self.rates)

    def describe(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["rates"]
        return fields | {"tokens_per_s": self.tokens_per_s, "model": self.model and str(self.model)}

    def remembered(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _REMEMBERED}

    @staticmethod
    def recalled(state: dict[str, Any]) -> "Outcome":
        return Outcome(**{name: state[name] for name in _REMEMBERED})
