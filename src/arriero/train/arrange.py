"""What a run will be, decided by each process alone: all that can be refused is refused before any meet."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from arriero.config.schema import RunConfig
from arriero.errors import UserError
from arriero.model.spec import ModelSpec
from arriero.parallel.world import World
from arriero.plan.layout import Layout, Work, divide_context, refuse_illegal, resolve
from arriero.plan.memory import MicroBatch, micro_batch_that_fits, need_of
from arriero.plan.schedules import SCHEDULES, micro_batch_counts, stages_of, stages_per_rank
from arriero.plan.stages import cut_stages
from arriero.train.device import Device, choose_compute, choose_device
from arriero.train.rundir import refuse_foreign
from arriero.train.session import Decision


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
    micro = _micro_batch(config, spec, layout, sequences, per_rank, compute, device)
    compiled, compile_reason = _compiled(config, layout, device)
    _refuse_conflicts(config, layout, compiled, device)
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
        *_layout_decisions(layout, ulysses, ring, cuts),
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
        compiled=compiled,
        decisions=decisions,
    )


def _kind(device: Device) -> str:
    return "a GPU" if device.is_gpu else "no GPU here"


def _origin(setting: object, reason: str) -> str:
    return reason if setting == "auto" else "as configured"


def _layout_decisions(layout: Layout, ulysses: int, ring: int, cuts: list[range]) -> list[Decision]:
    decisions = []
    if layout.ranks > 1:
        decisions.append(Decision("layout", str(layout), f"{layout.ranks} ranks"))
    if layout.cp > 1:
        kinds = [f"{name} {n}" for name, n in (("Ulysses", ulysses), ("ring", ring)) if n > 1]
        decisions.append(Decision("context", " x ".join(kinds), "Ulysses as far as the heads divide"))
    if layout.pp > 1:
        blocks = " | ".join(str(len(cut)) for cut in cuts)
        decisions.append(Decision("stages", f"{blocks} blocks", "cut by cost, head and embedding included"))
    return decisions


def _compiled(config: RunConfig, layout: Layout, device: Device) -> tuple[bool, str]:
    if config.precision.compile != "auto":
        return config.precision.compile, "as configured"
    if device.is_gpu and layout.pp > 1 and SCHEDULES[config.parallel.schedule].splits_backward:
        return False, f"the schedule '{config.parallel.schedule}' splits the backward pass"
    return device.is_gpu, "GPUs only"


def _micro_batch(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    sequences: int,
    per_rank: int,
    compute: torch.dtype,
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
    if given is not None:
        return MicroBatch(given, "as configured")
    need = need_of(config, spec, layout, compute.itemsize)
    fits = micro_batch_that_fits(need, spec, allowed, device.memory)
    if layout.pp > 1:
        count = sequences // fits.sequences
        return MicroBatch(fits.sequences, f"{count} micro-batches keep {layout.pp} ranks busy; {fits.reason}")
    return fits


def _refuse_conflicts(config: RunConfig, layout: Layout, compiled: bool, device: Device) -> None:
    for what, todo in _conflicts(config, layout, compiled, device):
        raise UserError(what, todo)


def _conflicts(
    config: RunConfig, layout: Layout, compiled: bool, device: Device
) -> Iterator[tuple[str, str]]:
    """Settings that are sound in themselves but not on this layout or device."""
    name = config.parallel.schedule
    splits = layout.pp > 1 and SCHEDULES[name].splits_backward
    if splits and config.memory.remat.kind == "selective":
        yield (
            f"the schedule '{name}' goes backward twice, and what memory.remat 'selective' keeps is gone "
            "after the first time",
            "set memory.remat to 'full' or 'none', or parallel.schedule to 'interleaved-1f1b'",
        )
    if splits and compiled:
        yield (
            f"the schedule '{name}' splits the backward pass, and compiled blocks cannot",
            "set precision.compile = false, or parallel.schedule = 'interleaved-1f1b'",
        )
    if config.data.packing == "none" and layout.cp * layout.tp * layout.pp > 1:
        yield (
            "data.packing 'none' makes batches of varying width, which cp, tp and pp cannot divide",
            "set data.packing to 'bestfit', or give the ranks to dp_shard",
        )
    if config.memory.offload_state and layout.dp_replicate * layout.fsdp == 1:
        yield (
            f"memory.offload_state moves shards, and the layout {layout} has none",
            "remove it, or give ranks to dp_shard",
        )
    group = config.parallel.reshard
    if isinstance(group, int) and layout.fsdp % group:
        yield (
            f"parallel.reshard ({group}) does not divide the {layout.fsdp} ranks that share a copy",
            "take a divisor, like the GPUs of a node",
        )
    if config.parallel.async_tp and not (layout.tp > 1 and compiled and device.is_gpu):
        yield (
            "parallel.async_tp overlaps the communication of compiled, tensor-parallel layers on GPUs",
            "remove it, or set parallel.tp and precision.compile on a GPU",
        )
