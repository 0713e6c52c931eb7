"""The composition root: build a model, or everything a run needs, from resolved settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from arriero.checkpoint.directory import find_checkpoints, require_space, resolve_checkpoint
from arriero.checkpoint.manager import Checkpoints
from arriero.checkpoint.state import TensorInfo, describe_parts, local_parts, named_tensors, total_bytes
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline, total_steps
from arriero.data.order.ledger import check_data_unchanged, order_version
from arriero.data.order.loader import Loader
from arriero.data.order.streams import (
    Streams,
    build_streams,
    check_max_epochs,
    forecast,
    max_steps_by_epochs,
)
from arriero.data.store.store import TokenStore
from arriero.data.tokens.tokenizer import separators_of, tokenizer_of
from arriero.data.workers import ProgressCallback
from arriero.errors import NodeError, UserError
from arriero.kernels import enable_kernels
from arriero.kernels.float8 import computes_float8
from arriero.model.adapters import is_adapter
from arriero.model.spec import ModelSpec
from arriero.parallel.apply import ModelOptions, parallelize
from arriero.parallel.context import local_positions, shard_batch
from arriero.parallel.fsdp import Sharding
from arriero.parallel.loss import LossOptions
from arriero.parallel.mesh import Mesh, make_mesh
from arriero.parallel.pipeline import Pipeline, sum_tied_gradients
from arriero.parallel.precision import renew_scales
from arriero.parallel.simulate import Simulation, simulate_step
from arriero.parallel.world import World, leader_first
from arriero.plan.hardware import Machine
from arriero.plan.layout import SCHEDULES
from arriero.plan.resolve import Decision, Resolved, Share, resolve
from arriero.train.device import (
    DTYPES,
    MEMORY_HELD,
    Device,
    choose_device,
    make_deterministic,
    memory_is_held,
)
from arriero.train.finish import check_export
from arriero.train.forward_backward import Evaluator, ForwardBackward
from arriero.train.guard import Guard
from arriero.train.hang import HangWatch
from arriero.train.hooks import Hook, Hooks
from arriero.train.metrics import EventsFile, LedgerFile, MetricsFile, TensorBoard
from arriero.train.model_state import ModelState, adapter_settings, parameter_decisions, speculator_section
from arriero.train.optim.optimizer import Optimizer
from arriero.train.plan_file import PlanFile
from arriero.train.profiler import ProfileOnDemand
from arriero.train.rank_process import GarbageCollection, RankLog, node_name
from arriero.train.resume import CheckpointLoader, StartingPoint, checkpoint_ranks, start_run
from arriero.train.rundir import (
    check_run_directory,
    open_run_directory,
    run_directory,
    started_with,
    starts_over,
    write_settings,
)
from arriero.train.saving import Saver, merge_over_stages
from arriero.train.schedule import Cadence, LearningRates
from arriero.train.session import RunRecord, Session, SessionData
from arriero.train.trackers import Tracker, check_trackers
from arriero.units import human_bytes


@dataclass(frozen=True)
class Arrangement:
    """A resolved run on the device of one rank."""

    resolved: Resolved
    world: World
    device: Device

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def dtype(self) -> torch.dtype:
        """The compute precision as torch's type."""
        return DTYPES[self.resolved.compute]


def arrange(config: RunConfig, world: World) -> Arrangement:
    """Choose the device of this rank and resolve the run for it."""
    check_run_directory(config)
    check_trackers(config.observe.trackers)
    device = choose_device(config.run.device, world.local_rank, world.local_size, config.run.share_gpu)
    return Arrangement(_resolved(config, device.machine(world.local_size), world), world, device)


