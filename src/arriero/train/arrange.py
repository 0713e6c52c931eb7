"""What a run will be, decided by each process alone and refused, where it cannot be, before any meet."""

from dataclasses import dataclass
from typing import Literal

import torch

from arriero.config.schema import RunConfig
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

_WORTH_COMPILING = 1_000_000


@dataclass(frozen=True)
class Arrangement:
    """`sequences` is one rank's share of a batch, `stages` the blocks of each of its stages."""

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
    loss_chunk: int | Literal[False]
    compiled: bool
    decisions: list[Decision]


def arrange(config: RunConfig, world: World) -> Arrangement:
    refuse_foreign(config)
    device = choose_device(config.run.device, world.local_rank, world.local_size)
    compute, compute_reason = choose_compute(config.precision.compute, device, config.precision.master)
    spec = ModelSpec.from_dict(config.model.model_dump(exclude={"preset"}))
    layout = resolve(config.parallel, world.size)
    per_rank = stages_per_rank(config.parallel.schedule, config.parallel.stages_per_rank)
    stages = layout.pp * per_rank if layout.pp > 1 else 1
    batch = config.train.batch.amount // config.data.seq_len
    refuse_illegal(layout, Work(spec, config.data.seq_len, batch, stages, config.parallel.context))
    heads, kv_heads = spec.heads // layout.tp, spec.kv_heads // layout.tp
    ulysses, ring = divide_context(layout.cp, heads, kv_heads, config.parallel.context)
    sequences = batch // layout.batch
    chunk, chunk_reason = loss_chunk(config, spec, layout, compute.itemsize, device.gpu_memory)
    need = need_of(config, spec, layout, compute.itemsize, chunk, device.is_gpu)
    micro = _micro_batch(config, spec, layout, sequences, per_rank, need, device)
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
        Decision("micro-batch", f"{micro.sequences} of {sequences} sequences", micro.reason),
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
        sequences=sequences,
        micro_batch=micro.sequences,
        loss_chunk=chunk,
        compiled=compiled,
        decisions=decisions,
    )


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
    """In a pipeline there must be enough of them, and many keep the stages busy."""
    counts = list(range(1, sequences + 1))
    schedule = config.parallel.schedule
    if layout.pp > 1:
        counts = list(micro_batch_counts(schedule, sequences, layout.pp, per_rank))
        busy = [n for n in counts if n >= 4 * layout.pp] or counts[-1:]
        counts = counts if config.train.micro_batch else busy
    allowed = [sequences // n for n in counts if sequences % n == 0]
    given = config.train.micro_batch
    if not allowed or (given is not None and given not in allowed):
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
    if layout.pp > 1:
        count = sequences // fits.sequences
        return MicroBatch(fits.sequences, f"{count} micro-batches keep {layout.pp} ranks busy; {fits.reason}")
    return fits
