"""The composition root: from an arrangement to all a run needs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from arriero.checkpoint.directory import checkpoint_at, saved_in
from arriero.checkpoint.manager import Checkpoints
from arriero.checkpoint.pieces import pieces_of
from arriero.checkpoint.ranks import Ranks
from arriero.checkpoint.space import refuse_no_room
from arriero.checkpoint.state import bytes_of, described, flat
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
from arriero.errors import UserError
from arriero.kernels import enable_kernels
from arriero.kernels.float8 import computes_float8
from arriero.model.language_model import LanguageModel
from arriero.model.spec import ModelSpec
from arriero.parallel.apply import ModelOptions, parallelize
from arriero.parallel.context import cut_to, positions_held
from arriero.parallel.fsdp import Sharding
from arriero.parallel.loss import LossOptions
from arriero.parallel.mesh import Mesh, make_mesh
from arriero.parallel.pipeline import Pipeline, join_tied_table
from arriero.parallel.precision import Float8Layers, renew_scales
from arriero.parallel.world import leader_first
from arriero.plan.layout import SCHEDULES
from arriero.plan.resolve import Decision, Share
from arriero.train.arrange import Arrangement
from arriero.train.cadence import Cadence
from arriero.train.device import make_deterministic
from arriero.train.evaluate import Evaluator
from arriero.train.finish import check_export
from arriero.train.hooks import Hook, Hooks
from arriero.train.metrics import EventsFile, LedgerFile, MetricsFile, TensorBoard
from arriero.train.optim import Optimizer, named_parameters
from arriero.train.passes import Passes
from arriero.train.resume import Beginning, Restorer
from arriero.train.rundir import open_run_directory, run_directory, starts_over
from arriero.train.saving import Saver, everywhere
from arriero.train.schedule import Rates
from arriero.train.session import Session


def build(plan: Arrangement, progress: ProgressCallback, extra_hooks: Sequence[Hook] = ()) -> Session:
    """Called by all ranks together. What can be refused is refused before the run file is written."""
    config, device = plan.config, plan.device
    streams = _open_data(plan, progress)
    tokenizer, separators = tokenizer_of(streams.stores[0]), separators_of(streams.stores[0])
    most_steps = max_steps_by_epochs(streams)
    enable_kernels(config.precision.kernels)
    if config.run.deterministic:
        make_deterministic()
    mesh = make_mesh(plan.resolved.layout, plan.world, plan.resolved.ulysses, device.torch_device)
    plan = _agreed(plan, mesh)
    parts, float8 = parallelize(
        plan.resolved.spec,
        plan.resolved.stages_of(plan.world.rank),
        mesh,
        _model_options(plan),
        device.torch_device,
    )
    optimizer = _optimizer(plan, parts, mesh)
    tensors = everywhere(mesh, dict(described(pieces_of(flat(optimizer.weights(), optimizer.state())))))
    checkpoints = _checkpoints(plan, mesh, bytes_of(tensors))
    joined = partial(everywhere, mesh)
    restorer = Restorer(config.checkpoint, _ranks(plan, mesh), joined, optimizer, plan.resolved.spec)
    # rank 0 rewrites the run file below, perhaps before a slower rank would read it
    over = _ranks(plan, mesh).by_leader(lambda: starts_over(config))
    beginning = restorer.begin(checkpoints, streams.train, tokenizer, over)
    _refuse_other_steps(beginning, streams.timeline)
    _refuse_nothing_left(config, beginning)
    decisions = [
        *plan.resolved.decisions,
        *_found(config, most_steps, float8, device.torch_device),
        *_room(plan, mesh, checkpoints),
        *_ranks(plan, mesh).by_leader(
            lambda: check_export(config, plan.resolved.spec, tokenizer, separators)
        ),
        beginning.decision,
    ]
    _ranks(plan, mesh).by_leader(lambda: open_run_directory(config))
    ledger = LedgerFile(run_directory(config), beginning.checkpoint)
    return Session(
        config=config,
        resolved=plan.resolved,
        spec=plan.resolved.spec,
        device=device,
        compute=plan.dtype,
        mesh=mesh,
        parts=parts,
        phase_passes=_phase_passes(plan, parts, mesh),
        optimizer=optimizer,
        schedule=Rates(config),
        stream=streams.train,
        outlooks=forecast(streams, total_steps(config), plan.resolved.spec.vocab_size),
        loader=_loader(plan, mesh, streams, beginning.sample),
        evaluator=_evaluator(plan, mesh, streams),
        evaluation=Cadence(config.eval.every),
        tokenizer=tokenizer,
        separators=separators,
        most_steps=most_steps,
        run_dir=run_directory(config),
        hooks=_hooks(plan, ledger, extra_hooks),
        decisions=decisions,
        remarks=beginning.remarks,
        saver=Saver(
            checkpoints,
            Cadence(config.checkpoint.every),
            config.checkpoint.at_end,
            ledger,
            tensors,
            beginning.outcome.steps,
        ),
        outcome=beginning.outcome,
    )


def _agreed(plan: Arrangement, mesh: Mesh) -> Arrangement:
    """Resolve for the smallest memory of all ranks: they must take equally many micro-batches and chunks."""
    machine = plan.resolved.machine
    free, total = mesh.least(machine.memory_free), mesh.least(machine.memory_total)
    return replace(plan, resolved=plan.resolved.with_least_memory(free, total))


def _open_data(plan: Arrangement, progress: ProgressCallback) -> Streams:
    """The first rank makes what is not there yet; the others find it made."""
    config = plan.config
    with leader_first(plan.world):
        streams = build_streams(config, progress, _order_version(config))
    _refuse_small_vocabulary(plan.resolved.spec, streams.stores)
    check_max_epochs(streams, total_steps(config))
    check_data_unchanged(run_directory(config), streams.train)
    return streams


def _order_version(config: RunConfig) -> int:
    """Of the run, or of the checkpoint it continues."""
    run_dir, given = run_directory(config), config.checkpoint.resume_from
    known = [run_dir, *(saved.directory for saved in reversed(saved_in(run_dir)))]
    if len(known) == 1 and given and Path(given).is_dir():
        known.append(checkpoint_at(Path(given)))
    return order_version(*known)


def _refuse_other_steps(beginning: Beginning, timeline: Timeline) -> None:
    """A step's tokens and samples follow from its number: batches of the past cannot change."""
    steps = beginning.outcome.steps
    there = beginning.outcome.tokens, beginning.sample
    if there != (timeline.tokens_after(steps), timeline.samples_after(steps)):
        raise UserError(
            f"{beginning.checkpoint} read {there[0]:,} tokens in {steps} steps, and train.batch, "
            f"data.seq_len and data.phases say {timeline.tokens_after(steps):,}",
            "keep its train.batch, and change the batch from there on by a phase: "
            f"data.phases = [{{ at = '{steps} steps', batch = '...' }}]",
        )


