"""`bench step`: check the loss of a mode on a small model, then measure steps of an ordinary run."""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

from arriero.bench.cases import BF16, BF16_WEIGHTS, FLOAT8, FP32, MASKED, STATES, Case, Tolerance
from arriero.bench.machine import describe_code
from arriero.bench.measure import Measured, StepCounts, measure
from arriero.bench.parity import Parity
from arriero.bench.result import CodeVersion, Gate, MeasuredWork, Rate, StepResult
from arriero.config.fields import flat
from arriero.config.schema import RunConfig, SourceSection
from arriero.data.store.manifest import write_manifest
from arriero.data.store.shards import ShardWriter, dtype_for
from arriero.errors import UserError
from arriero.events import finite
from arriero.kernels import usable_on
from arriero.model.spec import FLOP_FORMULAS, attended_by, flops_per_token
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import World, world_from
from arriero.plan.hardware import peak_of
from arriero.plan.rules import spec_of
from arriero.train.build import arrange
from arriero.units import Span

TIMED = ["data", "forward", "backward", "clipping", "optimizer", "logging"]
OMITTED = ["evaluation", "checkpoints", "export"]
GATE_STEPS = 10
# half of the 16 sequences of a step, so that gradients accumulate
_MICRO_BATCH = 8
# a step of 1024 tokens has several such chunks, a sequence of 64 several such tiles
_LOSS_CHUNK, _FFN_TILE = 128, 24
_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_PLAIN: dict[str, Any] = {
    "precision.compile": False,
    "precision.master": "fp32",
    "precision.float8": "off",
    "precision.float8_exclude": [],
    "precision.float8_all_gather": False,
    "precision.float8_head": False,
    "precision.kernels": False,
    "memory.activation_checkpointing": "none",
    "memory.offload_activations": False,
    "memory.ffn_tile": False,
    "optim.state": "fp32",
}
# compiled code sums in another order
COMPILED = Tolerance(1e-4, 1e-4, inf)


def benchmark_run(config: RunConfig, steps: int, folder: Path) -> RunConfig:
    """Shorten a run to `steps` steps without what `OMITTED` names; the schedule keeps its shape."""
    horizon = config.train.horizon
    shape = config.schedule.horizon or (horizon if horizon.unit != "s" else None)
    changes = {
        "run": {"dir": str(folder), "name": "bench"},
        "data": {"phases": ()},
        "train": {"horizon": Span(steps, "steps")},
        "schedule": {"horizon": shape},
        "eval": {"heldout": False, "every": False},
        "checkpoint": {"every": False, "at_end": False, "export": False, "resume_from": None},
        "observe": {"sample": False},
    }
    sections = {name: getattr(config, name).model_copy(update=each) for name, each in changes.items()}
    return config.model_copy(update=sections)


@dataclass(frozen=True)
class DocumentLengths:
    """Log-normal document lengths in tokens; `sigma` is the standard deviation of the logarithm."""

    mean: float
    sigma: float = 1.0

    @staticmethod
    def parse(text: str) -> "DocumentLengths":
        try:
            lengths = DocumentLengths(*map(float, text.split(":", 1)))
        except ValueError:
            lengths = DocumentLengths(0)
        if not (1 <= lengths.mean <= 10**9 and 0 <= lengths.sigma <= 5):
            raise UserError(
                f"--documents {text} is not a distribution of lengths",
                "give MEAN or MEAN:SIGMA, for example 1000, or 8000:0 for documents of equal length",
            )
        return lengths

    def __str__(self) -> str:
        return f"log-normal, mean {self.mean:g}, sigma {self.sigma:g}"

    def draw(self, generator: np.random.Generator) -> int:
        return max(2, round(generator.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma)))

    def pack(self, rows: int, tokens: int, seed: int = 0) -> tuple[np.ndarray, float]:
        """Return the document number of each token of packed rows, and a token's mean document length."""
        generator = np.random.default_rng(seed)
        numbers, squares = np.zeros((rows, tokens), dtype=np.int64), 0
        for row in numbers:
            start = 0
            while start < tokens:
                length = min(self.draw(generator), tokens - start)
                row[start + length :] += 1
                start, squares = start + length, squares + length**2
        return numbers, squares / (rows * tokens)