def _resolved(config: RunConfig, machine: Machine, world: World) -> Resolved:
    """Resolve the run. If it would fit but for other processes on the GPU, that is an error of the node."""
    try:
        return resolve(config, machine, world.size, started_with(config))
    except UserError as error:
        held = machine.memory_total - machine.memory_free
        if config.run.share_gpu or not memory_is_held(held, machine.memory_total, 0):
            raise
        try:
            resolve(
                config, replace(machine, memory_free=machine.memory_total), world.size, started_with(config)
            )
        except UserError:
            raise error from None
        what = f"other processes use {human_bytes(held)} of the memory of {machine.name} on {node_name()}"
        raise NodeError(f"{what}, and the run would fit without them", MEMORY_HELD) from error


def build(plan: Arrangement, progress: ProgressCallback, extra_hooks: Sequence[Hook] = ()) -> Session:
    """Build a run. Called by all ranks together; rejects what it can before it writes the run file."""
    streams = open_data(plan, progress)
    mesh, plan = build_mesh(plan)
    # after the ranks agreed on the least memory
    config, device = plan.config, plan.device
    model, model_decisions = build_model_state(plan, mesh)
    optimizer = build_optimizer(plan, model, mesh)
    saved = local_parts(named_tensors(model.stored(), optimizer.state()))
    tensors = merge_over_stages(mesh, dict(describe_parts(saved)))
    checkpoints = _checkpoints(plan, mesh, total_bytes(tensors))
    ranks = checkpoint_ranks(mesh)
    # rank 0 rewrites the run file below, perhaps before a slower rank would read it
    start_over = ranks.on_leader(lambda: starts_over(config))
    loader = CheckpointLoader(model, mesh, config.checkpoint.load, optimizer)
    tokenizer, separators = tokenizer_of(streams.stores[0]), separators_of(streams.stores[0])
    start = start_run(config.checkpoint, loader, checkpoints, streams.train, tokenizer, start_over)
    _check_start(config, start, streams.timeline)
    decisions = [
        *plan.resolved.decisions,
        *_data_decisions(config, streams),
        *model_decisions,
        *_space_decisions(plan, mesh, checkpoints),
        *ranks.on_leader(lambda: check_export(config, plan.resolved.spec, tokenizer, separators)),
        start.decision,
    ]
    ranks.on_leader(lambda: open_run_directory(config))
    ranks.on_leader(lambda: write_settings(config, plan.resolved.open_settings))
    forecasts = forecast(streams, total_steps(config), plan.resolved.spec.vocab_size)
    batches = _loader(plan, mesh, streams, start.sample)
    max_steps = max_steps_by_epochs(streams)
    return Session(
        resolved=plan.resolved,
        device=device,
        compute=plan.dtype,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        schedule=LearningRates(config),
        phase_passes=_phase_passes(plan, model, mesh),
        data=SessionData(streams.train, batches, forecasts, tokenizer, separators, max_steps),
        evaluator=build_evaluator(plan, mesh, streams),
        evaluation=Cadence(config.eval.every),
        guard=_guard(plan, start),
        record=_record(
            plan, checkpoints, tensors, start, decisions, extra_hooks, ranks.on_all_ranks(node_name)
        ),
    )


def build_mesh(plan: Arrangement) -> tuple[Mesh, Arrangement]:
    """Create the process groups; return settings that all ranks agree on. Called by all ranks together."""
    enable_kernels(plan.config.precision.kernels)
    if plan.config.run.deterministic:
        make_deterministic()
    mesh = make_mesh(plan.resolved.layout, plan.world, plan.resolved.ulysses, plan.device.torch_device)
    machine = plan.resolved.machine
    free, total = mesh.min_over_all(machine.memory_free), mesh.min_over_all(machine.memory_total)
    return mesh, replace(plan, resolved=plan.resolved.with_least_memory(free, total))


