"""Learning-rate shapes: pure functions of the tokens seen before a step. Peak = 1."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from arriero.config.schema import ScheduleSection, TrainSection


@dataclass(frozen=True)
class Shape:
    """Where a schedule's parts lie, in tokens."""

    kind: str
    step: int
    warmup: int
    horizon: int
    floor: float
    decay: int

    def at(self, tokens: int) -> float:
        return _SHAPES[self.kind](self, tokens)


def make_shape(schedule: ScheduleSection, train: TrainSection) -> Shape:
    step = train.batch.amount
    end = schedule.horizon or train.horizon
    horizon = end.in_tokens(step) if end.unit != "s" else 0
    warmup = schedule.warmup.in_tokens(step) if schedule.warmup else 0
    if schedule.kind == "fms" and schedule.warmup is None:
        warmup = min(2000 * step, horizon // 20)
    decay = schedule.decay.in_tokens(step) if schedule.decay else horizon // 5
    floor = (
        schedule.floor if schedule.floor is not None else {"cosine": 0.1, "fms": 0.1}.get(schedule.kind, 0.0)
    )
    return Shape(schedule.kind, step, warmup, horizon, floor, decay)


def _warmup(shape: Shape, tokens: int) -> float:
    """The step that completes the warm-up is the first at full rate; no step has rate zero."""
    done = tokens + shape.step
    return min(1.0, done / shape.warmup) if shape.warmup else 1.0


def _after_warmup(shape: Shape, tokens: int) -> float:
    """0 at the end of the warm-up, 1 at the last step."""
    done = tokens + shape.step
    return min(1.0, max(0.0, (done - shape.warmup) / max(1, shape.horizon - shape.warmup)))


def _constant(shape: Shape, tokens: int) -> float:
    return _warmup(shape, tokens)


def _linear(shape: Shape, tokens: int) -> float:
    return _warmup(shape, tokens) * (1 - (1 - shape.floor) * _after_warmup(shape, tokens))


def _cosine(shape: Shape, tokens: int) -> float:
    swing = 0.5 * (1 + math.cos(math.pi * _after_warmup(shape, tokens)))
    return _warmup(shape, tokens) * (shape.floor + (1 - shape.floor) * swing)


def _wsd(shape: Shape, tokens: int) -> float:
    left = (shape.horizon - tokens - shape.step) / max(1, shape.decay)
    return _warmup(shape, tokens) * (shape.floor + (1 - shape.floor) * min(1.0, max(0.0, left)))


def _frontier(shape: Shape, tokens: int) -> float:
    """frontier-torchtitan: (s + 1)/(w + 1), then a line that reaches zero one step past the last."""
    if tokens < shape.warmup:
        return (tokens + shape.step) / (shape.warmup + shape.step)
    passed = (tokens - shape.warmup) / max(1, shape.horizon - shape.warmup)
    return max(shape.floor, 1 - passed)


def _fms(shape: Shape, tokens: int) -> float:
    """fms-fsdp: a quadratic warm-up under a cosine that starts at token 0."""
    rest = 1 - min(tokens, shape.warmup) / shape.warmup if shape.warmup else 0.0
    swing = 0.5 * (1 + math.cos(math.pi * min(1.0, tokens / shape.horizon)))
    return min(1 - rest**2, shape.floor + (1 - shape.floor) * swing)


def _fms_annealing(shape: Shape, tokens: int) -> float:
    return max(shape.floor, 1 - tokens / shape.horizon)


_SHAPES: dict[str, Callable[[Shape, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "frontier": _frontier,
    "fms": _fms,
    "fms-annealing": _fms_annealing,
}