def with_documents(config: RunConfig, lengths: DocumentLengths, steps: int, folder: Path) -> RunConfig:
    """Return the run with document masks on random tokens, enough for steps without repetition."""
    tokenizer = Tokenizer(BPE())
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary, generator = spec_of(config).vocab_size, np.random.default_rng(config.run.seed)
    with ShardWriter(folder, "00000", vocabulary) as writer:
        while writer.tokens < (steps + 1) * config.train.batch.amount:
            writer.add(np.append(generator.integers(1, vocabulary, lengths.draw(generator) - 1), 0))
        shard = writer.close()
    write_manifest(
        folder,
        [shard],
        tokenizer="tokenizer.json",
        vocab_size=vocabulary,
        eos_id=0,
        dtype=dtype_for(vocabulary),
        about={"document lengths": str(lengths)},
    )
    sources = (SourceSection(path=str(folder)),)
    data = config.data.model_copy(update={"sources": sources, "document_mask": True})
    return config.model_copy(update={"data": data})


@dataclass(frozen=True)
class Mode:
    """The keys of a run, resolved, that can make its losses differ from those of plain fp32."""

    sets: Mapping[str, Any]

    @property
    def reference(self) -> "Mode":
        """The same optimizer and documents in fp32; plain fp16 for fp16, because both skip first steps."""
        compute = "fp16" if self.sets["precision.compute"] == "fp16" else "fp32"
        kept = {key: value for key, value in self.sets.items() if not key.startswith("parallel.")}
        return Mode(kept | _PLAIN | {"precision.compute": compute})

    @property
    def is_reference(self) -> bool:
        """Whether this is plain fp32 with PyTorch's own kernels, not compiled, without recomputation."""
        return self.sets["precision.compute"] == "fp32" and self == self.reference

    def __str__(self) -> str:
        checkpointing = self.sets["memory.activation_checkpointing"]
        weights = ", bf16 weights" if self.sets["precision.master"] == "bf16" else ""
        float8, state = self.sets["precision.float8"], self.sets["optim.state"]
        parts = [
            self.sets["precision.compute"] + weights,
            "compiled" if self.sets["precision.compile"] else "",
            f"float8 {float8}" if float8 != "off" else "",
            "float8 head" if self.sets["precision.float8_head"] else "",
            f"{checkpointing} activation checkpointing" if checkpointing != "none" else "",
            "activations in host memory" if self.sets["memory.offload_activations"] else "",
            "ffn in tiles" if self.sets["memory.ffn_tile"] else "",
            "" if self.sets["optim.name"] == "adamw" else self.sets["optim.name"],
            f"{state} states" if state != "fp32" else "",
        ]
        return ", ".join(filter(None, parts))


def mode_of(config: RunConfig, compute: str, compiled: bool, kernels: bool) -> Mode:
    keys = [*_PLAIN, "data.document_mask", "data.packing"]
    sets = flat(config.model_dump(mode="json", exclude_none=True))
    sets = {key: sets[key] for key in sets if key in keys or (key.startswith("optim.") and key != "optim.lr")}
    sets |= {
        "precision.compute": _NAMES[compute],
        "precision.compile": compiled,
        "precision.kernels": kernels,
        "train.micro_batch": _MICRO_BATCH,
        "memory.loss_chunk": _LOSS_CHUNK if config.memory.loss_chunk else False,
        "memory.ffn_tile": _FFN_TILE if config.memory.ffn_tile else False,
    }
    # split layers and float8 all-gather use other kernels
    if config.precision.float8 != "off" and config.parallel.tp not in (1, -1, "auto"):
        sets["parallel.tp"] = 2
    if config.precision.float8 != "off" and config.precision.float8_all_gather:
        sets["parallel.dp_shard"] = 2
    return Mode(sets)


