"""`bench step`: one configuration, trained as `arriero train` trains it, judged and measured."""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

from arriero.bench.gate import Mode, as_written, judge, mode_of, sets_of
from arriero.bench.machine import describe_code
from arriero.bench.measure import Measured, Plan, measure
from arriero.bench.result import Code, Energy, Gate, Memory, Rate, Result, Timing, Work
from arriero.config.schema import RunConfig, SourceSection
from arriero.data.store.manifest import write_manifest
from arriero.data.store.shards import ShardWriter, dtype_for
from arriero.errors import UserError
from arriero.kernels import usable_on
from arriero.model.spec import FLOP_FORMULAS, ModelSpec, attended_by, flops_per_token
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import World, world_from
from arriero.plan.hardware import peak_of
from arriero.train.arrange import arrange
from arriero.units import Span

INSIDE = ["data", "forward", "backward", "clipping", "optimizer", "logging"]
LEFT_OUT = ["evaluation", "checkpoints", "export"]


def benchmark_run(config: RunConfig, steps: int, folder: Path) -> RunConfig:
    """The run cut to so many steps, without what `LEFT_OUT` names; the schedule keeps its shape."""
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
    """Log-normal lengths in tokens; `sigma` is the standard deviation of their logarithm."""

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


def with_documents(config: RunConfig, lengths: DocumentLengths, steps: int, folder: Path) -> RunConfig:
    """The same run with document masks on random tokens, of which every step reads others."""
    tokenizer = Tokenizer(BPE())
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary, generator = _spec(config).vocab_size, np.random.default_rng(config.run.seed)
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
class Here:
    """How a run computes on this machine, and by what code."""

    mode: Mode
    device: str
    device_name: str
    code: Code


def mode_here(config: RunConfig, ranks: int) -> Here:
    """Asked in a process of its own, as one that has looked for GPUs cannot fork others that use them.
    Refuses what the run itself would refuse."""

    def decide() -> Here:
        plan = arrange(config, World(0, ranks, 0, ranks))
        kernels = config.precision.kernels and usable_on(plan.device.torch_device)
        decided = config.model_copy(update={"memory": plan.resolved.memory})
        mode = mode_of(decided, str(plan.dtype).removeprefix("torch."), plan.resolved.compiled, kernels)
        return Here(mode, plan.device.torch_device.type, plan.device.name, describe_code())

    return run_ranks(decide, 1, leader_prints=False)


def _gate(here: Here, family: str, cache_dir: Path, earlier: Result | None) -> Gate:
    if earlier is not None:
        gate = earlier.gate
        same = (gate.model, gate.settings) == (f"{family}-test", as_written(sets_of(here.mode)))
        if gate.holds and same and (earlier.device.name, earlier.code) == (here.device_name, here.code):
            return gate
    return judge(here.mode, family, here.device, cache_dir)


def benchmark(
    config: RunConfig,
    name: str,
    plan: Plan,
    ranks: int,
    gated: bool,
    earlier: Result | None,
    tell: Callable[[str], None],
    documents: DocumentLengths | None = None,
) -> Result | Gate | None:
    """A gate that did not hold instead of a result; None on ranks that do not lead.

    `earlier` is a result whose gate serves here too, if it is of the same mode, device and code.
    With `documents` the steps train on random tokens in packed documents of these lengths.
    """
    launched = world_from().size > 1
    if launched and gated:
        raise UserError(
            "the gate trains in processes of its own, and a launcher has started several",
            "leave the launcher and give --nproc, or give --no-gate",
        )
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as folder:
        run = benchmark_run(config, plan.steps, Path(folder))
        if documents is not None:
            run = with_documents(run, documents, plan.steps, Path(folder) / "documents")
        gate, begun = Gate(needed=True, holds=None), time.time()
        if not launched:
            here = mode_here(run, ranks)
            if gated:
                tell(f"the gate: {here.mode}")
                gate = _gate(here, _spec(run).family, Path(config.data.cache), earlier)
                if gate.holds is False:
                    return gate
        plan = replace(plan, started=plan.started + time.time() - begun)
        tell(f"{plan.warmup} + {plan.timed} steps")
        found = measure(run, plan) if launched else run_ranks(lambda: measure(run, plan), ranks)
    # without the temporary folders of this measurement
    data = run.data.model_copy(update={"sources": config.data.sources})
    told = run.model_copy(update={"run": config.run, "data": data})
    return None if found is None else _result(told, name, plan, found, gate, documents)


def _spec(config: RunConfig) -> ModelSpec:
    return ModelSpec.from_dict(config.model.model_dump(exclude={"preset"}))


def _result(
    config: RunConfig,
    name: str,
    plan: Plan,
    found: Measured,
    gate: Gate,
    documents: DocumentLengths | None,
) -> Result:
    work = _work(config, found, documents)
    timing = Timing.of(found.step_ms, found.real_tokens, plan.warmup, found.start_up_s)
    joules = found.joules / plan.timed if found.joules else None
    return Result(
        name=name,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=["arriero", *sys.argv[1:]],
        mode=str(mode_of(config, found.compute, found.compiled, config.precision.kernels)),
        layout=found.layout,
        ranks=found.ranks,
        micro_batch=found.micro_batch,
        work=work,
        timing=timing,
        rates=_rates(config, found, timing),
        memory=Memory(
            allocated_gib=found.allocated / 2**30,
            reserved_gib=found.reserved / 2**30 if found.reserved else None,
        ),
        energy=Energy(joules_per_step=joules, tokens_per_joule=found.real_tokens / joules)
        if joules
        else None,
        breakdown=found.breakdown,
        losses=found.losses,
        gate=gate,
        inside=INSIDE,
        left_out=[*LEFT_OUT, *(["warm-up steps"] if plan.warmup else [])],
        device=found.device,
        code=found.code,
        config=config.model_dump(mode="json"),
    )


def _work(config: RunConfig, found: Measured, documents: DocumentLengths | None) -> Work:
    spec = _spec(config)
    return Work(
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


def _rates(config: RunConfig, found: Measured, timing: Timing) -> list[Rate]:
    """Against the bf16 peak, which fp32 work has no share of; float8 work against both peaks."""
    spec = _spec(config)
    peak = peak_of(found.device.name) if found.compute == "bfloat16" else None
    float8_peak = peak.fp8 if peak and config.precision.float8 != "off" else None
    rates = []
    for name, convention in FLOP_FORMULAS.items():
        count = _count(config, spec, name, found.flops_per_token)
        speed = count and count * timing.tokens_per_s / found.ranks
        rates.append(
            Rate(
                convention=name,
                formula=convention.formula,
                flops_per_token=count,
                tflops_per_device=speed and speed / 1e12,
                mfu=speed / peak.bf16 if speed and peak else None,
                mfu_of_float8_peak=speed / float8_peak if speed and float8_peak else None,
            )
        )
    return rates


def _count(config: RunConfig, spec: ModelSpec, convention: str, counted: float) -> float | None:
    """FLOPs per token by a convention; None where it asks for the recomputed parts of blocks, which are not
    known. `counted` is what the run itself counted, document by document where they are masked."""
    checkpointing = config.memory.activation_checkpointing
    if convention == "hfu" and (
        checkpointing.is_selective or checkpointing.kind == "budget" or config.memory.ffn_tile
    ):
        return None
    again = len(checkpointing.blocks(spec.layers)) / spec.layers
    attended = attended_by(spec, counted) if config.data.document_mask else None
    return flops_per_token(spec, config.data.seq_len, convention, recompute=again, attended=attended)
