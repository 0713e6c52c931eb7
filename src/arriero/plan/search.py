"""Search the layouts of a run: enumerate, reject what is illegal or does not fit, rank by predicted time.

A key that the run file sets is kept, the rest is planned around it. Pure functions without torch: every rank
of a run comes to the same plan.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from math import inf, prod
from typing import Any, Literal

from arriero.config.fields import ActivationCheckpointing
from arriero.config.keys import ConfigError
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline
from arriero.errors import UserError
from arriero.model.spec import ModelSpec
from arriero.plan.blocks import Work, reshards, shared_work
from arriero.plan.candidates import Candidate, Choice, Constraint, Plan, Rejection, Sync
from arriero.plan.choose import loss_chunk
from arriero.plan.hardware import Cluster, Machine
from arriero.plan.layout import (
    AXES,
    SCHEDULES,
    Layout,
    cut_stages,
    divide_context,
    divisors,
    micro_batch_counts,
)
from arriero.plan.memory import Choices, usable_bytes
from arriero.plan.rates import Rates
from arriero.plan.resolve import resolve
from arriero.plan.rules import (
    Draft,
    checkpointing_problems,
    context_problems,
    float8_problems,
    model_problems,
    setting_problems,
)
from arriero.plan.timing import step_time
from arriero.units import counted, human_bytes

# schedules worth a try with their stages per rank; gpipe, looped-bfs and dualpipev are dominated
_SCHEDULES = (("1f1b", (1,)), ("interleaved-1f1b", (2, 4)), ("zbv", (2,)), ("zero-bubble", (2,)))
_CHECKPOINTING = ("none", "selective", "fraction:1/4", "fraction:1/2", "fraction:3/4", "full")
_MOST_SIZES = 6
_TOO_LARGE = "needs more memory"


@dataclass
class _Search:
    """The state of one search; `rejected` counts reasons and keeps one example of each."""

    config: RunConfig
    cluster: Cluster
    machine: Machine
    devices: int
    constraints: Sequence[Constraint]
    exclude: Collection[str]
    rates: Rates
    rejected: dict[str, list[Any]] = field(default_factory=dict)
    considered: int = 0
    least: float = inf

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_dict(self.config.model.model_dump(exclude={"preset"}))

    @cached_property
    def usable(self) -> float:
        """Bytes per device that a candidate may need by the estimate."""
        return usable_bytes(self.machine.memory_free, self.machine.is_gpu)

    @cached_property
    def too_large_reason(self) -> str:
        sizes = human_bytes(self.usable), human_bytes(self.machine.memory_free)
        return f"{_TOO_LARGE} than {sizes[0]} of the {sizes[1]} that are free"

    @cached_property
    def sequences(self) -> int:
        return Timeline.of(self.config).phases[0].sequences

    def reject(self, reason: str, what: object, count: int = 1) -> None:
        self.considered += count
        # reasons that differ in numbers only are one
        found = self.rejected.setdefault(re.sub(r"\d+", "#", reason), [reason, 0, str(what)])
        found[1] += count

    def too_large(self, what: Callable[[], str] = str, needed: float = inf) -> None:
        """Count a candidate that does not fit; the example is the one that needs least."""
        self.considered += 1
        found = self.rejected.setdefault(_TOO_LARGE, [self.too_large_reason, 0, ""])
        found[1] += 1
        if needed < self.least:
            self.least = needed
            found[2] = f"{what()}: {human_bytes(needed)}"

    def sets(self, section: str, key: str) -> bool:
        """Return whether the run file sets a key, so that it is kept."""
        values = getattr(self.config, section)
        return key in values.model_fields_set and getattr(values, key) not in (None, "auto", -1)


def plan_run(
    config: RunConfig,
    cluster: Cluster,
    devices: int,
    *,
    fix: Mapping[str, int] | None = None,
    most: Mapping[str, int] | None = None,
    exclude: Collection[str] = (),
    memory_limit: int | None = None,
    rates: Rates | None = None,
    machine: Machine | None = None,
    keep: int | None = None,
) -> Plan:
    """Return the ranked candidates of a run on `devices` devices of a cluster.

    `fix` and `most` constrain degrees, `exclude` leaves out schedules, 'sync each', kinds of activation
    checkpointing or degrees like 'cp'. `memory_limit` is bytes per device. Raises UserError where constraints
    contradict each other; where nothing fits, the plan has no candidates.
    """
    machine = machine or cluster.machine
    if memory_limit is not None:
        machine = replace(machine, memory_free=min(memory_limit, machine.memory_free))
    search = _Search(config, cluster, machine, devices, (), exclude, rates or Rates(cluster))
    search.constraints = _constraints(search, fix or {}, most or {})
    layouts = _layouts(search)
    found: list[Candidate] = []
    for layout in layouts:
        found += _candidates_of(search, layout)
    found.sort(key=lambda each: each.rank)
    checked = tuple(_checked(search, found, keep))
    rejections = sorted((Rejection(*each) for each in search.rejected.values()), key=lambda each: -each.count)
    return Plan(
        config,
        cluster,
        machine,
        devices,
        checked,
        tuple(rejections),
        search.considered,
        search.rates.used,
    )


def _constraints(search: _Search, fix: Mapping[str, int], most: Mapping[str, int]) -> list[Constraint]:
    """Return all conditions on degrees, those of the run file included."""
    given = [
        Constraint(f"parallel.{axis} = {getattr(search.config.parallel, axis)}", axis, degree)
        for axis in AXES
        if search.sets("parallel", axis) and isinstance(degree := getattr(search.config.parallel, axis), int)
    ]
    given += [Constraint(f"--fix {axis}={degree}", axis, degree) for axis, degree in fix.items()]
    given += [Constraint(f"--max {axis}={degree}", axis, degree, True) for axis, degree in most.items()]
    given += [Constraint(f"--exclude {axis}", axis, 1, True) for axis in AXES if axis in search.exclude]
    return given


def _layouts(search: _Search) -> list[Layout]:
    """Return every layout of the devices that the constraints allow."""
    every = list(_factorised(search.devices))
    allowed = [each for each in every if all(rule.allows(each) for rule in search.constraints)]
    if not allowed:
        raise _contradiction(search, every)
    return allowed


def _factorised(devices: int) -> Iterator[Layout]:
    """Yield all ways to write the number of devices as a product of the five degrees."""
    for pp in divisors(devices):
        for tp in divisors(devices // pp):
            for cp in divisors(devices // (pp * tp)):
                rest = devices // (pp * tp * cp)
                for replicate in divisors(rest):
                    yield Layout(pp, replicate, rest // replicate, cp, tp)


def _contradiction(search: _Search, layouts: Sequence[Layout]) -> UserError:
    """Name the constraint, or the pair of them, that no layout satisfies."""
    devices = counted(search.devices, "device")

    def possible(*rules: Constraint) -> bool:
        return any(all(rule.allows(each) for rule in rules) for each in layouts)

    for rule in search.constraints:
        if not possible(rule):
            what = f"{rule.label} is not possible with {devices}"
            return UserError(what, f"use a divisor of {search.devices}, or another number of devices")
    for first, second in combinations(search.constraints, 2):
        if not possible(first, second):
            reason = f"with {devices} they contradict each other"
            return UserError(f"{first.label} and {second.label}: {reason}", "remove one of them")
    labels = ", ".join(rule.label for rule in search.constraints)
    fixed = prod(rule.degree for rule in search.constraints if not rule.is_maximum)
    what = f"{labels} leave no layout of {devices}: the fixed degrees have the product {fixed}"
    return UserError(what, "remove one of them, or use a multiple of that product")


def _candidates_of(search: _Search, layout: Layout) -> Iterator[Candidate]:
    """Yield what fits of one layout, in every schedule and with every setting that is free."""
    fixed_tp = any(rule.axis == "tp" and not rule.is_maximum for rule in search.constraints)
    if layout.tp > search.cluster.devices_per_node and not fixed_tp:
        size = search.cluster.devices_per_node
        search.reject(
            f"tp over more than the {size} devices of a node uses the network in each layer", layout
        )
        return
    if layout.batch > search.sequences:
        search.reject(
            f"the batch has only {counted(search.sequences, 'sequence')}, fewer than data ranks", layout
        )
        return
    for schedule, per_rank in _schedules(search, layout):
        yield from _candidates_in(search, layout, schedule, per_rank)


def _schedules(search: _Search, layout: Layout) -> Iterator[tuple[str, int]]:
    section = search.config.parallel
    if layout.pp == 1:
        yield section.schedule, 1
        return
    if search.sets("parallel", "schedule"):
        options: Any = ((section.schedule, (SCHEDULES[section.schedule].stages_per_rank,)),)
        if SCHEDULES[section.schedule].looped:
            options = ((section.schedule, (2, 4)),)
    else:
        options = [each for each in _SCHEDULES if each[0] not in search.exclude]
    for name, counts in options:
        for count in (section.stages_per_rank,) if section.stages_per_rank else counts:
            if SCHEDULES[name].allows_stages(count):
                yield name, count


def _candidates_in(search: _Search, layout: Layout, schedule: str, per_rank: int) -> Iterator[Candidate]:
    stages = layout.pp * per_rank if layout.pp > 1 else 1
    draft = _draft(search, layout, schedule)
    spec, config = search.spec, search.config
    heads, kv_heads = (max(1, count // layout.tp) for count in (spec.heads, spec.kv_heads))
    ulysses, ring = divide_context(layout.cp, heads, kv_heads, config.parallel.context)
    problems = [
        *model_problems(spec, layout, stages),
        *context_problems(draft, ulysses, ring, heads, kv_heads),
    ]
    problems += float8_problems(draft)
    if problems:
        search.reject(f"{problems[0].key} {problems[0].what}", layout)
        return
    rows = layout.rows(search.sequences)
    sizes = _sizes(search, layout, schedule, per_rank, rows)
    if not sizes:
        search.reject(f"the schedule '{schedule}' needs more micro-batches than a rank has sequences", layout)
        return
    for reshard, sync in _policies(search, layout):
        yield from _fitting(search, draft, (schedule, per_rank, reshard, sync), (ulysses, ring), sizes, rows)


def _draft(search: _Search, layout: Layout, schedule: str) -> Draft:
    """Return the settings that the rules of `resolve` look at, without resolving the run."""
    config, machine = search.config, search.machine
    parallel = config.parallel.model_copy(update={"schedule": schedule})
    config = config.model_copy(update={"parallel": parallel})
    compute = _compute(config, machine)
    splits = layout.pp > 1 and SCHEDULES[schedule].splits_backward
    compiled = config.precision.compile
    if compiled == "auto":
        compiled = machine.is_gpu and not splits
    return Draft(config, machine, search.spec, layout, compute, bool(compiled))


def _compute(config: RunConfig, machine: Machine) -> Literal["fp32", "bf16", "fp16"]:
    if config.precision.compute != "auto":
        return config.precision.compute
    if config.precision.master == "bf16":
        return "bf16"
    return "bf16" if machine.is_gpu and machine.bf16 else "fp32"


def _sizes(search: _Search, layout: Layout, schedule: str, per_rank: int, rows: int) -> list[int]:
    """Return the micro-batch sizes to try, the largest first."""
    if layout.pp > 1:
        sizes = [rows // count for count in micro_batch_counts(schedule, rows, layout.pp, per_rank)]
    else:
        sizes = divisors(rows)
    if search.sets("train", "micro_batch"):
        given = search.config.train.micro_batch
        assert given is not None
        if layout.pp > 1:
            return [given] if given in sizes else []
        return [min(given, rows)]
    return sorted(sizes, reverse=True)[-_MOST_SIZES:]


def _policies(search: _Search, layout: Layout) -> list[tuple[Any, Sync]]:
    """Return the policies of resharding and of gradient reduction that a layout can have."""
    section = search.config.parallel
    reshards: list[Any] = ["always", "never"] if layout.fsdp > 1 else ["auto"]
    if layout.pp > 1:
        reshards = ["never"] if layout.fsdp > 1 else ["auto"]
    if search.sets("parallel", "reshard"):
        reshards = [section.reshard]
    syncs: list[Sync] = ["last", "each"] if layout.fsdp > 1 and layout.pp == 1 else ["last"]
    if "sync each" in search.exclude:
        syncs = ["last"]
    if section.sync != "auto":
        syncs = [section.sync]
    return list(product(reshards, syncs))


def _checkpointings(search: _Search, draft: Draft) -> Iterator[ActivationCheckpointing]:
    given = search.config.memory.activation_checkpointing
    if search.sets("memory", "activation_checkpointing") and given.kind != "auto":
        yield given
        return
    for text in _CHECKPOINTING:
        each = ActivationCheckpointing.parse(text)
        if each.kind not in search.exclude and not any(checkpointing_problems(draft, each)):
            yield each


def _fitting(
    search: _Search,
    draft: Draft,
    policy: tuple[str, int, Any, Sync],
    context: tuple[int, int],
    sizes: Sequence[int],
    rows: int,
) -> Iterator[Candidate]:
    """Yield the micro-batch sizes and kinds of checkpointing that fit; less recomputation is better."""
    schedule, per_rank, reshard, sync = policy
    layout, free = draft.layout, search.usable
    update = {"reshard": reshard, "sync": sync, "stages_per_rank": per_rank if layout.pp > 1 else None}
    parallel = draft.config.parallel.model_copy(update=update)
    draft = replace(draft, config=draft.config.model_copy(update={"parallel": parallel}))
    left = [size for size in sorted(sizes) if sync == "last" or size < rows]
    problem = next(setting_problems(draft), None)
    kinds = [] if problem else list(_checkpointings(search, draft))
    if problem or not kinds:
        what = (
            f"{problem.key} {problem.what}" if problem else "no kind of activation checkpointing is allowed"
        )
        search.reject(what, layout)
        return
    chunk = loss_chunk(draft)
    for checkpointing in kinds:
        choices = Choices(checkpointing, chunk, sync, reshards(reshard, layout))
        estimates, fitting = draft.estimates(choices), []
        failed = False
        for size in left:
            # larger ones need more, except for all sequences at once, which accumulates no gradients
            if failed and size < rows:
                search.too_large()
                continue
            choice = Choice(layout, schedule, per_rank, reshard, sync, checkpointing, size)
            needed = max(each.bytes(min(size, each.sequences)) for each in estimates)
            if needed <= free:
                fitting.append(size)
                yield _candidate(search, draft, choice, context, needed, rows)
                continue
            failed = True
            search.too_large(choice.__str__, needed)
        # a size that fits is not tried with more recomputation, which would be slower
        left = [size for size in left if size not in fitting]


def _candidate(
    search: _Search,
    draft: Draft,
    choice: Choice,
    context: tuple[int, int],
    memory: int,
    rows: int,
) -> Candidate:
    work = _work(search, draft, choice, context, rows)
    time = step_time(work, search.rates)
    search.considered += 1
    return Candidate(choice, work, time, memory, search.machine.memory_free)


def _work(search: _Search, draft: Draft, choice: Choice, context: tuple[int, int], rows: int) -> Work:
    count = -(-rows // choice.micro_batch)
    base = _base_work(search, draft)
    return replace(
        base,
        layout=choice.layout,
        micro_batch=rows / count,
        micro_batches=count,
        checkpointing=choice.checkpointing,
        compiled=draft.compiled,
        ulysses=context[0],
        ring=context[1],
        reshard=reshards(choice.reshard, choice.layout),
        sync_each=choice.sync == "each",
        schedule=choice.schedule,
        stages=_stages(search, choice),
    )


def _base_work(search: _Search, draft: Draft) -> Work:
    """Return the settings of the run file, which all candidates share."""
    memo = search.rates.memo
    key = ("work", draft.compute)
    if key not in memo:
        memo[key] = shared_work(search.config, search.spec, draft.compute)
    return memo[key]


def _stages(search: _Search, choice: Choice) -> tuple[int, ...]:
    stages = choice.layout.pp * choice.stages_per_rank if choice.layout.pp > 1 else 1
    return tuple(len(cut) for cut in cut_stages(search.spec, search.config.data.seq_len, stages))


def _checked(search: _Search, found: Sequence[Candidate], keep: int | None) -> Iterator[Candidate]:
    """Yield the candidates that `resolve` accepts too, the fastest first."""
    yielded = 0
    for candidate in found:
        if keep is not None and yielded >= keep:
            return
        try:
            resolved = resolve(candidate.choice.applied(search.config), search.machine, search.devices)
        except ConfigError as error:
            search.reject(f"{error.problems[0].key} {error.problems[0].what}", candidate.choice)
            continue
        yielded += 1
        parts = resolved.predicted_parts
        yield replace(candidate, memory=round(sum(parts.values())), parts=parts)
