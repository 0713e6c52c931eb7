"""Resolve derived settings and reject illegal ones, without torch and before a process group exists.

`resolve` is a pure function of the run file, a machine and the number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

from arriero.config.fields import ActivationCheckpointing
from arriero.config.keys import ConfigError, Problem
from arriero.config.schema import MemorySection, ParallelSection, PrecisionSection, RunConfig
from arriero.config.timeline import Phase, Timeline, config_of
from arriero.model.family import family_of
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
    tokens_divisor,
)
from arriero.plan.memory import MicroBatch, Need, loss_chunk, micro_batch_that_fits, need_of
from arriero.units import Span, counted, human_bytes, human_count

Compute = Literal["fp32", "bf16", "fp16"]
BYTES: Mapping[Compute, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
# float8 matmuls take dimensions that are multiples of this
_FLOAT8_MULTIPLE = 16
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

    `stages` are the blocks of each pipeline stage of the whole model; `shares` and `needs` have one entry per
    phase.
    """

    config: RunConfig
    machine: Machine
    spec: ModelSpec
    layout: Layout
    ulysses: int
    ring: int
    stages: tuple[range, ...]
    shares: tuple[Share, ...]
    needs: tuple[Need, ...]
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
        return self.config.memory.model_copy(
            update={"activation_checkpointing": self.activation_checkpointing}
        )

    @property
    def predicted_bytes(self) -> int:
        """The estimated peak memory of a rank, in the phase that needs most."""
        return max(need.bytes(share.micro_batch) for need, share in zip(self.needs, self.shares, strict=True))

    def stages_of(self, rank: int) -> list[range]:
        """Return the blocks of each stage that a rank holds."""
        pp, schedule = self.layout.pp, self.config.parallel.schedule
        if pp == 1:
            return list(self.stages)
        place = self.layout.coordinates(rank)["pp"]
        return [self.stages[i] for i in stages_of(schedule, place, pp, len(self.stages) // pp)]

    def with_least_memory(self, free: int, total: int) -> "Resolved":
        """Resolve again for the smallest free and total memory of all ranks, so that all decide alike."""
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
    """Return all derived settings of a run, or raise one ConfigError with every problem."""
    spec = ModelSpec.from_dict(config.model.model_dump(exclude={"preset"}))
    parallel, problems = config.parallel, [*_device_problems(config, machine)]
    layout = _layout(parallel, ranks, problems)
    compute, compute_reason = _compute(config.precision, machine, problems)
    stages = layout.pp * _stages_per_rank(parallel, problems) if layout.pp > 1 else 1
    compiled, compile_reason = _compiled(config, spec, layout, machine)
    heads, kv_heads = (max(1, count // layout.tp) for count in (spec.heads, spec.kv_heads))
    ulysses, ring = divide_context(layout.cp, heads, kv_heads, parallel.context)
    chunk, chunk_reason = loss_chunk(config, spec, layout, BYTES[compute], machine)
    checkpointing, checkpointing_reason = _checkpointing(config, spec, layout, BYTES[compute], chunk, machine)
    needs = _needs(config, spec, layout, BYTES[compute], chunk, machine, checkpointing)
    problems += _model_problems(spec, layout, stages)
    problems += _context_problems(config, layout, ulysses, ring, heads, kv_heads)
    problems += _setting_problems(config, layout, checkpointing, compiled, machine)
    problems += _float8_problems(config, spec, layout, compute, machine)
    shares: list[Share] = []
    share_decisions: list[Decision] = []
    if layout.ranks == ranks:
        shares, share_decisions = _shares(config, spec, layout, stages, needs, machine, problems)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    cuts = cut_stages(spec, config.data.seq_len, stages)
    decisions = [
        Decision("device", machine.name, _reason(config.run.device, _device_reason(machine))),
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
        needs=tuple(needs),
        loss_chunk=chunk,
        activation_checkpointing=checkpointing,
        compiled=compiled,
        compute=compute,
        decisions=tuple(decisions),
    )


def _reason(setting: object, reason: str) -> str:
    return reason if setting == "auto" else "as configured"


def _device_reason(machine: Machine) -> str:
    return "a GPU is available" if machine.is_gpu else "no GPU is available"


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
        what = f"{keys} are both -1" if len(open_axes) == 2 else f"{keys} are all -1"
        problems.append(Problem(f"parallel.{open_axes[-1]}", what, "leave at most one of them open"))
    elif layout.ranks != ranks:
        asked = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree not in (1, -1))
        number = f"a multiple of {fixed} ranks" if open_axes else counted(fixed, "rank")
        what = f"asks for {number} ({asked or 'all degrees are 1'}) and this run has {ranks}"
        todo = "start as many with --nproc, torchrun or srun, or change the degrees"
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
        return False, "only GPUs gain from it"
    if layout.pp > 1 and SCHEDULES[config.parallel.schedule].splits_backward:
        return False, f"the schedule '{config.parallel.schedule}' splits the backward pass"
    if spec.block_parameters < _WORTH_COMPILING:
        return False, f"blocks have fewer than {human_count(_WORTH_COMPILING)} parameters"
    return True, "faster on a GPU"


def _needs(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    compute_bytes: int,
    chunk: int | Literal[False],
    machine: Machine,
    checkpointing: ActivationCheckpointing,
) -> list[Need]:
    """Return the memory estimate of each phase."""
    memory = config.memory.model_copy(update={"activation_checkpointing": checkpointing})
    config = config.model_copy(update={"memory": memory})
    return [
        need_of(config_of(config, phase), spec, layout, compute_bytes, chunk, machine.is_gpu)
        for phase in Timeline.of(config).phases
    ]


def _checkpointing(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    compute_bytes: int,
    chunk: int | Literal[False],
    machine: Machine,
) -> tuple[ActivationCheckpointing, str]:
    """Return the activation checkpointing; 'auto' takes the cheapest that fits at micro-batch 1."""
    if config.memory.activation_checkpointing.kind != "auto":
        return config.memory.activation_checkpointing, "as configured"
    splits = layout.pp > 1 and SCHEDULES[config.parallel.schedule].splits_backward
    kinds = [
        ActivationCheckpointing("none"),
        *([] if splits or config.memory.ffn_tile else [ActivationCheckpointing("selective")]),
        ActivationCheckpointing("full"),
    ]
    reason = ""
    for checkpointing in kinds:
        needs = _needs(config, spec, layout, compute_bytes, chunk, machine, checkpointing)
        least = [min(config.train.micro_batch or 1, need.sequences) for need in needs]
        most = max(need.bytes(n) for need, n in zip(needs, least, strict=True))
        fits = all(need.fits(n, machine.memory_free) for need, n in zip(needs, least, strict=True))
        reason = (
            f"{human_bytes(most)} at a micro-batch of {max(least)}, {human_bytes(machine.memory_free)} free"
        )
        if fits:
            return checkpointing, reason
    return kinds[-1], f"even this may not fit: {reason}"


def _shares(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    stages: int,
    needs: Sequence[Need],
    machine: Machine,
    problems: list[Problem],
) -> tuple[list[Share], list[Decision]]:
    """Return micro-batch and gradient accumulation of each phase."""
    if needs[0].state > machine.memory_free:
        what = (
            f"training {human_count(spec.parameters)} parameters needs {human_bytes(needs[0].state)} a rank "
            f"for weights, gradients and optimizer state, and {human_bytes(machine.memory_free)} are free"
        )
        todo = "shard it over more ranks, choose a smaller model, or a device with more memory"
        problems.append(Problem("model", what, todo))
    shares, decisions = [], []
    given = config.train.micro_batch
    largest = max(need.sequences for need in needs)
    for i, (phase, need) in enumerate(zip(Timeline.of(config).phases, needs, strict=True)):
        key = f"data.phases[{i - 1}].batch" if i else "train.batch"
        if phase.sequences < layout.batch:
            what = (
                f"a batch of {counted(phase.sequences, 'sequence')} leaves some of the {layout.batch} "
                "data-parallel ranks without any"
            )
            problems.append(Problem(key, what, "raise it, or give more ranks to cp, tp or pp"))
            continue
        asked = min(given, need.sequences) if given and given <= largest else given
        micro = _micro_batch(config.parallel.schedule, asked, layout, stages, need, machine.memory_free, key)
        if isinstance(micro, Problem):
            problems.append(micro)
            continue
        shares.append(Share(need.sequences, micro.sequences))
        decisions.append(_share_decision(phase, shares[-1], micro.reason))
    return shares, decisions


def _micro_batch(
    schedule: str, given: int | None, layout: Layout, stages: int, need: Need, memory: int, key: str
) -> MicroBatch | Problem:
    """Choose a micro-batch; a pipeline needs equal ones, and enough of them to keep the stages busy."""
    sequences, pp = need.sequences, layout.pp
    counts = divisors(sequences)
    if pp > 1:
        counts = list(micro_batch_counts(schedule, sequences, pp, stages // pp))
    allowed = [sequences // n for n in counts]
    uneven = given is not None and pp == 1 and given <= sequences
    if not allowed or (given is not None and given not in allowed and not uneven):
        size = f"micro-batches of {given}" if allowed else "micro-batches"
        where = f" for the schedule '{schedule}' over {pp} ranks" if pp > 1 else ""
        what = f"the {sequences} sequences of a rank cannot be divided into {size}{where}"
        if given is None:
            return Problem(key, what, "raise it")
        return Problem("train.micro_batch", what, f"leave it out, or raise {key}")
    if given is not None:
        return MicroBatch(given, "as configured")
    if pp > 1:
        busy = [n for n in counts if n >= 4 * pp] or counts[-1:]
        fits = micro_batch_that_fits(need, [sequences // n for n in busy], memory)
        count = sequences // fits.sequences
        return MicroBatch(fits.sequences, f"{count} micro-batches keep {pp} ranks busy; {fits.reason}")
    equal = micro_batch_that_fits(need, allowed, memory)
    # equal micro-batches, unless uneven ones halve their number
    other = micro_batch_that_fits(need, _sizes(sequences), memory)
    return other if other.sequences >= 2 * equal.sequences else equal


def _sizes(sequences: int) -> list[int]:
    """Return every size that the largest of n micro-batches can have, for all n: all ceil(sequences / n)."""
    sizes, count = [], 1
    while count < sequences:
        less = (sequences - 1) // count
        sizes.append(less + 1)
        count = (sequences - 1) // less + 1
    return [*sizes, 1]


def _share_decision(phase: Phase, share: Share, reason: str) -> Decision:
    value = f"{share.micro_batch} of {share.sequences} sequences"
    if not phase.step:
        return Decision("micro-batch", value, reason)
    rate = f", learning rate {phase.lr:g}" if phase.lr else ""
    work = f"{Span(phase.batch, 'tok')} a step in sequences of {phase.seq_len}{rate}, micro-batch {value}"
    return Decision(f"from step {phase.step + 1:,}", work, reason)


def _layout_decisions(
    section: ParallelSection, layout: Layout, ulysses: int, ring: int, cuts: Sequence[range]
) -> Iterator[Decision]:
    if layout.ranks > 1:
        yield Decision("layout", str(layout), f"{layout.ranks} ranks")
    if layout.cp > 1:
        kinds = [f"{name} {n}" for name, n in (("Ulysses", ulysses), ("ring", ring)) if n > 1]
        reason = _reason(section.context, "Ulysses as far as the heads divide")
        yield Decision("context", " x ".join(kinds), reason)
    if layout.pp > 1:
        blocks = " | ".join(str(len(cut)) for cut in cuts)
        yield Decision("stages", f"{blocks} blocks", "balanced by cost, head and embedding included")


def _device_problems(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    wanted = config.run.device
    if wanted == "cuda" and not machine.is_gpu:
        yield Problem("run.device", f"is 'cuda', and {machine.name} is no GPU", "set it to 'auto' or 'cpu'")
    if wanted == "cpu" and machine.is_gpu:
        yield Problem("run.device", f"is 'cpu', and {machine.name} is a GPU", "set it to 'auto' or 'cuda'")


def _model_problems(spec: ModelSpec, layout: Layout, stages: int) -> Iterator[Problem]:
    tp = layout.tp
    if tp > 1 and not family_of(spec.family).placements:
        what = f"the model family '{spec.family}' has no tensor-parallel placements"
        yield Problem("parallel.tp", what, "set it to 1")
    for name, count in (("heads", spec.heads), ("kv_heads", spec.kv_heads), ("ffn", spec.ffn)):
        if count % tp:
            what = f"model.{name} ({count}) does not divide over tp {tp}"
            yield Problem("parallel.tp", what, f"use a divisor of {count}")
    if -(-spec.vocab_size // tp) * (tp - 1) >= spec.vocab_size:
        what = f"a vocabulary of {spec.vocab_size} leaves one of tp {tp} ranks without a row"
        yield Problem("parallel.tp", what, "use a smaller tp")
    if spec.layers < stages:
        what = f"{spec.layers} layers cannot fill {stages} pipeline stages"
        yield Problem("parallel.pp", what, "lower parallel.pp or parallel.stages_per_rank")


def _context_problems(
    config: RunConfig, layout: Layout, ulysses: int, ring: int, heads: int, kv_heads: int
) -> Iterator[Problem]:
    cp, tp = layout.cp, layout.tp
    if config.parallel.context == "ulysses" and ulysses < cp:
        what = f"'ulysses' cannot share {heads} heads and {kv_heads} kv heads over cp {cp}"
        yield Problem("parallel.context", what, "set it to 'auto', which adds a ring")
        return
    pieces = tokens_divisor(ulysses, ring)
    both = " x ".join(f"{axis} {degree}" for axis, degree in (("cp", cp), ("tp", tp)) if degree > 1)
    for i, phase in enumerate(Timeline.of(config).phases):
        for ranks, divisor in ((f"cp {cp}", pieces), (both, cp * tp)):
            if phase.seq_len % divisor:
                halves = ", in two chunks each" if ring > 1 and divisor == pieces else ""
                what = f"{phase.seq_len} does not divide over {ranks}{halves}"
                key = f"data.phases[{i - 1}].seq_len" if i else "data.seq_len"
                yield Problem(key, what, f"make it a multiple of {divisor}")
                break


def _setting_problems(
    config: RunConfig,
    layout: Layout,
    checkpointing: ActivationCheckpointing,
    compiled: bool,
    machine: Machine,
) -> Iterator[Problem]:
    if layout.pp > 1:
        yield from _pipeline_problems(config, checkpointing, compiled, machine)
    if config.data.packing == "none" and layout.cp * layout.tp * layout.pp > 1:
        what = "'none' makes batches of varying width, which cp, tp and pp cannot divide"
        yield Problem("data.packing", what, "set it to 'bestfit', or give the ranks to dp_shard")
    if config.memory.offload_state and not layout.uses_fsdp:
        what = f"moves shards, and the layout {layout} has none"
        yield Problem("memory.offload_state", what, "remove it, or give ranks to dp_shard")
    group = config.parallel.reshard
    if isinstance(group, int) and layout.fsdp % group:
        what = f"{group} does not divide the {layout.fsdp} ranks that share a copy of the weights"
        yield Problem("parallel.reshard", what, "use a divisor, such as the number of GPUs per node")
    if config.parallel.async_tp and not (layout.tp > 1 and compiled and machine.is_gpu):
        what = "overlaps the communication of compiled, tensor-parallel layers on GPUs"
        todo = "remove it, or set parallel.tp and precision.compile on a GPU"
        yield Problem("parallel.async_tp", what, todo)
    if config.memory.ffn_tile and checkpointing.is_selective:
        what = f"recomputes its tiles itself, and '{checkpointing}' selects what to recompute"
        todo = "set memory.activation_checkpointing to 'full' or 'none', or this to false"
        yield Problem("memory.ffn_tile", what, todo)
    if checkpointing.kind == "budget" and not compiled:
        what = f"'{checkpointing}' is applied by the compiler, and blocks are not compiled in this run"
        todo = "set precision.compile to true, or use 'selective' or 'fraction:P'"
        yield Problem("memory.activation_checkpointing", what, todo)


def _pipeline_problems(
    config: RunConfig, checkpointing: ActivationCheckpointing, compiled: bool, machine: Machine
) -> Iterator[Problem]:
    name = config.parallel.schedule
    schedule, other = SCHEDULES[name], "parallel.schedule to 'interleaved-1f1b'"
    if schedule.splits_backward and checkpointing.is_selective:
        what = (
            f"the schedule '{name}' runs two backward passes, and '{checkpointing}' keeps its results for one"
        )
        yield Problem("memory.activation_checkpointing", what, f"set it to 'full' or 'none', or {other}")
    if schedule.splits_backward and compiled:
        what = f"the schedule '{name}' splits the backward pass, and compiled blocks cannot"
        yield Problem("precision.compile", what, f"set it to false, or {other}")
    if config.parallel.sync == "each":
        what = "'each' is not possible in a pipeline, which reduces gradients after the last micro-batch"
        yield Problem("parallel.sync", what, "set it to 'last'")
    if schedule.v_shaped and not machine.is_gpu and machine.torch < (2, 13):
        # before torch 2.13 gloo cannot send to its own rank, as a V does at its tip
        version = ".".join(map(str, machine.torch))
        what = f"'{name}' needs torch 2.13 on a CPU, and this is {version}"
        yield Problem("parallel.schedule", what, "set it to 'zero-bubble' or 'interleaved-1f1b'")


def _float8_problems(
    config: RunConfig, spec: ModelSpec, layout: Layout, compute: Compute, machine: Machine
) -> Iterator[Problem]:
    section = config.precision
    if section.float8_head:
        yield from _float8_head_problems(section, spec, machine)
    if section.float8_all_gather:
        yield from _float8_gather_problems(section, spec, layout)
    if section.float8 == "off":
        return
    if compute != "bf16":
        what = f"needs bf16 beside it, and this run computes in {compute}"
        yield Problem("precision.float8", what, "set precision.compute = 'bf16', or this to 'off'")
    if config.data.packing == "none":
        what = f"rows of any length are not possible with float8, which multiplies in {_FLOAT8_MULTIPLE}s"
        yield Problem("data.packing", what, "use 'bestfit' or 'concat'")
        return
    # weight gradients are sums over the tokens of a micro-batch
    multiple = _FLOAT8_MULTIPLE * layout.cp
    ranks = f" on each of {layout.cp} ranks" if layout.cp > 1 else ""
    for i, phase in enumerate(Timeline.of(config).phases):
        if phase.seq_len % multiple:
            key = f"data.phases[{i - 1}].seq_len" if i else "data.seq_len"
            what = f"{phase.seq_len} is not a multiple of {_FLOAT8_MULTIPLE}{ranks}, as float8 needs"
            yield Problem(key, what, f"use a multiple of {multiple}")


def _float8_head_problems(section: PrecisionSection, spec: ModelSpec, machine: Machine) -> Iterator[Problem]:
    key = "precision.float8_head"
    if section.float8 == "off":
        what = "needs float8 in the blocks too, and precision.float8 is 'off'"
        yield Problem(key, what, "set precision.float8 to 'tensorwise', or this to false")
    if spec.dim % _FLOAT8_MULTIPLE:
        what = f"multiplies in {_FLOAT8_MULTIPLE}s, and the model is {spec.dim} wide"
        yield Problem(key, what, f"turn it off, or use a width that is a multiple of {_FLOAT8_MULTIPLE}")
    if machine.is_gpu and not (machine.kind == "cuda" and machine.float8):
        what = f"has no kernels for {machine.name}, where it would be slower than bf16"
        yield Problem(key, what, "turn it off")


def _float8_gather_problems(section: PrecisionSection, spec: ModelSpec, layout: Layout) -> Iterator[Problem]:
    key = "precision.float8_all_gather"
    if section.float8 != "tensorwise":
        what = f"gathers weights with one scale per tensor, and precision.float8 is '{section.float8}'"
        yield Problem(key, what, "set precision.float8 to 'tensorwise', or this to false")
    widths = (spec.attention_width, spec.kv_heads * spec.head_dim, spec.ffn)
    rows = [spec.dim, *(width // layout.tp for width in widths)]
    if layout.fsdp == 1:
        what = f"no weights are sharded in the layout {layout}, so none are gathered"
        yield Problem(key, what, "remove it, or raise parallel.dp_shard")
    elif any(n % layout.fsdp for n in rows):
        what = f"needs layers whose rows divide over {layout.fsdp} ranks"
        yield Problem(key, what, "turn it off, or use another parallel.dp_shard")
