"""What a run will be, decided by each process alone and refused, where it cannot be, before any meet."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from arriero.config.schema import RunConfig
from arriero.config.timeline import Phase, Timeline, config_of
from arriero.errors import UserError
from arriero.model.spec import ModelSpec
from arriero.parallel.world import World
from arriero.plan.layout import Layout, Work, divide_context, refuse_illegal, resolve
from arriero.plan.memory import (
    MicroBatch,
    Need,
    loss_chunk,
    micro_batch_that_fits,
    need_of,
    refuse_too_large,
)
from arriero.plan.schedules import SCHEDULES, micro_batch_counts, stages_of, stages_per_rank
from arriero.plan.stages import cut_stages
from arriero.train.conflicts import conflicts
from arriero.train.device import Device, choose_compute, choose_device
from arriero.train.rundir import refuse_foreign
from arriero.train.session import Decision
from arriero.units import Span

_WORTH_COMPILING = 1_000_000


class Share(NamedTuple):
    """One rank's rows of a batch, and how many of them are computed at once."""

    sequences: int
    micro_batch: int


@dataclass(frozen=True)
class Arrangement:
    """`sequences` are one rank's rows of a batch, `later` those of later phases, `stages` the blocks of each
    of its stages."""

    config: RunConfig
    world: World
    device: Device
    compute: torch.dtype
    spec: ModelSpec
    layout: Layout
    ulysses: int
    stages: list[range]
    sequences: int
    micro_batch: int
    later: list[Share]
    loss_chunk: int | Literal[False]
    compiled: bool
    decisions: list[Decision]

    @property
    def shares(self) -> list[Share]:
        """Of every phase."""
        return [Share(self.sequences, self.micro_batch), *self.later]


def arrange(config: RunConfig, world: World) -> Arrangement:
    refuse_foreign(config)
    device = choose_device(config.run.device, world.local_rank, world.local_size)
    compute, compute_reason = choose_compute(config.precision.compute, device, config.precision.master)
    spec = ModelSpec.from_dict(config.model.model_dump(exclude={"preset"}))
    layout = resolve(config.parallel, world.size)
    per_rank = stages_per_rank(config.parallel.schedule, config.parallel.stages_per_rank)
    stages = layout.pp * per_rank if layout.pp > 1 else 1
    timeline = Timeline.of(config)
    for phase in timeline.phases:
        refuse_illegal(layout, Work(spec, phase.seq_len, phase.sequences, stages, config.parallel.context))
    heads, kv_heads = spec.heads // layout.tp, spec.kv_heads // layout.tp
    ulysses, ring = divide_context(layout.cp, heads, kv_heads, config.parallel.context)
    chunk, chunk_reason = loss_chunk(config, spec, layout, compute.itemsize, device.gpu_memory)
    shares, share_decisions = [], []
    largest = max(layout.rows(phase.sequences) for phase in timeline.phases)
    for phase in timeline.phases:
        sequences = layout.rows(phase.sequences)
        here = config_of(config, phase, sequences if (config.train.micro_batch or 0) <= largest else None)
        need = need_of(here, spec, layout, compute.itemsize, chunk, device.is_gpu)
        micro = _micro_batch(here, spec, layout, sequences, per_rank, need, device)
        shares.append(Share(sequences, micro.sequences))
        share_decisions.append(share_decision(phase, shares[-1], micro.reason))
    compiled, compile_reason = _compiled(config, spec, layout, device)
    if conflict := next(conflicts(config, spec, layout, compute, compiled, device), None):
        raise UserError(*conflict)
    cuts = cut_stages(spec, config.data.seq_len, stages)
    held = [0]
    if layout.pp > 1:
        rank = layout.coordinates(world.rank)["pp"]
        held = stages_of(config.parallel.schedule, rank, layout.pp, per_rank)
    decisions = [
        Decision("device", device.name, _origin(config.run.device, _kind(device))),
        Decision("compute", str(compute).removeprefix("torch."), compute_reason),
        Decision("compile", str(compiled).lower(), compile_reason),
        *share_decisions,
        Decision("loss chunk", f"{chunk:,} tokens" if chunk else "whole", chunk_reason),
        *_layout_decisions(config, layout, ulysses, ring, cuts),
    ]
    return Arrangement(
        config=config,
        world=world,
        device=device,
        compute=compute,
        spec=spec,
        layout=layout,
        ulysses=ulysses,
        stages=[cuts[i] for i in held],
        sequences=shares[0].sequences,
        micro_batch=shares[0].micro_batch,
        later=shares[1:],
        loss_chunk=chunk,
        compiled=compiled,
        decisions=decisions,
    )