def tolerance_of(mode: Mode) -> Tolerance:
    """Add up the bounds of everything the mode does; final weights are compared by `bench parity` only."""
    sets, bounds = mode.sets, [FP32]
    is_fp32 = sets["precision.compute"] == "fp32"
    if sets["precision.compile"]:
        bounds.append(COMPILED)
    if sets["precision.master"] == "bf16":
        bounds.append(BF16_WEIGHTS)
    elif not is_fp32:
        bounds.append(BF16)
    if sets["data.document_mask"] and not is_fp32:
        bounds.append(MASKED)
    if sets["precision.float8"] != "off":
        bounds.append(FLOAT8)
    if sets["optim.state"] != "fp32":
        bounds.append(STATES[sets["optim.state"]])
    return Tolerance(sum(b.loss for b in bounds), sum(b.norm for b in bounds), inf)


def check_loss(mode: Mode, family: str, device: str, cache_dir: Path) -> Gate:
    """Train a small model in this mode and in its reference, in separate processes, and compare."""
    if mode == mode.reference:
        return Gate(needed=not mode.is_reference, holds=None)
    bounds = tolerance_of(mode)
    case = Case("gate", str(mode), mode.sets, mode.reference.sets, bounds)
    # the bounds were measured with this vocabulary
    common = {"run.device": device, "model.vocab_size": 4096, "train.horizon": f"{GATE_STEPS} steps"}
    verdict = Parity(family, cache_dir, common).compare(case)
    return Gate(
        needed=True,
        holds=verdict.holds,
        model=f"{family}-test",
        settings=dict(mode.sets),
        steps=GATE_STEPS,
        loss=finite(verdict.loss),
        loss_bound=bounds.loss,
        norm=finite(verdict.norm),
        norm_bound=bounds.norm,
        error=verdict.error,
    )


@dataclass(frozen=True)
class ResolvedMode:
    """The mode of a run on this machine, and the code that runs it."""

    mode: Mode
    device: str
    device_name: str
    code: CodeVersion


def resolve_mode(config: RunConfig, ranks: int) -> ResolvedMode:
    """Resolve the run in another process: one that has looked for GPUs cannot fork others that use them."""

    def decide() -> ResolvedMode:
        plan = arrange(config, World(0, ranks, 0, ranks))
        kernels = config.precision.kernels and usable_on(plan.device.torch_device)
        decided = plan.config.model_copy(update={"memory": plan.resolved.memory})
        mode = mode_of(decided, str(plan.dtype).removeprefix("torch."), plan.resolved.compiled, kernels)
        return ResolvedMode(mode, plan.device.torch_device.type, plan.device.name, describe_code())

    return run_ranks(decide, 1, leader_prints=False)


def _gate(here: ResolvedMode, family: str, cache_dir: Path, earlier: StepResult | None) -> Gate:
    """Return the check of an earlier result of the same mode, device and code, or a new one."""
    if earlier is not None:
        gate = earlier.gate
        same = (gate.model, gate.settings) == (f"{family}-test", here.mode.sets)
        if gate.holds and same and (earlier.device.name, earlier.code) == (here.device_name, here.code):
            return gate
    return check_loss(here.mode, family, here.device, cache_dir)


