"""Learning-rate schedules, and the intervals of evaluations and checkpoints."""

import math
from dataclasses import dataclass
from typing import Literal

from arriero.config.schema import RunConfig, ScheduleSection, TrainSection
from arriero.config.timeline import Timeline
from arriero.units import Span


@dataclass(frozen=True)
class Shape:
    """A schedule with its lengths in tokens."""

    kind: str
    warmup: int
    horizon: int
    floor: float
    decay: int

    def at(self, tokens: int, step: int) -> float:
        """Return the fraction of the peak for a step of `step` tokens after `tokens` tokens.

        The warm-up is linear: the step that completes it has the full rate, and no step has rate zero.
        """
        done = tokens + step
        # 0 at the end of the warm-up, and 1 at the last step
        passed = min(1.0, max(0.0, (done - self.warmup) / max(1, self.horizon - self.warmup)))
        match self.kind:
            case "linear":
                share = 1 - (1 - self.floor) * passed
            case "cosine":
                share = self._above_floor(_cosine(passed))
            case "wsd":
                share = self._above_floor(min(1.0, max(0.0, (self.horizon - done) / max(1, self.decay))))
            case "frontier":
                # frontier-torchtitan: (s + 1)/(w + 1), then linear to zero one step after the last
                if tokens < self.warmup:
                    return done / (self.warmup + step)
                return max(self.floor, 1 - (tokens - self.warmup) / max(1, self.horizon - self.warmup))
            case "fms":
                # fms-fsdp: the smaller of a quadratic warm-up and a cosine that starts at token 0
                left = 1 - min(tokens, self.warmup) / self.warmup if self.warmup else 0.0
                return min(1 - left**2, self._above_floor(_cosine(min(1.0, tokens / self.horizon))))
            case "fms-annealing":
                return max(self.floor, 1 - tokens / self.horizon)
            case _:
                share = 1.0
        return (min(1.0, done / self.warmup) if self.warmup else 1.0) * share

    def _above_floor(self, share: float) -> float:
        return self.floor + (1 - self.floor) * share


def _cosine(passed: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * passed))


def make_shape(schedule: ScheduleSection, train: TrainSection, timeline: Timeline) -> Shape:
    end = schedule.horizon or train.horizon
    horizon = timeline.tokens_of(end) if end.unit != "s" else 0
    warmup = timeline.tokens_of(schedule.warmup) if schedule.warmup else 0
    if schedule.kind == "fms" and schedule.warmup is None:
        warmup = min(timeline.tokens_after(2000), horizon // 20)
    decay = horizon // 5
    if schedule.decay:
        decay = schedule.decay.amount
        if schedule.decay.unit == "steps":
            decay = horizon - timeline.tokens_after(max(0, timeline.steps_of(end) - decay))
    floor = (
        schedule.floor if schedule.floor is not None else {"cosine": 0.1, "fms": 0.1}.get(schedule.kind, 0.0)
    )
    return Shape(schedule.kind, warmup, horizon, floor, decay)


class LearningRates:
    """The learning rate of each step of a run."""

    def __init__(self, config: RunConfig) -> None:
        self.timeline = Timeline.of(config)
        self._shape = make_shape(config.schedule, config.train, self.timeline)
        self._peak = config.optim.lr

    def at(self, step: int) -> float:
        """Return the learning rate of the step after `step` steps."""
        phase = self.timeline.at(step)
        return (phase.lr or self._peak) * self.fraction(step)

    def has_same_shape(self, other: "LearningRates") -> bool:
        return self._shape == other._shape

    def fraction(self, step: int) -> float:
        return self._shape.at(self.timeline.tokens_after(step), self.timeline.at(step).batch)


class Cadence:
    """An interval in tokens, steps or seconds, or none; due whenever a whole interval has passed."""

    def __init__(self, every: Span | Literal[False]) -> None:
        self._every = every
        self._start = 0.0

    def restart(self, now: float) -> None:
        """Start an interval in seconds now, so that the repeated work itself does not count."""
        self._start = now

    def is_due(self, steps: int, tokens: int, batch: int, now: float) -> bool:
        """Return whether the interval ends with this step, which read `batch` of the `tokens`."""
        if not self._every:
            return False
        if self._every.unit == "s":
            return now - self._start >= self._every.amount
        if self._every.unit == "steps":
            return steps % self._every.amount == 0
        return tokens // self._every.amount > (tokens - batch) // self._every.amount
