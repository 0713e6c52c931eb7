"""The composition root: from a RunConfig to all a run needs, with the reason for each derived setting."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arriero import __version__
from arriero.config.schema import RunConfig
from arriero.data.order.ledger import refuse_changed_since
from arriero.data.order.loader import Batch, Loader
from arriero.data.order.order import Stream
from arriero.data.order.streams import (
    Outlook,
    build_streams,
    forecast,
    refuse_over_repetition,
    steps_within_caps,
)
from arriero.data.progress import Progress
from arriero.data.store.store import TokenStore
from arriero.data.tokens.tokenizer import Tokenizer, tokenizer_of
from arriero.errors import UserError
from arriero.model.base import LanguageModel
from arriero.model.build import build_model
from arriero.model.spec import ModelSpec, flops_per_token
from arriero.plan.memory import MicroBatch, micro_batch_that_fits
from arriero.train.cadence import Cadence
from arriero.train.device import Device, choose_compute, choose_device, make_deterministic
from arriero.train.evaluate import Evaluator
from arriero.train.hooks import EventsFile, Hook, Hooks, LedgerFile, MetricsFile, TensorBoard
from arriero.train.optim import Optimizer, named_parameters
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
    compute: torch.dtype
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
    most_steps: int | None
    run_dir: Path
    hooks: Hooks
    decisions: Sequence[Decision]

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch.amount

    @property
    def total_steps(self) -> int | None:
        """None when the end is a wall time."""
        return _total_steps(self.config)

    def finished(self, tokens: int, seconds: float) -> bool:
        """At the horizon; a run by wall time also where its data may not be read further."""
        if self.total_steps is not None:
            return tokens >= self.total_steps * self.tokens_per_step
        exhausted = self.most_steps is not None and tokens >= self.most_steps * self.tokens_per_step
        return exhausted or seconds >= self.config.train.horizon.amount

    @property
    def peak_flops(self) -> float | None:
        """Known for bf16 only: dividing fp32 work by it would make a false MFU."""
        return self.device.bf16_peak_flops if self.compute == torch.bfloat16 else None

    def flops(self, batch: Batch) -> float:
        """The honest work of a batch; under a document mask a token attends to its own document alone."""
        attended = None
        if batch.positions_BT is not None:
            attended = float((2 * batch.positions_BT + 1).double().mean())
        width = batch.tokens_BT.shape[1]
        return batch.real_tokens * flops_per_token(self.spec, width, attended=attended)

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
    compute, compute_reason = choose_compute(config.precision.compute, device, config.precision.master)
    spec = ModelSpec.from_dict(config.model.model_dump(exclude={"preset"}))
    sequences = config.train.batch.amount // config.data.seq_len
    fits = micro_batch_that_fits(spec, config.data.seq_len, sequences, compute.itemsize, device.memory)
    micro_batch = config.train.micro_batch or fits.sequences
    streams = build_streams(config, progress)
    _refuse_small_vocabulary(spec, streams.stores)
    refuse_over_repetition(streams, _total_steps(config))
    refuse_changed_since(run_directory(config), streams.train)
    most_steps = steps_within_caps(streams)
    tokenizer = tokenizer_of(streams.stores[0])

    model = _initial_model(config, spec, device)
    optimizer = _optimizer(config, model, compute)
    compiled = device.is_gpu if config.precision.compile == "auto" else config.precision.compile
    if compiled:
        for block in model.blocks.values():
            block.compile()

    run_dir = open_run_directory(config)
    written = [MetricsFile(), LedgerFile(), EventsFile(run_dir)]
    boards = [TensorBoard(run_dir)] if config.observe.tensorboard else []
    masked = config.data.document_mask
    return Session(
        config=config,
        spec=spec,
        device=device,
        compute=compute,
        model=model,
        optimizer=optimizer,
        schedule=make_shape(config.schedule, config.train),
        stream=streams.train,
        outlooks=forecast(streams, _total_steps(config)),
        loader=Loader(streams.train, sequences, pin=device.is_gpu, documents=masked),
        evaluator=Evaluator(streams.heldout, micro_batch, device, masked) if streams.heldout else None,
        evaluation=Cadence(config.eval.every, config.train.batch.amount),
        tokenizer=tokenizer,
        micro_batch=micro_batch,
        most_steps=most_steps,
        run_dir=run_dir,
        hooks=Hooks([*written, *boards, *extra_hooks]),
        decisions=[
            Decision(
                "device", device.name, _origin(config.run.device, "a GPU" if device.is_gpu else "no GPU here")
            ),
            Decision("compute", str(compute).removeprefix("torch."), compute_reason),
            Decision("compile", str(bool(compiled)).lower(), _origin(config.precision.compile, "GPUs only")),
            _micro_batch_decision(config, fits, sequences),
            *(
                [Decision("data lasts", f"{most_steps} steps", "max_epochs")]
                if most_steps is not None
                else []
            ),
        ],
    )


def _origin(setting: object, reason: str) -> str:
    return reason if setting == "auto" else "as configured"


def _micro_batch_decision(config: RunConfig, fits: MicroBatch, sequences: int) -> Decision:
    given = config.train.micro_batch
    reason = "as configured" if given else fits.reason
    return Decision("micro-batch", f"{given or fits.sequences} of {sequences} sequences", reason)


def _total_steps(config: RunConfig) -> int | None:
    horizon, batch = config.train.horizon, config.train.batch.amount
    return None if horizon.unit == "s" else -(-horizon.in_tokens(batch) // batch)


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


def _optimizer(config: RunConfig, model: LanguageModel, compute: torch.dtype) -> Optimizer:
    """Weights kept in bf16 are cast for good; else a model that computes in fewer bits has fp32 masters."""
    own = config.precision.master == "bf16"
    if own:
        model.to(torch.bfloat16)
    return Optimizer(
        named_parameters([model]),
        config.optim,
        masters_of=None if own or compute == torch.float32 else compute,
        scaled_loss=compute == torch.float16,
        seed=config.run.seed,
    )