def build_model_state(plan: Arrangement, mesh: Mesh) -> tuple[ModelState, list[Decision]]:
    """Build this rank's part of the model with its initial weights; it needs no optimizer.

    FSDP casts its fp32 shards itself. Elsewhere a model that computes in fewer bits gets master weights.
    """
    resolved, device = plan.resolved, plan.device.torch_device
    stages = resolved.stages_of(plan.world.rank)
    parts, float8 = parallelize(resolved.spec, stages, mesh, model_options(plan), device)
    has_own_masters = plan.config.precision.master == "bf16" or plan.dtype == torch.float32 or mesh.shards
    tied = {"head.weight": "embedding.weight"} if resolved.spec.tied and resolved.layout.pp > 1 else {}
    model = ModelState.of(parts, None if has_own_masters else plan.dtype, tied)
    adapter, base = adapter_settings(plan.config), plan.config.precision.base_weights
    speculator = speculator_section(plan.config)
    has_adapter = adapter is not None or speculator is not None
    model.freeze(["*"] if has_adapter else plan.config.optim.freeze, is_adapter)
    decisions = parameter_decisions(plan.config.optim, resolved.spec, adapter, base, speculator)
    if (precision := plan.config.precision).float8 != "off":
        head = "the head and " if precision.float8_head else ""
        emulated = "" if computes_float8(device) else ", emulated: this device has no float8"
        decisions.append(Decision("float8", precision.float8, head + float8.summary + emulated))
    return model, decisions


def model_options(plan: Arrangement) -> ModelOptions:
    config, parallel = plan.config, plan.config.parallel
    sharding = Sharding(
        compute=plan.dtype,
        reduce=torch.bfloat16 if config.precision.reduce == "bf16" else torch.float32,
        reshard=plan.resolved.reshard,
        prefetch=parallel.prefetch,
        offload=config.memory.offload_state is True,
    )
    return ModelOptions(
        sharding=sharding,
        compiled=plan.resolved.compiled,
        async_tp=parallel.async_tp,
        memory=plan.resolved.memory,
        precision=config.precision,
        loss=LossOptions(plan.resolved.loss_chunk, config.train.z_loss, config.precision.float8_head),
        weights=torch.bfloat16 if config.precision.master == "bf16" else torch.float32,
        splits_backward=plan.resolved.layout.pp > 1 and SCHEDULES[parallel.schedule].splits_backward,
        widths_vary=config.data.packing == "none",
        seed=config.run.seed,
        adapter=adapter_settings(config),
        speculator=speculator_section(config),
    )


def simulate(resolved: Resolved, rank: int = 0) -> Simulation:
    """Run one step of a rank of a resolved run on this CPU, with fake tensors and a fake process group."""
    world = World(rank, resolved.layout.ranks)
    plan = Arrangement(resolved, world, Device(torch.device("cpu"), resolved.machine.name, 0, None))
    return simulate_step(resolved, model_options(plan), rank)


def build_optimizer(plan: Arrangement, model: ModelState, mesh: Mesh) -> Optimizer:
    stages = mesh.group("pp")
    ends = None if SCHEDULES[plan.config.parallel.schedule].v_shaped else mesh.group("ends")
    return Optimizer(
        model,
        plan.config.optim,
        scaled_loss=plan.dtype == torch.float16,
        seed=plan.config.run.seed,
        stage_groups=[stages] if stages is not None else [],
        join_tied=partial(sum_tied_gradients, ends=ends) if model.tied else None,
    )


def open_data(plan: Arrangement, progress: ProgressCallback) -> Streams:
    """Open the datasets and check them; rank 0 first prepares what does not exist yet."""
    config = plan.config
    with leader_first(plan.world):
        streams = build_streams(config, progress, _order_version(config))
    check_vocabulary(plan.resolved.spec, streams.stores)
    check_max_epochs(streams, total_steps(config))
    check_data_unchanged(run_directory(config), streams.train)
    return streams


def _order_version(config: RunConfig) -> int:
    """Return the version of the data order of the run, or of the checkpoint it resumes from."""
    run_dir, given = run_directory(config), config.checkpoint.resume_from
    known = [run_dir, *(saved.directory for saved in reversed(find_checkpoints(run_dir)))]
    if len(known) == 1 and given and Path(given).is_dir():
        known.append(resolve_checkpoint(Path(given)))
    return order_version(*known)


