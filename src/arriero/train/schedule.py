"""Learning-rate schedules, and the intervals of evaluations and checkpoints."""

import math
from collections.abc import Callable
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
        """Return the fraction of the peak for a step of `step` tokens after `tokens` tokens."""
        return _SHAPES[self.kind](self, tokens, step)


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


def _warmup(shape: Shape, tokens: int, step: int) -> float:
    """Rise linearly; the step that completes the warm-up has the full rate, and no step has rate zero."""
    done = tokens + step
    return min(1.0, done / shape.warmup) if shape.warmup else 1.0


def _after_warmup(shape: Shape, tokens: int, step: int) -> float:
    """Return 0 at the end of the warm-up and 1 at the last step."""
    done = tokens + step
    return min(1.0, max(0.0, (done - shape.warmup) / max(1, shape.horizon - shape.warmup)))


def _constant(shape: Shape, tokens: int, step: int) -> float:
    return _warmup(shape, tokens, step)


def _linear(shape: Shape, tokens: int, step: int) -> float:
    return _warmup(shape, tokens, step) * (1 - (1 - shape.floor) * _after_warmup(shape, tokens, step))


def _cosine(shape: Shape, tokens: int, step: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * _after_warmup(shape, tokens, step)))
    return _warmup(shape, tokens, step) * (shape.floor + (1 - shape.floor) * cosine)


def _wsd(shape: Shape, tokens: int, step: int) -> float:
    left = (shape.horizon - tokens - step) / max(1, shape.decay)
    return _warmup(shape, tokens, step) * (shape.floor + (1 - shape.floor) * min(1.0, max(0.0, left)))


def _frontier(shape: Shape, tokens: int, step: int) -> float:
    """frontier-torchtitan: (s + 1)/(w + 1), then linear to zero one step after the last."""
    if tokens < shape.warmup:
        return (tokens + step) / (shape.warmup + step)
    passed = (tokens - shape.warmup) / max(1, shape.horizon - shape.warmup)
    return max(shape.floor, 1 - passed)


def _fms(shape: Shape, tokens: int, _: int) -> float:
    """fms-fsdp: the smaller of a quadratic warm-up and a cosine that starts at token 0."""
    left = 1 - min(tokens, shape.warmup) / shape.warmup if shape.warmup else 0.0
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, tokens / shape.horizon)))
    return min(1 - left**2, shape.floor + (1 - shape.floor) * cosine)


def _fms_annealing(shape: Shape, tokens: int, _: int) -> float:
    return max(shape.floor, 1 - tokens / shape.horizon)


_SHAPES: dict[str, Callable[[Shape, int, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "frontier": _frontier,
    "fms": _fms,
    "fms-annealing": _fms_annealing,
}


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
