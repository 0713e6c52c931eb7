"""Resolve derived settings and reject illegal ones, without torch and before a process group exists."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple

from arriero.config.fields import ActivationCheckpointing
from arriero.config.keys import ConfigError, Problem
from arriero.config.schema import MemorySection, ParallelSection, RunConfig
from arriero.config.timeline import Phase, Timeline
from arriero.model.spec import ModelSpec
from arriero.plan.arithmetic import open_keys
from arriero.plan.blocks import Work
from arriero.plan.choose import Chooser, Setting, loss_chunk, micro_batch_sizes
from arriero.plan.hardware import Machine
from arriero.plan.layout import AXES, Layout, cut_stages, stages_of
from arriero.plan.memory import Choices, MemoryEstimate
from arriero.plan.rates import ranking_rates
from arriero.plan.rules import Compute, Draft, checkpointing_problems, device_problems, spec_of
from arriero.units import Span, counted, human_bytes

_LEAST_MEMORY = "the rank with the least free memory decides"
AS_STARTED = "as the run was started"


@dataclass(frozen=True)
class Decision:
    """A setting that was derived, with its reason."""

    name: str
    value: str
    reason: str


class Share(NamedTuple):
    """The sequences of one rank in a global batch, and how many of them are in a micro-batch."""

    sequences: int
    micro_batch: int

    @property
    def gradient_accumulation(self) -> int:
        return -(-self.sequences // self.micro_batch)


@dataclass(frozen=True)
class Resolved:
    """All derived settings of a run. They are the same on every rank of equal machines.

    `stages` are the blocks of each pipeline stage of the whole model; `shares` and `estimates` have one entry
    per phase. `sync` and `reshard` are those of [parallel]: True frees gathered weights after forward. `kept`
    are the settings that a resumed run was started with, `arithmetic` the chosen values of open keys.
    """

    config: RunConfig
    machine: Machine
    spec: ModelSpec
    layout: Layout
    ulysses: int
    ring: int
    stages: tuple[range, ...]
    shares: tuple[Share, ...]
    estimates: tuple[MemoryEstimate, ...]
    loss_chunk: int | Literal[False]
    activation_checkpointing: ActivationCheckpointing
    sync: Literal["last", "each"]
    reshard: bool | int
    compiled: bool
    compute: Compute
    decisions: tuple[Decision, ...]
    kept: Mapping[str, Any] = field(default_factory=dict)
    arithmetic: Mapping[str, Any] = field(default_factory=dict)

    @property
    def micro_batch(self) -> int:
        """The micro-batch size of the first phase."""
        return self.shares[0].micro_batch

    @property
    def memory(self) -> MemorySection:
        """The memory section with the derived activation checkpointing."""
        chosen = {"memory.activation_checkpointing": self.activation_checkpointing}
        return self.config.with_values(chosen).memory

    @property
    def predicted_bytes(self) -> int:
        """The estimated peak memory of a rank, in the phase that needs most."""
        return round(sum(self.predicted_parts.values()))

    @property
    def predicted_parts(self) -> dict[str, float]:
        """What lives at that peak, in bytes by name."""
        phases = zip(self.estimates, self.shares, strict=True)
        parts = (estimate.parts(share.micro_batch) for estimate, share in phases)
        return max(parts, key=lambda each: sum(each.values()))

    @property
    def host_bytes(self) -> int:
        """The estimated memory of the host that offloading takes for this rank."""
        phases = zip(self.estimates, self.shares, strict=True)
        return max(estimate.host_bytes(share.micro_batch) for estimate, share in phases)

    @property
    def open_settings(self) -> dict[str, Any]:
        """The derived settings that decide the order of sums and the kernels: a resumed run keeps them."""
        return {
            "ranks": str(self.layout),
            "train.micro_batch": [share.micro_batch for share in self.shares],
            "memory.activation_checkpointing": str(self.activation_checkpointing),
            "memory.loss_chunk": self.loss_chunk,
            "parallel.sync": self.sync,
            **self.arithmetic,
        }

    def work(self, phase: int = 0) -> Work:
        """Return the step of one of the phases, for its predicted time."""
        draft = Draft(self.config, self.machine, self.spec, self.layout, self.compute, self.compiled)
        choices = Choices(self.activation_checkpointing, self.loss_chunk, self.sync, self.reshard)
        return draft.work(choices, self.shares[phase].micro_batch, phase)

    def stages_of(self, rank: int) -> list[range]:
        """Return the blocks of each stage that a rank holds."""
        pp, schedule = self.layout.pp, self.config.parallel.schedule
        if pp == 1:
            return list(self.stages)
        place = self.layout.coordinates(rank)["pp"]
        return [self.stages[i] for i in stages_of(schedule, place, pp, len(self.stages) // pp)]

    def with_least_memory(self, free: int, total: int) -> "Resolved":
        """Resolve again for the least free and total memory of all ranks, so that all decide the same."""
        if (free, total) == (self.machine.memory_free, self.machine.memory_total):
            return self
        machine = replace(self.machine, memory_free=free, memory_total=total)
        opened = self.config.with_values(dict.fromkeys(self.arithmetic, "auto"))
        other = resolve(opened, machine, self.layout.ranks, self.kept)
        values = {decision.name: decision.value for decision in self.decisions}
        missing = values.keys() - {decision.name for decision in other.decisions}
        decisions = [
            each if values.get(each.name) == each.value else replace(each, reason=_LEAST_MEMORY)
            for each in other.decisions
        ]
        decisions += [each for each in self.decisions if each.name in missing]
        return replace(other, decisions=tuple(decisions))


def resolve(
    config: RunConfig, machine: Machine, ranks: int, kept: Mapping[str, Any] | None = None
) -> Resolved:
    """Return all derived settings of a run, or raise one ConfigError with every problem.

    `kept` are the `open_settings` that a resumed run was started with; it keeps them if it has the same
    layout and they still fit. A pure function of its arguments, cheap enough to call for many layouts.
    """
    if open_keys(config):
        from arriero.plan.auto import resolve_arithmetic

        return resolve_arithmetic(config, machine, ranks, kept or {})
    if any(getattr(config.parallel, axis) == "auto" for axis in AXES):
        # planned degrees are resolved by this function, so it cannot import the planner first
        from arriero.plan.auto import resolve_planned

        return resolve_planned(config, machine, ranks)
    spec, problems = spec_of(config), [*device_problems(config, machine)]
    layout = _layout(config.parallel, ranks, problems)
    kept = kept if kept and kept.get("ranks") == str(layout) else {}
    draft = Draft.of(config, machine, spec, layout)
    problems += draft.problems()
    sizes = micro_batch_sizes(draft, kept, problems) if layout.ranks == ranks else []
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    plan, fits = Chooser(draft, sizes, ranking_rates(config, machine, ranks), kept).best()
    if not fits and kept:
        return resolve(config, machine, ranks)
    estimates = draft.estimates(plan.choices)
    if problem := _does_not_fit(draft, plan, fits, estimates):
        raise ConfigError([problem])
    choices = plan.choices
    if problems := [*checkpointing_problems(draft, choices.checkpointing)]:
        raise ConfigError(problems)
    shares = [Share(e.sequences, size) for e, size in zip(estimates, plan.micro_batches, strict=True)]
    cuts, (ulysses, ring) = cut_stages(spec, config.data.seq_len, draft.stages), draft.context
    device_reason = "a GPU is available" if machine.is_gpu else "no GPU is available"
    decisions = [
        Decision("device", machine.name, _reason(config.run.device, device_reason)),
        Decision("compute", draft.compute, draft.reasons[0]),
        Decision("compile", str(draft.compiled).lower(), draft.reasons[1]),
        *_memory_decisions(draft, plan, fits, shares, estimates, kept),
        *_layout_decisions(config.parallel, layout, ulysses, ring, cuts),
    ]
    return Resolved(
        config=config,
        machine=machine,
        spec=spec,
        layout=layout,
        ulysses=ulysses,
        ring=ring,
        stages=cuts,
        shares=tuple(shares),
        estimates=tuple(estimates),
        loss_chunk=choices.chunk,
        activation_checkpointing=choices.checkpointing,
        sync=choices.sync,
        reshard=choices.reshard,
        compiled=draft.compiled,
        compute=draft.compute,
        decisions=tuple(decisions),
        kept=kept,
    )


def _reason(setting: object, reason: str) -> str:
    return reason if setting == "auto" else "as configured"


def _layout(section: ParallelSection, ranks: int, problems: list[Problem]) -> Layout:
    """Return the layout of the section; the degree of -1 takes the ranks that the others leave."""
    degrees = {axis: getattr(section, axis) for axis in AXES}
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    fixed = prod(degree for degree in degrees.values() if degree != -1)
    if len(open_axes) == 1 and ranks % fixed == 0:
        degrees[open_axes[0]] = ranks // fixed
    layout = Layout(**{axis: abs(degree) for axis, degree in degrees.items()})
    if len(open_axes) > 1:
        keys = " and ".join(f"parallel.{axis}" for axis in open_axes)
        what = f"{keys} are {'both' if len(open_axes) == 2 else 'all'} -1"
        problems.append(Problem(f"parallel.{open_axes[-1]}", what, "leave at most one of them open"))
    elif layout.ranks != ranks:
        asked = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree not in (1, -1))
        number = f"a multiple of {fixed} ranks" if open_axes else counted(fixed, "rank")
        what = f"needs {number} ({asked or 'all degrees are 1'}), but this run has {ranks}"
        todo = "start another number of ranks (--nproc, torchrun or srun), or change the degrees"
        problems.append(Problem("parallel", what, todo))
    return layout


def _does_not_fit(
    draft: Draft, plan: Setting, fits: bool, estimates: Sequence[MemoryEstimate]
) -> Problem | None:
    """Return the problem of a run that cannot fit. On a CPU only weights and optimizer state are certain."""
    free = draft.machine.memory_free
    needed = plan.bytes if draft.machine.is_gpu else max(each.state for each in estimates)
    if fits or needed <= free:
        return None
    # advice tries other settings and layouts, which it resolves
    from arriero.plan.advice import refusal

    return refusal(draft, plan, estimates)


def _share_decision(phase: Phase, share: Share, reason: str) -> Decision:
    value = f"{share.micro_batch} of {counted(share.sequences, 'sequence')}"
    if share.gradient_accumulation > 1:
        value += f", gradient accumulation {share.gradient_accumulation}"
    if not phase.step:
        return Decision("micro-batch", value, reason)
    rate = f", learning rate {phase.lr:g}" if phase.lr else ""
    work = f"{Span(phase.batch, 'tok')} per step in sequences of {phase.seq_len}{rate}, micro-batch {value}"
    return Decision(f"from step {phase.step + 1:,}", work, reason)


def _memory_decisions(
    draft: Draft,
    plan: Setting,
    fits: bool,
    shares: Sequence[Share],
    estimates: Sequence[MemoryEstimate],
    kept: Mapping[str, Any],
) -> Iterator[Decision]:
    """Report the micro-batch, what saves memory, and the predicted peak with its parts."""
    config, choices, free = draft.config, plan.choices, human_bytes(draft.machine.memory_free)
    needs = f"{human_bytes(plan.bytes)} predicted, {free} free"

    def reason(key: str, value: object, why: str) -> str:
        if value not in ("auto", None):
            return "as configured"
        return AS_STARTED if key in kept else why

    for phase, share in zip(Timeline.of(config).phases, shares, strict=True):
        why = f"{share.sequences // share.micro_batch} micro-batches keep {draft.layout.pp} ranks busy"
        why = f"{why}; {needs}" if draft.layout.pp > 1 else needs
        yield _share_decision(phase, share, reason("train.micro_batch", config.train.micro_batch, why))
    key, checkpointing = "memory.activation_checkpointing", choices.checkpointing
    given = config.memory.activation_checkpointing
    why = "not needed" if checkpointing.kind == "none" else "the least recomputation that fits"
    if checkpointing.kind != "none" and given.kind == "auto":
        without = replace(choices, checkpointing=ActivationCheckpointing("none"))
        needed = max(e.bytes(s.micro_batch) for e, s in zip(draft.estimates(without), shares, strict=True))
        why += f"; without it {human_bytes(needed)} are predicted"
    why = reason(key, "auto" if given.kind == "auto" else given, why)
    yield Decision("activation checkpointing", str(checkpointing), why)
    usual = choices.chunk == loss_chunk(draft)
    why = "logits use at most a sixteenth of the memory" if usual else "smaller, so that the run fits"
    why = why if draft.machine.is_gpu else "logits that fit in the processor's cache"
    chunk = f"{choices.chunk:,} tokens" if choices.chunk else "whole"
    yield Decision("loss chunk", chunk, reason("memory.loss_chunk", config.memory.loss_chunk, why))
    if draft.layout.uses_fsdp:
        yield from _fsdp_decisions(draft, choices, shares, kept)
    parts = _largest_parts(estimates, shares)
    if not fits:
        parts = f"more than the run should fill, and may not fit: {parts}"
    yield Decision("memory", f"{human_bytes(plan.bytes)} of {free}", parts)


def _fsdp_decisions(
    draft: Draft, choices: Choices, shares: Sequence[Share], kept: Mapping[str, Any]
) -> Iterator[Decision]:
    parallel = draft.config.parallel
    if any(share.gradient_accumulation > 1 for share in shares):
        why = "least communication"
        if choices.sync == "each":
            why = "whole gradients of a step would not fit, or adding them up takes longer than reducing"
        why = AS_STARTED if "parallel.sync" in kept else why
        when = "after each micro-batch" if choices.sync == "each" else "after the last micro-batch"
        yield Decision("reduce gradients", when, _reason(parallel.sync, why))
    value = f"to groups of {choices.reshard}"
    if isinstance(choices.reshard, bool):
        value = "always (ZeRO-3)" if choices.reshard else "never (gathered once per step)"
    why = "gathered weights fit, and are gathered once"
    if choices.reshard:
        why = "keeping gathered weights would not fit, or gain less than 1 %"
    if draft.layout.pp > 1 or not draft.machine.is_gpu:
        why = f"the default {'in a pipeline' if draft.layout.pp > 1 else 'on a CPU'}"
    yield Decision("reshard", value, _reason(parallel.reshard, why))


def _largest_parts(estimates: Sequence[MemoryEstimate], shares: Sequence[Share]) -> str:
    phases = [e.parts(s.micro_batch) for e, s in zip(estimates, shares, strict=True)]
    parts = max(phases, key=lambda each: sum(each.values()))
    total = sum(parts.values())
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items() if size >= 0.02 * total)


def _layout_decisions(
    section: ParallelSection, layout: Layout, ulysses: int, ring: int, cuts: Sequence[range]
) -> Iterator[Decision]:
    if layout.ranks > 1:
        yield Decision("layout", str(layout), f"{layout.ranks} ranks")
    if layout.cp > 1:
        kinds = [f"{name} {n}" for name, n in (("Ulysses", ulysses), ("ring", ring)) if n > 1]
        reason = _reason(section.context, "Ulysses as far as the heads divide")
        yield Decision("context parallel", " x ".join(kinds), reason)
    if layout.pp > 1:
        blocks = " | ".join(str(len(cut)) for cut in cuts)
        yield Decision("stages", f"{blocks} blocks", "balanced by cost, head and embedding included")