def check_vocabulary(spec: ModelSpec, stores: Sequence[TokenStore]) -> None:
    for store in stores:
        if store.vocab_size > spec.vocab_size:
            raise UserError(
                f"model.vocab_size is {spec.vocab_size}, below {store.vocab_size}, that of {store.directory}",
                f"set model.vocab_size to at least {store.vocab_size}",
            )


def _loader(plan: Arrangement, mesh: Mesh, streams: Streams, start_sample: int) -> Loader:
    return Loader(
        streams.train,
        lambda sample: streams.timeline.at_sample(sample).sequences,
        start_sample=start_sample,
        rank=mesh.batch_rank,
        ranks=plan.resolved.layout.batch,
        pin=plan.device.is_gpu,
        documents=plan.config.data.document_mask,
        threads=plan.config.data.reader_threads or streams.reader_threads,
    )


def build_evaluator(plan: Arrangement, mesh: Mesh, streams: Streams) -> Evaluator | None:
    if not streams.heldout:
        return None
    return Evaluator(streams.heldout, plan.resolved.micro_batch, mesh, plan.config.data.document_mask)


def _phase_passes(plan: Arrangement, model: ModelState, mesh: Mesh) -> list[ForwardBackward]:
    """Return one for each phase; phases with batches of the same shape share theirs."""
    made: dict[tuple[Share, int], ForwardBackward] = {}
    passes = []
    for phase, share in zip(Timeline.of(plan.config).phases, plan.resolved.shares, strict=True):
        key = share, phase.seq_len
        if key not in made:
            made[key] = build_passes(plan, model, mesh, *key)
        passes.append(made[key])
    return passes


def build_passes(
    plan: Arrangement, model: ModelState, mesh: Mesh, share: Share, seq_len: int
) -> ForwardBackward:
    pipeline = None
    if plan.resolved.layout.pp > 1:
        pipeline = Pipeline(
            plan.config.parallel.schedule,
            model.parts,
            mesh,
            micro_batches=share.sequences // share.micro_batch,
            rows=share.micro_batch,
            tokens=seq_len // plan.resolved.layout.cp,
            compute=plan.dtype,
            device=plan.device.torch_device,
        )
    cut = None
    if plan.resolved.layout.cp > 1:
        cut = partial(
            shard_batch, held_t=local_positions(seq_len, mesh.coordinate("cp"), mesh.ulysses, mesh.ring)
        )
    return ForwardBackward(
        model.parts,
        mesh,
        share.micro_batch,
        plan.device.torch_device,
        cut=cut,
        pipeline=pipeline,
        sync_each=plan.resolved.sync == "each",
        keeps_gathered=plan.resolved.reshard is False,
        refresh_scales=partial(renew_scales, settings=plan.config.precision),
        dropout_seed=(plan.config.run.seed, plan.world.rank) if plan.config.lora.dropout else None,
    )


def _checkpoints(plan: Arrangement, mesh: Mesh, bytes_each: int) -> Checkpoints:
    section = plan.config.checkpoint
    period = Timeline.of(plan.config).tokens_of(section.keep_every) if section.keep_every else None
    return Checkpoints(
        run_directory(plan.config),
        checkpoint_ranks(mesh),
        bytes_each,
        keep=section.keep,
        period=period,
        background=section.background,
    )


def _check_start(config: RunConfig, start: StartingPoint, timeline: Timeline) -> None:
    """Reject a start at which past batches would differ, and a new run without a step to take."""
    reached, steps = start.outcome, total_steps(config)
    tokens, samples = timeline.tokens_after(reached.steps), timeline.samples_after(reached.steps)
    if (reached.tokens, start.sample) != (tokens, samples):
        raise UserError(
            f"{start.checkpoint} read {reached.tokens:,} tokens in {reached.steps} steps, and train.batch, "
            f"data.seq_len and data.phases say {tokens:,}",
            "keep its train.batch, and change the batch from there on by a phase: "
            f"data.phases = [{{ at = '{reached.steps} steps', batch = '...' }}]",
        )
    horizon = config.train.horizon
    left = steps > reached.steps if steps is not None else horizon.amount > reached.seconds
    # a finished run may be exported again
    own = start.checkpoint is None or run_directory(config) in start.checkpoint.parents
    if not own and not left:
        raise UserError(
            f"{start.checkpoint} is at step {reached.steps}, and train.horizon is '{horizon}'",
            "raise train.horizon, which counts from step 0; `arriero ckpt convert` exports a checkpoint",
        )