def _found(
    config: RunConfig, most_steps: int | None, float8: Float8Layers, device: torch.device
) -> list[Decision]:
    """Decisions that depend on the dataset or the model, and values that look like mistakes."""
    found = [] if most_steps is None else [Decision("data lasts", f"{most_steps} steps", "max_epochs")]
    rates, steps = Rates(config), total_steps(config)
    if steps and config.schedule.warmup and rates.timeline.steps_of(config.schedule.warmup) > steps:
        peak = rates.share(steps - 1)
        why = f"longer than the run: the learning rate ends at {peak:.0%} of optim.lr"
        found.append(Decision("warm-up", str(config.schedule.warmup), why))
    if config.precision.float8 != "off":
        head = "the head and " if config.precision.float8_head else ""
        emulated = "" if computes_float8(device) else ", emulated: this device has no float8"
        found.append(Decision("float8", config.precision.float8, head + float8.summary + emulated))
    return found


def _refuse_nothing_left(config: RunConfig, beginning: Beginning) -> None:
    """A finished run may be exported again; a new one that could take no step is a mistake."""
    reached, steps = beginning.outcome, total_steps(config)
    horizon = config.train.horizon
    left = steps > reached.steps if steps is not None else horizon.amount > reached.seconds
    own = beginning.checkpoint is None or run_directory(config) in beginning.checkpoint.parents
    if not own and not left:
        raise UserError(
            f"{beginning.checkpoint} is at step {reached.steps}, and train.horizon is '{horizon}'",
            "raise train.horizon, which counts from step 0; `arriero ckpt convert` exports a checkpoint",
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


def _evaluator(plan: Arrangement, mesh: Mesh, streams: Streams) -> Evaluator | None:
    if streams.heldout is None:
        return None
    return Evaluator(streams.heldout, plan.resolved.micro_batch, mesh, plan.config.data.document_mask)


def _refuse_small_vocabulary(spec: ModelSpec, stores: Sequence[TokenStore]) -> None:
    for store in stores:
        if store.vocab_size > spec.vocab_size:
            raise UserError(
                f"model.vocab_size is {spec.vocab_size}, below {store.vocab_size}, that of {store.directory}",
                f"set model.vocab_size to at least {store.vocab_size}",
            )


def _model_options(plan: Arrangement) -> ModelOptions:
    config, parallel = plan.config, plan.config.parallel
    words = {"auto": plan.resolved.layout.pp == 1, "always": True, "never": False}
    reshard = words[parallel.reshard] if isinstance(parallel.reshard, str) else parallel.reshard
    sharding = Sharding(
        compute=plan.dtype,
        reduce=torch.bfloat16 if config.precision.reduce == "bf16" else torch.float32,
        reshard=reshard,
        prefetch=parallel.prefetch,
        offload=config.memory.offload_state,
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
    )


def _optimizer(plan: Arrangement, parts: Sequence[LanguageModel], mesh: Mesh) -> Optimizer:
    """FSDP casts its fp32 shards itself; elsewhere a model that computes in fewer bits has fp32 masters."""
    own = plan.config.precision.master == "bf16" or plan.dtype == torch.float32 or mesh.shards
    stages, tied = mesh.group("pp"), plan.resolved.spec.tied and plan.resolved.layout.pp > 1
    ends = None if SCHEDULES[plan.config.parallel.schedule].v_shaped else mesh.group("ends")
    return Optimizer(
        named_parameters(parts),
        plan.config.optim,
        masters_of=None if own else plan.dtype,
        scaled_loss=plan.dtype == torch.float16,
        seed=plan.config.run.seed,
        groups=[stages] if stages is not None else [],
        copies={"head.weight": "embedding.weight"} if tied else {},
        join=partial(join_tied_table, ends=ends) if tied else None,
    )


def _phase_passes(plan: Arrangement, parts: Sequence[LanguageModel], mesh: Mesh) -> list[Passes]:
    """One for each phase; phases with batches of the same shape share theirs."""
    made: dict[tuple[Share, int], Passes] = {}
    passes = []
    for phase, share in zip(Timeline.of(plan.config).phases, plan.resolved.shares, strict=True):
        key = share, phase.seq_len
        if key not in made:
            made[key] = _passes(plan, parts, mesh, *key)
        passes.append(made[key])
    return passes


def _passes(
    plan: Arrangement, parts: Sequence[LanguageModel], mesh: Mesh, share: Share, seq_len: int
) -> Passes:
    pipeline = None
    if plan.resolved.layout.pp > 1:
        pipeline = Pipeline(
            plan.config.parallel.schedule,
            parts,
            mesh,
            micro_batches=share.sequences // share.micro_batch,
            rows=share.micro_batch,
            tokens=seq_len // plan.resolved.layout.cp,
            compute=plan.dtype,
            device=plan.device.torch_device,
        )
    return Passes(
        parts,
        mesh,
        share.micro_batch,
        plan.device.torch_device,
        cut=partial(cut_to, held_t=_positions(seq_len, mesh)) if plan.resolved.layout.cp > 1 else None,
        pipeline=pipeline,
        sync_each=plan.config.parallel.sync == "each",
        renew=partial(renew_scales, settings=plan.config.precision),
    )


def _positions(seq_len: int, mesh: Mesh) -> torch.Tensor:
    return positions_held(seq_len, mesh.coordinate("cp"), mesh.ulysses, mesh.ring)


def _ranks(plan: Arrangement, mesh: Mesh) -> Ranks:
    return Ranks(plan.world.rank, plan.world.size, mesh.group("checkpoint"))


def _checkpoints(plan: Arrangement, mesh: Mesh, bytes_each: int) -> Checkpoints:
    section = plan.config.checkpoint
    period = Timeline.of(plan.config).tokens_of(section.keep_every) if section.keep_every else None
    return Checkpoints(
        run_directory(plan.config),
        _ranks(plan, mesh),
        bytes_each,
        keep=section.keep,
        period=period,
        background=section.background,
    )


def _room(plan: Arrangement, mesh: Mesh, checkpoints: Checkpoints) -> list[Decision]:
    """Said before training, not when the disk is full."""
    section = plan.config.checkpoint
    if not section.every and not section.at_end:
        return []
    room = _ranks(plan, mesh).by_leader(lambda: refuse_no_room(checkpoints.folder, checkpoints.bytes_each))
    scarce = "" if room.fits > section.keep else f"; fewer than checkpoint.keep + 1 = {section.keep + 1}"
    how = f"every {section.every}" if section.every else "at the end"
    return [Decision("checkpoints", f"{how}, the newest {section.keep} kept", f"{room}{scarce}")]


def _hooks(plan: Arrangement, ledger: LedgerFile, extra: Sequence[Hook]) -> Hooks:
    """All ranks keep the ledger, as each knows only what it read; the rest is written once."""
    if not plan.world.leads:
        return Hooks([ledger, *(hook for hook in extra if hook.on_all_ranks)])
    run_dir = run_directory(plan.config)
    boards = [TensorBoard(run_dir)] if plan.config.observe.tensorboard else []
    return Hooks([MetricsFile(run_dir), ledger, EventsFile(run_dir), *boards, *extra])
