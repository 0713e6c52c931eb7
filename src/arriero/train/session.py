"""A run, ready to start: all the loop needs, and what was decided on the way."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from arriero import __version__
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline, total_steps
from arriero.data.order.loader import Batch, Loader
from arriero.data.order.order import Stream
from arriero.data.order.streams import SourceForecast
from arriero.data.tokens.tokenizer import Separators, Tokenizer
from arriero.model.language_model import LanguageModel
from arriero.model.spec import ModelSpec, flops_per_token
from arriero.parallel.mesh import Mesh
from arriero.plan.resolve import Decision, Resolved
from arriero.train.cadence import Cadence
from arriero.train.device import Device
from arriero.train.evaluate import Evaluator
from arriero.train.hooks import Hooks
from arriero.train.optim import Optimizer
from arriero.train.outcome import Outcome
from arriero.train.passes import Passes
from arriero.train.saving import Saver
from arriero.train.schedule import Rates


@dataclass(frozen=True)
class Session:
    """`parts` are this rank's stages of the model: one, the whole of it, without a pipeline.

    `outcome` is what earlier processes of the run reached.
    """

    config: RunConfig
    resolved: Resolved
    spec: ModelSpec
    device: Device
    compute: torch.dtype
    mesh: Mesh
    parts: Sequence[LanguageModel]
    phase_passes: Sequence[Passes]
    optimizer: Optimizer
    schedule: Rates
    stream: Stream
    outlooks: Sequence[SourceForecast]
    loader: Loader
    evaluator: Evaluator | None
    evaluation: Cadence
    tokenizer: Tokenizer
    separators: Separators
    most_steps: int | None
    run_dir: Path
    hooks: Hooks
    decisions: Sequence[Decision]
    remarks: Sequence[str]
    saver: Saver
    outcome: Outcome

    @property
    def timeline(self) -> Timeline:
        return self.schedule.timeline

    @property
    def passes(self) -> Passes:
        """Those of the first phase, which also evaluate."""
        return self.phase_passes[0]

    def passes_at(self, step: int) -> Passes:
        return self.phase_passes[self.timeline.phases.index(self.timeline.at(step))]

    @cached_property
    def total_steps(self) -> int | None:
        """None when the end is a wall time."""
        return total_steps(self.config)

    @cached_property
    def total_tokens(self) -> int | None:
        return None if self.total_steps is None else self.timeline.tokens_after(self.total_steps)

    @property
    def timed(self) -> bool:
        config = self.config
        spans = (config.train.horizon, config.eval.every, config.checkpoint.every)
        return any(span and span.unit == "s" for span in spans)

    def is_due(self, cadence: Cadence, outcome: Outcome, now: float) -> bool:
        batch = self.timeline.at(outcome.steps - 1).batch
        return cadence.due(outcome.steps, outcome.tokens, batch, now)

    def seconds_since(self, start: float) -> float:
        """By the first rank's clock where time decides anything: ranks must decide alike."""
        seconds = time.monotonic() - start
        return self.mesh.agreed(seconds) if self.timed else seconds

    def finished(self, tokens: int, seconds: float) -> bool:
        """At the horizon; a run by wall time also where its data may not be read further."""
        if self.total_tokens is not None:
            return tokens >= self.total_tokens
        exhausted = self.most_steps is not None and tokens >= self.timeline.tokens_after(self.most_steps)
        return exhausted or seconds >= self.config.train.horizon.amount

    @property
    def peak_flops(self) -> float | None:
        """Of all ranks. Known for bf16 only: dividing fp32 work by it would make a false MFU."""
        peak = self.device.bf16_peak_flops if self.compute == torch.bfloat16 else None
        return peak * self.mesh.world.size if peak is not None else None

    def flops(self, batch: Batch) -> float:
        """The honest work of a batch; under a document mask a token attends to its own document alone."""
        attended = None
        if batch.positions_BT is not None:
            attended = float((2 * batch.positions_BT + 1).double().mean())
        width = batch.tokens_BT.shape[1]
        return batch.real_tokens * flops_per_token(self.spec, width, attended=attended)

    def describe(self) -> dict[str, Any]:
        return {
            "run": self.config.run.name,
            "device": self.device.name,
            "ranks": self.mesh.world.size,
            "layout": str(self.mesh.layout),
            "parameters": self.spec.parameters,
            "data": self.loader.state()["fingerprint"],
            "versions": {
                "arriero": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
