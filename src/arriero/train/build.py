"""The composition root: from a RunConfig to all a run needs, with the reason for each derived setting."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arriero import __version__
from arriero.config.schema import RunConfig
from arriero.data.builtin import Progress, prepare_builtin
from arriero.data.loader import Loader
from arriero.data.order import EvalStream, Source, Stream, split_heldout
from arriero.data.store import TokenStore
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
from arriero.train.hooks import EventsFile, Hook, MetricsFile, TensorBoard
from arriero.train.optim import Optimizer
from arriero.train.rundir import open_run_directory, refuse_foreign
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
        horizon = self.config.train.horizon
        return (
            None
            if horizon.unit == "s"
            else -(-horizon.in_tokens(self.tokens_per_step) // self.tokens_per_step)
        )

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


def build(config: RunConfig, progress: Progress, extra_hooks: Sequence[Hook] = ()) -> Session:
    """Everything that can be refused is refused before the run directory is touched."""
    refuse_foreign(config)
    _refuse_more_ranks(config)
    device = choose_device(config.run.device)
    compute, compute_reason = choose_compute(config.precision.compute, device)
    spec = model_spec(config)
    stores = [_open_source(source.path, Path(config.data.cache), progress) for source in config.data.sources]
    _refuse_small_vocabulary(spec, stores)
    stream, heldout = _streams(config, stores)

    sequences = config.train.batch.amount // config.data.seq_len
    fits = micro_batch_that_fits(spec, config.data.seq_len, sequences, compute.itemsize, device.memory)
    micro_batch = config.train.micro_batch or fits.sequences
    compiled = device.is_gpu if config.precision.compile == "auto" else config.precision.compile
    model = _initial_model(config, spec, device)
    optimizer = Optimizer(model, config.optim, compute)
    if compiled:
        for block in model.blocks:
            block.compile()

    run_dir = open_run_directory(config)
    written = [MetricsFile(), EventsFile(), *([TensorBoard()] if config.observe.tensorboard else [])]
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
        loader=Loader(stream, sequences, pin=device.is_gpu, documents=documents),
        evaluator=Evaluator(heldout, micro_batch, device.torch_device, documents) if heldout else None,
        evaluation=Cadence(config.eval.every, config.train.batch.amount),
        tokenizer=load_tokenizer(stores[0].tokenizer_path, eos_id=stores[0].eos_id),
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


def _open_source(path: str, cache: Path, progress: Progress) -> TokenStore:
    return TokenStore.open(
        prepare_builtin(path, cache, progress) if path.startswith("builtin:") else Path(path)
    )


def _refuse_small_vocabulary(spec: ModelSpec, stores: Sequence[TokenStore]) -> None:
    for store in stores:
        if store.vocab_size > spec.vocab_size:
            raise UserError(
                f"model.vocab_size is {spec.vocab_size}, below {store.vocab_size}, that of {store.directory}",
                f"set model.vocab_size to at least {store.vocab_size}",
            )


def _streams(config: RunConfig, stores: Sequence[TokenStore]) -> tuple[Stream, EvalStream | None]:
    heldout = config.eval.heldout.amount if config.eval.heldout else 0
    spans = [split_heldout(store, heldout) for store in stores]
    weights = [source.weight for source in config.data.sources]
    seq_len = config.data.seq_len
    train = [
        Source(store, span[0], weight) for store, span, weight in zip(stores, spans, weights, strict=True)
    ]
    stream = Stream(train, seq_len, config.run.seed)
    if not heldout:
        return stream, None
    return stream, EvalStream(
        [Source(store, span[1]) for store, span in zip(stores, spans, strict=True)], seq_len
    )


def _initial_model(config: RunConfig, spec: ModelSpec, device: Device) -> LanguageModel:
    if config.run.deterministic:
        make_deterministic()
    with torch.device("meta"):
        model = build_model(spec)
    model.to_empty(device=device.torch_device)
    model.init_weights(config.run.seed)
    return model
