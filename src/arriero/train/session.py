"""A run that is ready to train: everything the training loop needs."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from arriero.model.layers import FusedQKVAttention
from arriero.model.spec import ModelSpec, Recompute, flops_per_token
from arriero.model.speculator.settings import training_flops
from arriero.parallel.mesh import Mesh
from arriero.parallel.precision import Float8Linear
from arriero.plan.recompute import recomputed
from arriero.plan.resolve import Decision, Resolved
from arriero.train.device import Device
from arriero.train.forward_backward import Evaluator, ForwardBackward
from arriero.train.guard import Guard
from arriero.train.hooks import Hooks
from arriero.train.model_state import ModelState
from arriero.train.optim.optimizer import Optimizer
from arriero.train.rundir import run_directory
from arriero.train.saving import Outcome, Saver
from arriero.train.schedule import Cadence, LearningRates


@dataclass(frozen=True)
class SessionData:
    """The data of a run. `max_steps` is how long it lasts if the epochs of a source are limited."""

    stream: Stream
    loader: Loader
    forecasts: Sequence[SourceForecast]
    tokenizer: Tokenizer
    separators: Separators
    max_steps: int | None


@dataclass(frozen=True)
class RunRecord:
    """What a run writes and reports. `outcome` starts with what earlier processes of the run reached.

    `new_weights`: the weights were replaced at the start, so they are evaluated before the first step.
    `began` is when the session was built, `nodes` the node of each rank.
    """

    hooks: Hooks
    saver: Saver
    decisions: Sequence[Decision]
    remarks: Sequence[str]
    outcome: Outcome
    new_weights: bool = False
    nodes: Sequence[str] = ()
    began: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Session:
    """`phase_passes` has one entry per phase of the data, `evaluation` the interval of evaluations."""

    resolved: Resolved
    device: Device
    compute: torch.dtype
    mesh: Mesh
    model: ModelState
    optimizer: Optimizer
    schedule: LearningRates
    phase_passes: Sequence[ForwardBackward]
    data: SessionData
    evaluator: Evaluator | None
    evaluation: Cadence
    guard: Guard
    record: RunRecord

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def spec(self) -> ModelSpec:
        return self.resolved.spec

    @property
    def run_dir(self) -> Path:
        return run_directory(self.config)

    @property
    def timeline(self) -> Timeline:
        return self.schedule.timeline

    @property
    def passes(self) -> ForwardBackward:
        """Return those of the first phase, which also evaluate."""
        return self.phase_passes[0]

    def passes_at(self, step: int) -> ForwardBackward:
        return self.phase_passes[self.timeline.phases.index(self.timeline.at(step))]

    @cached_property
    def total_steps(self) -> int | None:
        """Return the length of the run; None if it is a wall time."""
        return total_steps(self.config)

    @cached_property
    def total_tokens(self) -> int | None:
        return None if self.total_steps is None else self.timeline.tokens_after(self.total_steps)

    @property
    def eval_losses(self) -> dict[str, float]:
        """Return the last validation loss of each source, if there are several."""
        return self.evaluator.several if self.evaluator is not None else {}

    @property
    def is_timed(self) -> bool:
        config = self.config
        spans = (config.train.horizon, config.eval.every, config.checkpoint.every)
        return any(span and span.unit == "s" for span in spans)

    def is_due(self, cadence: Cadence, outcome: Outcome, now: float) -> bool:
        batch = self.timeline.at(outcome.steps - 1).batch
        return cadence.is_due(outcome.steps, outcome.tokens, batch, now)

    def seconds_since(self, start: float) -> float:
        """Return elapsed seconds: by rank 0's clock if an interval is a time, so that all ranks agree."""
        seconds = time.monotonic() - start
        return self.mesh.from_rank_0(seconds) if self.is_timed else seconds

    def is_finished(self, tokens: int, seconds: float) -> bool:
        """Return whether the horizon is reached; a run by wall time also ends with its data."""
        if self.total_tokens is not None:
            return tokens >= self.total_tokens
        last = self.data.max_steps
        exhausted = last is not None and tokens >= self.timeline.tokens_after(last)
        return exhausted or seconds >= self.config.train.horizon.amount

    @property
    def peak_flops(self) -> float | None:
        """Return the bf16 peak of all ranks; None for other precisions, whose MFU it would falsify."""
        peak = self.device.bf16_peak_flops if self.compute == torch.bfloat16 else None
        return peak * self.mesh.world.size if peak is not None else None

    def flops(self, batch: Batch, formula: str = "causal") -> float:
        """Return the FLOPs of a batch; with a document mask tokens attend inside their document."""
        attended = None
        if batch.positions_BT is not None:
            seen_BT = batch.positions_BT + 1
            attended = self.spec.mean_over_layers(
                lambda w: float((2 * (seen_BT if w is None else seen_BT.clamp(max=w)) - 1).double().mean())
            )
        again = self.recompute if formula == "hfu" else 0.0
        width = batch.tokens_BT.shape[1]
        each = flops_per_token(self.spec, width, formula, again, attended)
        if self.config.speculator.n_predict:
            each = training_flops(self.config.speculator, self.spec, each)
        return batch.real_tokens * each

    def hardware_flops(self, batch: Batch) -> float:
        """Return the FLOPs of a batch with what is recomputed; 0 where HFU is not reported."""
        return self.flops(batch, "hfu") if self.peak_flops is not None else 0.0

    @cached_property
    def recompute(self) -> Recompute:
        """Return the share of the forward pass that backward repeats."""
        modules = [module for part in self.model.parts for module in part.modules()]
        memory, seq_len = self.resolved.memory, self.config.data.seq_len // self.mesh.layout.cp
        return recomputed(
            self.spec,
            self.resolved.activation_checkpointing,
            self.resolved.compiled,
            fused_qkv=any(isinstance(module, FusedQKVAttention) for module in modules),
            float8=any(isinstance(module, Float8Linear) for module in modules),
            tiled=bool(memory.ffn_tile) and seq_len > memory.ffn_tile,
        )

    def describe(self) -> dict[str, Any]:
        return {
            "run": self.config.run.name,
            "device": self.device.name,
            "ranks": self.mesh.world.size,
            "layout": str(self.mesh.layout),
            "parameters": self.spec.parameters,
            "data": self.data.loader.state()["fingerprint"],
            "versions": {
                "arriero": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