def share_decision(phase: Phase, share: Share, reason: str) -> Decision:
    """Also used where the ranks agree on a smaller micro-batch."""
    value = f"{share.micro_batch} of {share.sequences} sequences"
    if not phase.step:
        return Decision("micro-batch", value, reason)
    rate = f", learning rate {phase.lr:g}" if phase.lr else ""
    work = f"{Span(phase.batch, 'tok')} a step in sequences of {phase.seq_len}{rate}, micro-batch {value}"
    return Decision(f"from step {phase.step + 1:,}", work, reason)


def _kind(device: Device) -> str:
    return "a GPU" if device.is_gpu else "no GPU here"


def _origin(setting: object, reason: str) -> str:
    return reason if setting == "auto" else "as configured"


def _layout_decisions(
    config: RunConfig, layout: Layout, ulysses: int, ring: int, cuts: list[range]
) -> list[Decision]:
    decisions = []
    if layout.ranks > 1:
        decisions.append(Decision("layout", str(layout), f"{layout.ranks} ranks"))
    if layout.cp > 1:
        kinds = [f"{name} {n}" for name, n in (("Ulysses", ulysses), ("ring", ring)) if n > 1]
        reason = _origin(config.parallel.context, "Ulysses as far as the heads divide")
        decisions.append(Decision("context", " x ".join(kinds), reason))
    if layout.pp > 1:
        blocks = " | ".join(str(len(cut)) for cut in cuts)
        decisions.append(Decision("stages", f"{blocks} blocks", "cut by cost, head and embedding included"))
    return decisions


def _compiled(config: RunConfig, spec: ModelSpec, layout: Layout, device: Device) -> tuple[bool, str]:
    if config.precision.compile != "auto":
        return config.precision.compile, "as configured"
    if device.is_gpu and layout.pp > 1 and SCHEDULES[config.parallel.schedule].splits_backward:
        return False, f"the schedule '{config.parallel.schedule}' splits the backward pass"
    if device.is_gpu and spec.block_parameters < _WORTH_COMPILING:
        return False, "blocks so small would not repay it"
    return device.is_gpu, "GPUs only"


def _micro_batch(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    sequences: int,
    per_rank: int,
    need: Need,
    device: Device,
) -> MicroBatch:
    """A pipeline needs equal micro-batches, and enough of them to keep the stages busy."""
    schedule, given = config.parallel.schedule, config.train.micro_batch
    counts = list(range(1, sequences + 1))
    if layout.pp > 1:
        counts = list(micro_batch_counts(schedule, sequences, layout.pp, per_rank))
        busy = [n for n in counts if n >= 4 * layout.pp] or counts[-1:]
        counts = counts if given else busy
    allowed = [sequences // n for n in counts if sequences % n == 0]
    uneven = given is not None and layout.pp == 1 and given <= sequences
    if not allowed or (given is not None and given not in allowed and not uneven):
        what = f"micro-batches of {given}" if allowed else "micro-batches"
        raise UserError(
            f"the {sequences} sequences of a rank cannot be cut into {what}"
            + (f" for the schedule '{schedule}' over {layout.pp} stages" if layout.pp > 1 else ""),
            "raise train.batch, or leave train.micro_batch out" if given else "raise train.batch",
        )
    refuse_too_large(need, spec, device.memory)
    if given is not None:
        return MicroBatch(given, "as configured")
    fits = micro_batch_that_fits(need, allowed, device.memory)
    if layout.pp == 1:
        # equal micro-batches, unless uneven ones halve their number
        every = sorted({-(-sequences // n) for n in counts})
        other = micro_batch_that_fits(need, every, device.memory)
        fits = other if other.sequences >= 2 * fits.sequences else fits
    else:
        count = sequences // fits.sequences
        return MicroBatch(fits.sequences, f"{count} micro-batches keep {layout.pp} ranks busy; {fits.reason}")
    return fits
