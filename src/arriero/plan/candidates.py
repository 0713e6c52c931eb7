"""The answer of the planner as data: candidates with time and memory, and why others were rejected."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from arriero.config.fields import ActivationCheckpointing
from arriero.config.schema import RunConfig
from arriero.plan.blocks import Work
from arriero.plan.hardware import Cluster, Machine
from arriero.plan.layout import AXES, Layout
from arriero.plan.resolve import Resolved, resolve
from arriero.plan.timing import StepTime

Sync = Literal["last", "each"]
# a simpler layout is preferred if it is slower by less than this share per axis
_PER_AXIS = 0.01


class Choice(NamedTuple):
    """Everything that a candidate decides."""

    layout: Layout
    schedule: str
    stages_per_rank: int
    reshard: Any
    sync: Sync
    checkpointing: ActivationCheckpointing
    micro_batch: int

    def __str__(self) -> str:
        parts = [str(self.layout)]
        if self.layout.pp > 1:
            parts.append(self.schedule + (f" x {self.stages_per_rank}" if self.stages_per_rank > 1 else ""))
        if self.layout.uses_fsdp and self.layout.pp == 1 and self.reshard == "never":
            parts.append("ZeRO-2")
        parts += ["sync each"] if self.sync == "each" else []
        parts.append(f"micro-batch {self.micro_batch}")
        parts += [] if self.checkpointing.kind == "none" else [f"checkpointing {self.checkpointing}"]
        return ", ".join(parts)

    def applied(self, config: RunConfig) -> RunConfig:
        """Return the run with the degrees and settings of this choice written out."""
        layout, pipeline = self.layout, self.layout.pp > 1
        parallel = {axis: getattr(layout, axis) for axis in AXES}
        parallel |= {"reshard": self.reshard, "sync": self.sync}
        if pipeline:
            parallel |= {"schedule": self.schedule, "stages_per_rank": self.stages_per_rank}
        updates = {
            "parallel": parallel,
            "train": {"micro_batch": self.micro_batch},
            "memory": {"activation_checkpointing": self.checkpointing},
        }
        sections = {name: getattr(config, name).model_copy(update=update) for name, update in updates.items()}
        return config.model_copy(update=sections)


@dataclass(frozen=True)
class Candidate:
    """A choice with its predicted time and memory; `free` is the memory it may use, in bytes.

    `parts` is what lives at the peak, by name; it is known for candidates that `resolve` has checked.
    """

    choice: Choice
    work: Work
    time: StepTime
    memory: int
    free: int
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def margin(self) -> float:
        """The share of the free memory that stays unused."""
        return 1 - self.memory / self.free

    @property
    def rank(self) -> tuple[float, int]:
        """The key of the ranking: seconds of a step, with a small penalty for each axis beside data."""
        layout = self.choice.layout
        axes = (
            sum(degree > 1 for degree in (layout.tp, layout.cp, layout.pp)) + (layout.dp_replicate > 1) / 10
        )
        return self.time.seconds * (1 + _PER_AXIS * axes), self.memory


class Rejection(NamedTuple):
    """Why some candidates were rejected: how many, and one of them."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class Constraint:
    """A condition on a degree; `label` is how the user wrote it."""

    label: str
    axis: str
    degree: int
    is_maximum: bool = False

    def allows(self, layout: Layout) -> bool:
        degree = getattr(layout, self.axis)
        return degree <= self.degree if self.is_maximum else degree == self.degree


@dataclass(frozen=True)
class Plan:
    """The ranked candidates of a run on a cluster, the fastest first."""

    config: RunConfig
    cluster: Cluster
    machine: Machine
    devices: int
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    considered: int
    used: Mapping[str, Collection[str]]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def best_per_layout(self) -> list[Candidate]:
        """Return the best candidate of each layout, the fastest first."""
        found: dict[Layout, Candidate] = {}
        for candidate in self.candidates:
            found.setdefault(candidate.choice.layout, candidate)
        return list(found.values())

    def resolved(self, candidate: Candidate | None = None) -> Resolved:
        """Return the resolved run of a candidate, the best one unless given."""
        chosen = (candidate or self.best).choice
        return resolve(chosen.applied(self.config), self.machine, self.devices)
