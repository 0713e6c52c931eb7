"""Phases of a run, and the mapping between its steps, tokens and samples.

A phase may change the batch, the sequence length and the peak learning rate. Steps, tokens and samples count
from the beginning of the run, over all phases.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arriero.units import Span

if TYPE_CHECKING:
    from arriero.config.schema import DataSection, RunConfig, TrainSection


@dataclass(frozen=True)
class Phase:
    """A part of a run. `step`, `tokens` and `sample` are counts at its start; `lr` None is `optim.lr`."""

    step: int
    tokens: int
    sample: int
    batch: int
    seq_len: int
    lr: float | None = None

    @property
    def sequences(self) -> int:
        return self.batch // self.seq_len


class Timeline:
    """The phases of a run in order; the first begins at step 0."""

    def __init__(self, data: "DataSection", train: "TrainSection") -> None:
        self.phases = [Phase(0, 0, 0, train.batch.amount, data.seq_len)]
        for section in data.phases:
            last = self.phases[-1]
            step = self.steps_of(section.at)
            passed = step - last.step
            self.phases.append(
                Phase(
                    step,
                    last.tokens + passed * last.batch,
                    last.sample + passed * last.sequences,
                    section.batch.amount if section.batch else last.batch,
                    section.seq_len or last.seq_len,
                    section.lr or last.lr,
                )
            )

    @staticmethod
    def of(config: "RunConfig") -> "Timeline":
        return Timeline(config.data, config.train)

    def at(self, step: int) -> Phase:
        """Return the phase of the next step after `step` steps."""
        return self._phase(step, lambda phase: phase.step)

    def at_sample(self, sample: int) -> Phase:
        return self._phase(sample, lambda phase: phase.sample)

    def tokens_after(self, steps: int) -> int:
        phase = self.at(steps)
        return phase.tokens + (steps - phase.step) * phase.batch

    def samples_after(self, steps: int) -> int:
        phase = self.at(steps)
        return phase.sample + (steps - phase.step) * phase.sequences

    def steps_before(self, sample: int) -> int:
        """Return the number of complete steps before a sample."""
        phase = self.at_sample(sample)
        return phase.step + (sample - phase.sample) // phase.sequences

    def steps_of(self, span: Span) -> int:
        """Return the steps of a span that begins with the run, rounded up."""
        if span.unit == "steps":
            return span.amount
        phase = self._phase(span.in_tokens(1), lambda phase: phase.tokens)
        return phase.step - (phase.tokens - span.amount) // phase.batch

    def tokens_of(self, span: Span) -> int:
        """Return the tokens of a span that begins with the run."""
        return self.tokens_after(span.amount) if span.unit == "steps" else span.in_tokens(1)

    def until(self, steps: int) -> list[Phase]:
        """Return the phases of the first `steps` steps."""
        return [phase for phase in self.phases if phase.step < max(steps, 1)]

    def _phase(self, value: int, key: Callable[[Phase], int]) -> Phase:
        return self.phases[max(1, bisect_right(self.phases, value, key=key)) - 1]


def total_steps(config: "RunConfig") -> int | None:
    """Return the number of steps of a run, or None if its horizon is wall time."""
    return None if config.train.horizon.unit == "s" else Timeline.of(config).steps_of(config.train.horizon)


def config_of(config: "RunConfig", phase: Phase) -> "RunConfig":
    """Return the config of a run that consists of this phase only."""
    data = config.data.model_copy(update={"seq_len": phase.seq_len, "phases": ()})
    train = config.train.model_copy(update={"batch": Span(phase.batch, "tok")})
    return config.model_copy(update={"data": data, "train": train})
