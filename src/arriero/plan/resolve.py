"""Resolve derived settings and reject illegal ones, without torch and before a process group exists."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

from arriero.config.fields import ActivationCheckpointing
from arriero.config.keys import ConfigError, Problem
from arriero.config.schema import MemorySection, ParallelSection, PrecisionSection, RunConfig
from arriero.config.timeline import Phase, Timeline
from arriero.model.spec import ModelSpec
from arriero.plan.hardware import Machine
from arriero.plan.layout import (
    AXES,
    SCHEDULES,
    Layout,
    cut_stages,
    divide_context,
    divisors,
    micro_batch_counts,
    stages_of,
)
from arriero.plan.memory import EXCEEDS, MemoryEstimate, largest_that_fits, loss_chunk
from arriero.plan.rules import (
    BYTES,
    Compute,
    Draft,
    context_problems,
    device_problems,
    float8_problems,
    model_problems,
    phase_key,
    setting_problems,
    with_checkpointing,
)
from arriero.units import Span, counted, human_bytes, human_count

# parameters of a block below which compiling it does not pay
_WORTH_COMPILING = 1_000_000
_LEAST_MEMORY = "the rank with the least free memory decides"


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
    per phase.
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
    compiled: bool
    compute: Compute
    decisions: tuple[Decision, ...]

    @property
    def micro_batch(self) -> int:
        """The micro-batch size of the first phase."""
        return self.shares[0].micro_batch

    @property
    def memory(self) -> MemorySection:
        """The memory section with the derived activation checkpointing."""
        return with_checkpointing(self.config, self.activation_checkpointing).memory

    @property
    def predicted_bytes(self) -> int:
        """The estimated peak memory of a rank, in the phase that needs most."""
        phases = zip(self.estimates, self.shares, strict=True)
        return max(estimate.bytes(share.micro_batch) for estimate, share in phases)

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
        other = resolve(self.config, machine, self.layout.ranks)
        values = {decision.name: decision.value for decision in self.decisions}
        decisions = [
            each if values.get(each.name) == each.value else replace(each, reason=_LEAST_MEMORY)
            for each in other.decisions
        ]
        return replace(other, decisions=tuple(decisions))


def resolve(config: RunConfig, machine: Machine, ranks: int) -> Resolved:
    """Return all derived settings of a run, or raise one ConfigError with every problem.

    A pure function of its arguments, cheap enough to call for many layouts.
    """
    spec = ModelSpec.from_dict(config.model.model_dump(exclude={"preset"}))
    parallel, problems = config.parallel, [*device_problems(config, machine)]
    layout = _layout(parallel, ranks, problems)
    compute, compute_reason = _compute(config.precision, machine, problems)
    stages = layout.pp * _stages_per_rank(parallel, problems) if layout.pp > 1 else 1
    compiled, compile_reason = _compiled(config, spec, layout, machine)
    heads, kv_heads = (max(1, count // layout.tp) for count in (spec.heads, spec.kv_heads))
    ulysses, ring = divide_context(layout.cp, heads, kv_heads, parallel.context)
    chunk, chunk_reason = loss_chunk(config, spec, layout, BYTES[compute], machine)
    draft = Draft(config, machine, spec, layout, compute, compiled, chunk)
    checkpointing, checkpointing_reason = _checkpointing(draft)
    estimates = draft.estimates(checkpointing)
    problems += model_problems(spec, layout, stages)
    problems += context_problems(draft, ulysses, ring, heads, kv_heads)
    problems += setting_problems(draft, checkpointing)
    problems += float8_problems(draft)
    shares: list[Share] = []
    share_decisions: list[Decision] = []
    if layout.ranks == ranks:
        shares, share_decisions = _shares(draft, stages, estimates, problems)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    cuts = cut_stages(spec, config.data.seq_len, stages)
    device_reason = "a GPU is available" if machine.is_gpu else "no GPU is available"
    decisions = [
        Decision("device", machine.name, _reason(config.run.device, device_reason)),
        Decision("compute", compute, compute_reason),
        Decision("compile", str(compiled).lower(), compile_reason),
        *share_decisions,
        Decision("activation checkpointing", str(checkpointing), checkpointing_reason),
        Decision("loss chunk", f"{chunk:,} tokens" if chunk else "whole", chunk_reason),
        *_layout_decisions(parallel, layout, ulysses, ring, cuts),
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
        loss_chunk=chunk,
        activation_checkpointing=checkpointing,
        compiled=compiled,
        compute=compute,
        decisions=tuple(decisions),
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


def _compute(section: PrecisionSection, machine: Machine, problems: list[Problem]) -> tuple[Compute, str]:
    """Return the precision of activations and matmuls, and the reason."""
    wanted, reason = section.compute, "as configured"
    if wanted == "auto" and section.master == "bf16":
        wanted, reason = "bf16", "precision.master is 'bf16'"
    if wanted == "bf16" and not machine.bf16:
        what = f"{machine.name} does not support bf16"
        problems.append(Problem("precision.compute", what, "set it to 'fp32' or 'fp16'"))
    if section.master == "bf16" and wanted != "bf16":
        what = f"weights in bf16 compute in bf16, and precision.compute is '{wanted}'"
        todo = "set precision.compute = 'bf16', or this to 'fp32'"
        problems.append(Problem("precision.master", what, todo))
    if wanted != "auto":
        return wanted, reason
    if not machine.is_gpu:
        return "fp32", "the default on a CPU"
    return ("bf16", f"{machine.name} supports bf16") if machine.bf16 else ("fp32", "the GPU has no bf16")


def _stages_per_rank(section: ParallelSection, problems: list[Problem]) -> int:
    schedule, asked = SCHEDULES[section.schedule], section.stages_per_rank
    if asked is None or schedule.allows_stages(asked):
        return asked or schedule.stages_per_rank
    needs = "two or more" if schedule.looped else str(schedule.stages_per_rank)
    what = f"is {asked}, and the schedule '{section.schedule}' needs {needs} stages per rank"
    todo = "leave it out, or choose another parallel.schedule"
    problems.append(Problem("parallel.stages_per_rank", what, todo))
    return schedule.stages_per_rank


def _compiled(config: RunConfig, spec: ModelSpec, layout: Layout, machine: Machine) -> tuple[bool, str]:
    if config.precision.compile != "auto":
        return config.precision.compile, "as configured"
    if not machine.is_gpu:
        return False, "faster on GPUs only"
    if layout.pp > 1 and SCHEDULES[config.parallel.schedule].splits_backward:
        return False, f"the schedule '{config.parallel.schedule}' splits the backward pass"
    if spec.block_parameters < _WORTH_COMPILING:
        return False, f"blocks have fewer than {human_count(_WORTH_COMPILING)} parameters"
    return True, "faster on a GPU"


def _checkpointing(draft: Draft) -> tuple[ActivationCheckpointing, str]:
    """Return the activation checkpointing; 'auto' is the cheapest that fits at micro-batch 1."""
    memory, free = draft.config.memory, draft.machine.memory_free
    if memory.activation_checkpointing.kind != "auto":
        is_default = memory.activation_checkpointing == MemorySection().activation_checkpointing
        return memory.activation_checkpointing, "default" if is_default else "as configured"
    kinds = [ActivationCheckpointing("none"), ActivationCheckpointing("full")]
    if not (draft.splits_backward or memory.ffn_tile):
        kinds.insert(1, ActivationCheckpointing("selective"))
    reason = ""
    for checkpointing in kinds:
        estimates = draft.estimates(checkpointing)
        sizes = [(each, min(draft.config.train.micro_batch or 1, each.sequences)) for each in estimates]
        most = max(estimate.bytes(size) for estimate, size in sizes)
        reason = f"{human_bytes(most)} at a micro-batch of {sizes[0][1]}, {human_bytes(free)} free"
        if all(estimate.fits(size, free) for estimate, size in sizes):
            return checkpointing, reason
    return kinds[-1], f"even this {EXCEEDS}: {reason}"


def _shares(
    draft: Draft, stages: int, estimates: Sequence[MemoryEstimate], problems: list[Problem]
) -> tuple[list[Share], list[Decision]]:
    """Return micro-batch and gradient accumulation of each phase, with their decisions."""
    free, state = draft.machine.memory_free, estimates[0].state
    if state > free:
        what = (
            f"training {human_count(draft.spec.parameters)} parameters needs {human_bytes(state)} per rank "
            f"for weights, gradients and optimizer state, and {human_bytes(free)} are free"
        )
        todo = "shard it over more ranks, choose a smaller model, or a device with more memory"
        problems.append(Problem("model", what, todo))
    shares, decisions = [], []
    given, largest = draft.config.train.micro_batch, max(each.sequences for each in estimates)
    for i, (phase, estimate) in enumerate(zip(Timeline.of(draft.config).phases, estimates, strict=True)):
        key = phase_key(i, "batch", "train.batch")
        if phase.sequences < draft.layout.batch:
            batch = counted(phase.sequences, "sequence")
            what = (
                f"a batch of {batch} leaves some of the {draft.layout.batch} data-parallel ranks without any"
            )
            problems.append(Problem(key, what, "raise it, or give more ranks to cp, tp or pp"))
            continue
        asked = min(given, estimate.sequences) if given and given <= largest else given
        found = _micro_batch(draft, asked, stages, estimate, key)
        if isinstance(found, Problem):
            problems.append(found)
            continue
        size, reason = found
        shares.append(Share(estimate.sequences, size))
        decisions.append(_share_decision(phase, shares[-1], reason))
    return shares, decisions


def _micro_batch(
    draft: Draft, given: int | None, stages: int, estimate: MemoryEstimate, key: str
) -> tuple[int, str] | Problem:
    """Choose a micro-batch; a pipeline needs equal ones, and enough of them to keep the stages busy."""
    sequences, pp, free = estimate.sequences, draft.layout.pp, draft.machine.memory_free
    counts = divisors(sequences)
    if pp > 1:
        counts = list(micro_batch_counts(draft.schedule, sequences, pp, stages // pp))
    allowed = [sequences // n for n in counts]
    uneven = given is not None and pp == 1 and given <= sequences
    if not allowed or (given is not None and given not in allowed and not uneven):
        size = f"micro-batches of {given}" if allowed else "micro-batches"
        where = f" for the schedule '{draft.schedule}' over {pp} ranks" if pp > 1 else ""
        what = f"the {sequences} sequences of a rank cannot be divided into {size}{where}"
        if given is None:
            return Problem(key, what, "raise it")
        return Problem("train.micro_batch", what, f"leave it out, or raise {key}")
    if given is not None:
        return given, "as configured"
    if pp > 1:
        busy = [n for n in counts if n >= 4 * pp] or counts[-1:]
        size, reason = largest_that_fits(estimate, [sequences // n for n in busy], free)
        return size, f"{sequences // size} micro-batches keep {pp} ranks busy; {reason}"
    equal = largest_that_fits(estimate, allowed, free)
    # equal micro-batches, unless uneven ones halve their number
    other = largest_that_fits(estimate, _sizes(sequences), free)
    return other if other[0] >= 2 * equal[0] else equal


def _sizes(sequences: int) -> list[int]:
    """Return ceil(sequences / n) for all n: every size that the largest of n micro-batches can have."""
    sizes, count = [], 1
    while count < sequences:
        less = (sequences - 1) // count
        sizes.append(less + 1)
        count = (sequences - 1) // less + 1
    return [*sizes, 1]


def _share_decision(phase: Phase, share: Share, reason: str) -> Decision:
    value = f"{share.micro_batch} of {counted(share.sequences, 'sequence')}"
    if share.gradient_accumulation > 1:
        value += f", gradient accumulation {share.gradient_accumulation}"
    if not phase.step:
        return Decision("micro-batch", value, reason)
    rate = f", learning rate {phase.lr:g}" if phase.lr else ""
    work = f"{Span(phase.batch, 'tok')} per step in sequences of {phase.seq_len}{rate}, micro-batch {value}"
    return Decision(f"from step {phase.step + 1:,}", work, reason)


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