def _data_decisions(config: RunConfig, streams: Streams) -> list[Decision]:
    """Report how long the data lasts, and a warm-up that is longer than the run."""
    last = max_steps_by_epochs(streams)
    decisions = [] if last is None else [Decision("data lasts", f"{last} steps", "max_epochs")]
    rates, steps = LearningRates(config), total_steps(config)
    if steps and config.schedule.warmup and rates.timeline.steps_of(config.schedule.warmup) > steps:
        peak = rates.fraction(steps - 1)
        why = f"longer than the run: the learning rate ends at {peak:.0%} of optim.lr"
        decisions.append(Decision("warm-up", str(config.schedule.warmup), why))
    return decisions


def _space_decisions(plan: Arrangement, mesh: Mesh, checkpoints: Checkpoints) -> list[Decision]:
    """Reject a disk without space for one checkpoint; report how many fit."""
    section, ranks = plan.config.checkpoint, checkpoint_ranks(mesh)
    if not section.every and not section.at_end:
        return []
    space = ranks.on_leader(lambda: require_space(checkpoints.folder, checkpoints.bytes_each))
    scarce = "" if space.fits > section.keep else f"; fewer than checkpoint.keep + 1 = {section.keep + 1}"
    how = f"every {section.every}" if section.every else "at the end"
    return [Decision("checkpoints", f"{how}, the newest {section.keep} kept", f"{space}{scarce}")]


def _guard(plan: Arrangement, start: StartingPoint) -> Guard:
    guard = Guard(plan.config.guard, plan.device.torch_device, scaled_loss=plan.dtype == torch.float16)
    guard.load(start.guard)
    return guard


def _record(
    plan: Arrangement,
    checkpoints: Checkpoints,
    tensors: TensorInfo,
    start: StartingPoint,
    decisions: Sequence[Decision],
    extra_hooks: Sequence[Hook],
    nodes: Sequence[str],
) -> RunRecord:
    section = plan.config.checkpoint
    ledger = LedgerFile(run_directory(plan.config), start.checkpoint)
    every = Cadence(section.every)
    stops = section.on_usr1 == "stop"
    saver = Saver(checkpoints, every, section.at_end, ledger, tensors, start.outcome.steps, stops)
    hooks = _hooks(plan, ledger, extra_hooks)
    about = {"new_weights": start.new_weights, "nodes": nodes}
    return RunRecord(hooks, saver, decisions, start.remarks, start.outcome, **about)


def _hooks(plan: Arrangement, ledger: LedgerFile, extra: Sequence[Hook]) -> Hooks:
    """All ranks keep the ledger, because each knows only what it read; rank 0 writes everything else."""
    run_dir, gc_every = run_directory(plan.config), plan.config.train.gc_every
    guard = plan.config.guard
    everywhere = [
        RankLog(run_dir, plan.world),
        *([GarbageCollection(gc_every)] if gc_every else []),
        *([HangWatch(run_dir, plan.world, guard)] if guard.hang_factor else []),
        ledger,
    ]
    if not plan.world.is_leader:
        return Hooks([*everywhere, *(hook for hook in extra if hook.on_all_ranks)])
    observe = plan.config.observe
    boards = [TensorBoard(run_dir)] if observe.tensorboard else []
    boards += [Tracker(name, run_dir) for name in observe.trackers]
    files = [MetricsFile(run_dir), EventsFile(run_dir), PlanFile(run_dir)]
    return Hooks([*everywhere, *files, ProfileOnDemand(run_dir), *boards, *extra])
