"""The composition root: from a RunConfig to all a run needs, with the reason for each derived setting."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arriero import __version__
from arriero.config.schema import RunConfig
from arriero.data.bestfit import Counting
from arriero.data.ledger import refuse_changed_since
from arriero.data.loader import Loader
from arriero.data.order import Stream
from arriero.data.store import TokenStore
from arriero.data.streams import Outlook, build_streams, forecast, refuse_over_repetition
from arriero.data.tokenizer import Tokenizer, load_tokenizer
from arriero.errors import UserError
from arriero.events import EventLog
from arriero.model.base import LanguageModel
from arriero.model.build import build_model
from arriero.model.presets import resolve
from arriero.model.spec import ModelSpec, flops_per_token
from arriero.plan.memory import micro_batch_that_fits
from arriero.train.cadence import Cadence
from arriero.train.device import Device, choose_compute, choose_device, make_deterministic
from arriero.train.evaluate import Evaluator
from arriero.train.hooks import EventsFile, Hook, LedgerFile, MetricsFile, TensorBoard
from arriero.train.optim import Optimizer
from arriero.train.rundir import open_run_directory, refuse_foreign, run_directory
from arriero.train.schedule import Shape, make_shape


@dataclass(frozen=True)
class Decision:
    """A setting that was derived, not given."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Session:
    """A run, ready to start."""

    config: RunConfig
    spec: ModelSpec
    device: Device
    model: LanguageModel
    optimizer: Optimizer
    schedule: Shape
    stream: Stream
    outlooks: Sequence[Outlook]
    loader: Loader
    evaluator: Evaluator | None
    evaluation: Cadence
    tokenizer: Tokenizer
    micro_batch: int
    flops_per_token: float
    run_dir: Path
    events: EventLog
    hooks: Sequence[Hook]
    decisions: Sequence[Decision]

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch.amount

    @property
    def total_steps(self) -> int | None:
        """None when the end is a wall time."""
        return _total_steps(self.config)

    def finished(self, tokens: int, seconds: float) -> bool:
        if self.total_steps is None:
            return seconds >= self.config.train.horizon.amount
        return tokens >= self.total_steps * self.tokens_per_step

    def notify(self, moment: str, *details: Any) -> None:
        for hook in self.hooks:
            getattr(hook, moment)(self, *details)

    def describe(self) -> dict[str, Any]:
        return {
            "run": self.config.run.name,
            "device": self.device.name,
            "parameters": self.spec.parameters,
            "data": self.loader.state()["fingerprint"],
            "versions": {
                "arriero": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }


def _total_steps(config: RunConfig) -> int | None:
    horizon, batch = config.train.horizon, config.train.batch.amount
    return None if horizon.unit == "s" else -(-horizon.in_tokens(batch) // batch)


def build(config: RunConfig, progress: Counting, extra_hooks: Sequence[Hook] = ()) -> Session:
    """Everything that can be refused is refused before the run directory is touched."""
    refuse_foreign(config)
    _refuse_more_ranks(config)
    device = choose_device(config.run.device)
    compute, compute_reason = choose_compute(config.precision.compute, device)
    spec = model_spec(config)
    streams = build_streams(config, progress)
    _refuse_small_vocabulary(spec, streams.stores)
    refuse_over_repetition(streams, _total_steps(config))
    refuse_changed_since(run_directory(config), streams.train)

    sequences = streams.batch_sequences
    fits = micro_batch_that_fits(spec, config.data.seq_len, sequences, compute.itemsize, device.memory)
    micro_batch = config.train.micro_batch or fits.sequences
    compiled = device.is_gpu if config.precision.compile == "auto" else config.precision.compile
    model = _initial_model(config, spec, device)
    optimizer = Optimizer(model, config.optim, compute)
    if compiled:
        for block in model.blocks:
            block.compile()

    run_dir = open_run_directory(config)
    written = [
        MetricsFile(),
        LedgerFile(),
        EventsFile(),
        *([TensorBoard()] if config.observe.tensorboard else []),
    ]
    documents = config.data.document_mask
    decisions = [
        Decision(
            "device", device.name, "as configured" if config.run.device != "auto" else "the best one here"
        ),
        Decision("compute", str(compute).removeprefix("torch."), compute_reason),
        Decision(
            "compile",
            str(bool(compiled)).lower(),
            "auto: on for GPUs" if config.precision.compile == "auto" else "as configured",
        ),
        Decision(
            "micro-batch",
            f"{micro_batch} of {sequences} sequences",
            "as configured" if config.train.micro_batch else fits.reason,
        ),
    ]
    return Session(
        config=config,
        spec=spec,
        device=device,
        model=model,
        optimizer=optimizer,
        schedule=make_shape(config.schedule, config.train),
        stream=streams.train,
        outlooks=forecast(streams, _total_steps(config)),
        loader=Loader(streams.train, sequences, pin=device.is_gpu, documents=documents),
        evaluator=Evaluator(streams.heldout, micro_batch, device.torch_device, documents)
        if streams.heldout
        else None,
        evaluation=Cadence(config.eval.every, config.train.batch.amount),
        tokenizer=load_tokenizer(streams.stores[0].tokenizer_path),
        micro_batch=micro_batch,
        flops_per_token=flops_per_token(spec, config.data.seq_len),
        run_dir=run_dir,
        events=EventLog(run_dir / "events.jsonl"),
        hooks=[*written, *extra_hooks],
        decisions=decisions,
    )


def model_spec(config: RunConfig) -> ModelSpec:
    return resolve(config.model.preset, config.model.model_dump(exclude={"preset"}))


def _refuse_more_ranks(config: RunConfig) -> None:
    p = config.parallel
    ranks = p.dp_replicate * abs(p.dp_shard) * p.cp * p.tp * p.pp
    if ranks != 1:
        raise UserError(
            f"[parallel] asks for {ranks} ranks but this run has 1 process", "set its degrees to 1"
        )


def _refuse_small_vocabulary(spec: ModelSpec, stores: Sequence[TokenStore]) -> None:
    for store in stores:
        if store.vocab_size > spec.vocab_size:
            raise UserError(
                f"model.vocab_size is {spec.vocab_size}, below {store.vocab_size}, that of {store.directory}",
                f"set model.vocab_size to at least {store.vocab_size}",
            )


def _initial_model(config: RunConfig, spec: ModelSpec, device: Device) -> LanguageModel:
    if config.run.deterministic:
        make_deterministic()
    with torch.device("meta"):
        model = build_model(spec)
    model.to_empty(device=device.torch_device)
    model.init_weights(config.run.seed)
    return model
