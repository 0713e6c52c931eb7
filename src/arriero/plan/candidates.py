"""The answer of the planner as data: candidates with time and memory, and why others were rejected."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from arriero.config.fields import ActivationCheckpointing
from arriero.config.schema import RunConfig
from arriero.plan.arithmetic import described, handicap
from arriero.plan.blocks import Work
from arriero.plan.hardware import Cluster, Machine
from arriero.plan.layout import AXES, Layout
from arriero.plan.memory import Choices
from arriero.plan.resolve import Resolved, resolve
from arriero.plan.timing import StepTime


class Choice(NamedTuple):
    """Everything that a candidate decides.

    `smaller_chunk` is a loss chunk below the default, `arithmetic` are keys that the run file sets to "auto".
    """

    layout: Layout
    schedule: str
    stages_per_rank: int
    choices: Choices
    micro_batch: int
    smaller_chunk: int | None = None
    arithmetic: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        layout, choices = self.layout, self.choices
        parts = [str(layout)]
        if layout.pp > 1:
            parts.append(self.schedule + (f" x {self.stages_per_rank}" if self.stages_per_rank > 1 else ""))
        if layout.fsdp > 1 and layout.pp == 1 and choices.reshard is False:
            parts.append("gathered once")
        parts += ["sync each"] if choices.sync == "each" else []
        parts.append(f"micro-batch {self.micro_batch}")
        parts += [] if choices.checkpointing.kind == "none" else [f"checkpointing {choices.checkpointing}"]
        parts += [f"loss chunk {self.smaller_chunk}"] if self.smaller_chunk else []
        return ", ".join([*parts, *described(self.arithmetic)])

    @property
    def checkpointing(self) -> ActivationCheckpointing:
        return self.choices.checkpointing

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the run file that this choice sets, with their values."""
        layout, choices = self.layout, self.choices
        keys: dict[str, Any] = {f"parallel.{axis}": getattr(layout, axis) for axis in AXES}
        if layout.pp > 1:
            keys |= {"parallel.schedule": self.schedule, "parallel.stages_per_rank": self.stages_per_rank}
        if layout.uses_fsdp:
            named = "always" if choices.reshard else "never"
            keys["parallel.reshard"] = named if isinstance(choices.reshard, bool) else choices.reshard
        keys |= {"parallel.sync": choices.sync, "train.micro_batch": self.micro_batch}
        keys |= {"memory.activation_checkpointing": choices.checkpointing, **dict(self.arithmetic)}
        return keys | ({"memory.loss_chunk": self.smaller_chunk} if self.smaller_chunk else {})


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
    def rank(self) -> tuple[float, int, int]:
        """The key of the ranking: seconds of a step to four digits, then fewer axes, then less memory."""
        layout = self.choice.layout
        axes = sum(degree > 1 for degree in (layout.tp, layout.cp, layout.pp, layout.dp_replicate))
        return float(f"{handicap(self.choice.arithmetic) * self.time.seconds:.4g}"), axes, self.memory


# how the reason begins why a candidate does not fit
TOO_LARGE = "needs more memory"


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

    @property
    def lacks_memory(self) -> bool:
        """Whether memory is why some candidate was rejected."""
        return any(each.reason.startswith(TOO_LARGE) for each in self.rejections)

    def best_per_layout(self) -> list[Candidate]:
        """Return the best candidate of each layout, the fastest first."""
        found: dict[Layout, Candidate] = {}
        for candidate in self.candidates:
            found.setdefault(candidate.choice.layout, candidate)
        return list(found.values())

    def resolved(self, candidate: Candidate | None = None) -> Resolved:
        """Return the resolved run of a candidate, the best one unless given."""
        chosen = (candidate or self.best).choice
        return resolve(self.config.with_values(chosen.keys), self.machine, self.devices)
