"""`bench compare`: two results of the same work, and whether they differ by more than their spread."""

from dataclasses import dataclass

from arriero.bench.result import Result, Timing
from arriero.errors import UserError


@dataclass(frozen=True)
class Comparison:
    """How many times as fast the second is: at the medians, and between the quartiles furthest apart."""

    ratio: float
    least: float
    most: float
    problem: str | None = None

    @property
    def verdict(self) -> str:
        if self.problem:
            return f"cannot be told: {self.problem}"
        if self.least > 1:
            return "the second is faster"
        if self.most < 1:
            return "the first is faster"
        return "no difference beyond the spread"


def compare(first: Result, second: Result) -> Comparison:
    differing = [f"{name} is {a} and {b}" for name, a, b in first.work.differences(second.work)]
    if differing:
        raise UserError(
            f"these are different work: {'; '.join(differing)}", "compare results of the same work alone"
        )
    return compared(first.timing, second.timing)


def compared(first: Timing, second: Timing) -> Comparison:
    return Comparison(
        first.median_ms / second.median_ms,
        first.lower_quartile_ms / second.upper_quartile_ms,
        first.upper_quartile_ms / second.lower_quartile_ms,
        _no_spread(first, second),
    )


def _no_spread(*timings: Timing) -> str | None:
    if any(timing.warmup_steps == 0 for timing in timings):
        return "a first step, in which blocks are compiled, was timed"
    if any(len(timing.step_ms) == 1 for timing in timings):
        return "one step has no spread"
    return None