def benchmark(
    config: RunConfig,
    name: str,
    counts: StepCounts,
    ranks: int,
    gated: bool,
    earlier: StepResult | None,
    report: Callable[[str], None],
    documents: DocumentLengths | None = None,
    trace: Path | None = None,
) -> StepResult | Gate | None:
    """Check the loss, then measure; return the failed check instead of a result, and None on ranks above 0.

    `earlier` is a result whose check is reused if mode, device and code are the same. With `documents` the
    steps train on random tokens in packed documents of these lengths. `trace` is a file for the trace of
    the profiled steps.
    """
    launched = world_from().size > 1
    if launched and gated:
        raise UserError(
            "the loss check starts its own processes, and a launcher has started several",
            "use --nproc instead of the launcher, or --no-gate",
        )
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as folder:
        run = benchmark_run(config, counts.steps, Path(folder))
        if documents is not None:
            run = with_documents(run, documents, counts.steps, Path(folder) / "documents")
        gate, begun = Gate(needed=True, holds=None), time.time()
        if not launched:
            here = resolve_mode(run, ranks)
            if gated:
                report(f"checking the loss: {here.mode}")
                gate = _gate(here, spec_of(run).family, Path(config.data.cache), earlier)
                if gate.holds is False:
                    return gate
        counts = replace(counts, started=counts.started + time.time() - begun)
        report(f"{counts.warmup} + {counts.timed} steps")
        found = (
            measure(run, counts, trace) if launched else run_ranks(lambda: measure(run, counts, trace), ranks)
        )
    if found is None:
        return None
    # stored without the temporary directories, and with what "auto" became
    data = run.data.model_copy(update={"sources": config.data.sources})
    stored = run.model_copy(update={"run": config.run, "data": data, "memory": found.memory_section})
    return _result(stored.with_values(found.arithmetic), name, counts, found, gate, documents)


def _result(
    config: RunConfig,
    name: str,
    counts: StepCounts,
    found: Measured,
    gate: Gate,
    documents: DocumentLengths | None,
) -> StepResult:
    return StepResult(
        name=name,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=["arriero", *sys.argv[1:]],
        mode=str(mode_of(config, found.compute, found.compiled, config.precision.kernels)),
        layout=found.layout,
        ranks=found.ranks,
        micro_batch=found.micro_batch,
        work=_work(config, found, documents),
        timing=found.timing,
        rates=_rates(config, found),
        memory=found.memory,
        energy=found.energy,
        breakdown=found.breakdown,
        losses=found.losses,
        gate=gate,
        inside=TIMED,
        left_out=[*OMITTED, *(["warm-up steps"] if counts.warmup else [])],
        device=found.device,
        code=found.code,
        config=config.model_dump(mode="json"),
    )


def _work(config: RunConfig, found: Measured, documents: DocumentLengths | None) -> MeasuredWork:
    spec = spec_of(config)
    return MeasuredWork(
        model=spec.to_dict(),
        parameters=spec.parameters,
        tokens_per_step=config.train.batch.amount,
        seq_len=config.data.seq_len,
        document_mask=config.data.document_mask,
        documents=None if documents is None else str(documents),
        compute=found.compute,
        master=config.precision.master,
        float8=config.precision.float8,
        float8_head=config.precision.float8_head,
        optimizer=config.optim.name,
        optimizer_state=config.optim.state,
        clip=config.optim.clip,
    )


def _rates(config: RunConfig, found: Measured) -> list[Rate]:
    """Return the speed by every FLOP formula: MFU of the bf16 peak, for float8 also of its own peak."""
    spec = spec_of(config)
    # what the run counted itself, per document if documents are masked
    attended = attended_by(spec, found.flops_per_token) if config.data.document_mask else None
    peak = peak_of(found.device.name) if found.compute == "bfloat16" else None
    float8_peak = peak.fp8 if peak and config.precision.float8 != "off" else None
    rates = []
    for name, convention in FLOP_FORMULAS.items():
        count = flops_per_token(spec, config.data.seq_len, name, found.recompute, attended)
        speed = count * found.timing.tokens_per_s / found.ranks
        rates.append(
            Rate(
                convention=name,
                formula=convention.formula,
                flops_per_token=count,
                tflops_per_device=speed / 1e12,
                mfu=speed / peak.bf16 if peak else None,
                mfu_of_float8_peak=speed / float8_peak if float8_peak else None,
            )
        )
    return rates
