"""Search the layouts of a run: enumerate, reject what is illegal or does not fit, rank by predicted time.

A key that the run file sets is kept, the rest is planned around it. Pure functions without torch: every rank
of a run comes to the same plan.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import inf, prod
from typing import Any

from arriero.config.keys import ConfigError
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline
from arriero.errors import UserError
from arriero.model.spec import ModelSpec
from arriero.plan.arithmetic import host_problem, variants
from arriero.plan.candidates import TOO_LARGE, Candidate, Choice, Constraint, Plan, Rejection
from arriero.plan.choose import Chooser, loss_chunk, micro_batch_sizes, preferred
from arriero.plan.hardware import Cluster, Machine
from arriero.plan.layout import AXES, SCHEDULES, Layout, divisors
from arriero.plan.memory import usable_bytes
from arriero.plan.rates import Rates
from arriero.plan.resolve import resolve
from arriero.plan.rules import Draft, spec_of
from arriero.plan.timing import step_time
from arriero.units import counted, human_bytes

# schedules worth a try with their stages per rank; gpipe, looped-bfs and dualpipev are dominated
_SCHEDULES = (("1f1b", (1,)), ("interleaved-1f1b", (2, 4)), ("zbv", (2,)), ("zero-bubble", (2,)))


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
    least: float = inf
    arithmetic: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def spec(self) -> ModelSpec:
        return spec_of(self.config)

    @cached_property
    def usable(self) -> float:
        """Bytes per device that a candidate may need by the estimate."""
        return usable_bytes(self.machine.memory_free, self.machine.is_gpu)

    @cached_property
    def too_large_reason(self) -> str:
        sizes = human_bytes(self.usable), human_bytes(self.machine.memory_free)
        return f"{TOO_LARGE} than {sizes[0]} of the {sizes[1]} that are free"

    @cached_property
    def sequences(self) -> int:
        return Timeline.of(self.config).phases[0].sequences

    def reject(self, reason: str, what: object, count: int = 1) -> None:
        # reasons that differ in numbers only are one
        found = self.rejected.setdefault(re.sub(r"\d+", "#", reason), [reason, 0, str(what)])
        found[1] += count

    def too_large(self, what: Callable[[], str], needed: float) -> None:
        """Count a candidate that does not fit; the example is the one that needs least."""
        found = self.rejected.setdefault(TOO_LARGE, [self.too_large_reason, 0, ""])
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
    explain: Mapping[str, int] | None = None,
    exclude: Collection[str] = (),
    memory_limit: int | None = None,
    rates: Rates | None = None,
    machine: Machine | None = None,
    keep: int | None = None,
) -> Plan:
    """Return the ranked candidates of a run on `devices` devices of a cluster.

    `fix`, `most` and `explain` constrain degrees; errors name the option. `exclude` leaves out schedules,
    'sync each', kinds of activation checkpointing or degrees like 'cp'. `memory_limit` is bytes per device.
    Raises UserError where constraints contradict each other; where nothing fits, the plan has no candidates.
    """
    machine = machine or cluster.machine
    if memory_limit is not None:
        machine = replace(machine, memory_free=min(memory_limit, machine.memory_free))
    search = _Search(config, cluster, machine, devices, (), exclude, rates or Rates(cluster))
    search.constraints = _constraints(search, fix or {}, most or {}, explain or {})
    layouts = _layouts(search)
    found: list[Candidate] = []
    for values in variants(config, machine):
        search.config, search.arithmetic = config.with_values(values), tuple(values.items())
        for layout in layouts:
            found += _without_wasteful(search, list(_candidates_of(search, layout)))
    considered = len(found) + sum(count for _, count, _ in search.rejected.values())
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
        considered,
        search.rates.used,
    )


def _constraints(
    search: _Search, fix: Mapping[str, int], most: Mapping[str, int], explain: Mapping[str, int]
) -> list[Constraint]:
    """Return all conditions on degrees, those of the run file included."""
    given = [
        Constraint(f"parallel.{axis} = {getattr(search.config.parallel, axis)}", axis, degree)
        for axis in AXES
        if search.sets("parallel", axis) and isinstance(degree := getattr(search.config.parallel, axis), int)
    ]
    for option, degrees in (("--fix", fix), ("--explain", explain)):
        given += [Constraint(f"{option} {axis}={degree}", axis, degree) for axis, degree in degrees.items()]
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


def _without_wasteful(search: _Search, every: list[Candidate]) -> list[Candidate]:
    """Leave out what is hardly faster than the settings that a run would choose, and needs more memory."""
    if not every:
        return []
    options = [(each.time.seconds, each.work.micro_batch, each.memory) for each in every]
    best = every[preferred(options, search.machine.is_gpu)]
    kept = [each for each in every if each.rank >= best.rank]
    if wasteful := [each.choice for each in every if each.rank < best.rank]:
        reason = "at most 1 % faster than the same layout with less memory"
        search.reject(reason, wasteful[0], len(wasteful))
    return kept


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
    """Yield what fits of one layout and schedule, with every combination of settings that is free."""
    values = {"parallel.schedule": schedule, "parallel.stages_per_rank": per_rank}
    config = search.config.with_values(values if layout.pp > 1 else {})
    draft = Draft.of(config, search.machine, search.spec, layout)
    problems = [*draft.problems()]
    sizes = micro_batch_sizes(draft, {}, problems)
    if problems:
        search.reject(f"{problems[0].key}: {problems[0].what}", layout)
        return
    default = loss_chunk(draft)
    for choices, (size, *_), needed in Chooser(draft, sizes, search.rates, exclude=search.exclude).settings():
        chunk = choices.chunk if choices.chunk != default else None
        choice = Choice(layout, schedule, per_rank, choices, size, chunk or None, search.arithmetic)
        if needed > search.usable:
            search.too_large(choice.__str__, needed)
            continue
        work = draft.work(choices, size)
        yield Candidate(choice, work, step_time(work, search.rates), needed, search.machine.memory_free)


def _checked(search: _Search, found: Sequence[Candidate], keep: int | None) -> Iterator[Candidate]:
    """Yield the candidates that `resolve` accepts too, the fastest first."""
    yielded = 0
    for candidate in found:
        if keep is not None and yielded >= keep:
            return
        try:
            config = search.config.with_values(candidate.choice.keys)
            resolved = resolve(config, search.machine, search.devices)
            if problem := host_problem(dict(search.arithmetic), resolved.host_bytes, search.machine):
                raise ConfigError([problem])
        except ConfigError as error:
            search.reject(f"{error.problems[0].key}: {error.problems[0].what}", candidate.choice)
            continue
        yielded += 1
        parts = resolved.predicted_parts
        yield replace(candidate, memory=round(sum(parts.values())), parts=parts)
