"""The cases of `bench parity`: every layout and mode that must reproduce the losses of its reference."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from math import prod
from typing import Any

from arriero.model.family import family_of
from arriero.model.presets import load_preset
from arriero.plan.layout import AXES, SCHEDULES

# every case is run with the first model, every layout with the first two
MODELS = ("llama", "gpt2", "mistral", "qwen2", "qwen3", "diffllama", "mamba2", "bamba")
SEQUENCES = 16

# settings of all runs, references included
BASE: dict[str, Any] = {
    "model.layers": 4,
    "model.vocab_size": 640,
    "data.sources": [{"path": "builtin:synthetic"}],
    "data.seq_len": 64,
    # one batch: evaluation is not compared here
    "eval.heldout": f"{64 * SEQUENCES} tok",
    "train.batch": f"{64 * SEQUENCES} tok",
    "train.horizon": "10 steps",
    "optim.lr": 1e-3,
    "schedule.warmup": "4 steps",
    "checkpoint.at_end": False,
    "observe.log_every": 1,
    "observe.tensorboard": False,
    "precision.compile": False,
    "precision.compute": "fp32",
    "run.device": "cpu",
}


@dataclass(frozen=True)
class Tolerance:
    """Limits of relative differences: of all losses, of the first gradient norm, of the final weights."""

    loss: float
    norm: float
    weights: float


FP32 = Tolerance(1e-4, 1e-5, 1e-4)


@dataclass(frozen=True)
class Case:
    """`sets` are keys of the run, `against` keys of its reference."""

    group: str
    name: str
    sets: Mapping[str, Any]
    against: Mapping[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = FP32
    quick: bool = False

    @property
    def title(self) -> str:
        return f"{self.group}: {self.name}"

    @property
    def ranks(self) -> int:
        return prod(int(self.sets.get(f"parallel.{axis}", 1)) for axis in AXES)

    def matches(self, pattern: str) -> bool:
        """Whether the pattern is part of the title, or matches title, name or group with wildcards."""
        wholes = (self.title, self.name, self.group)
        return pattern in self.title or any(fnmatchcase(whole, pattern) for whole in wholes)


def axes(**degrees: int) -> dict[str, Any]:
    """Return the keys of a layout; a pipeline gets four micro-batches, the minimum of all schedules."""
    sets: dict[str, Any] = {"parallel.dp_shard": 1}
    sets |= {f"parallel.{axis}": degree for axis, degree in degrees.items()}
    if degrees.get("pp", 1) > 1:
        copies = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
        sets["train.micro_batch"] = SEQUENCES // copies // 4
    return sets


def cases(model: str, device: str = "cpu") -> list[Case]:
    """Return all cases of a model; modes that do not depend on its blocks are of the first model only."""
    if model not in MODELS[:2]:
        return _of_family(model)
    layouts = [*_axes(model), *_pairs(), *_deeper(), *_schedules(), *_documents()]
    if model != MODELS[0]:
        return layouts
    return [
        *layouts,
        *_activation_checkpointing(),
        *_gradients(),
        *_optimizers(),
        *_compiled(),
        *_precisions(),
        *(_on_a_gpu() if device == "cuda" else []),
    ]


def _of_family(model: str) -> list[Case]:
    """Return the cases of a further family: the axes that it supports, alone and some in pairs."""
    spec = load_preset(f"{model}-test")
    has_ring = spec.sliding_window is None and family_of(spec.family).whole_sequences is None
    titles = [f"two axes: {pair}" for pair in ("dp_shard 2 x tp 2", "pp 2 x tp 2", "cp 2 x tp 2")]
    titles += [f"document masks: {axis} 2" for axis in ("cp", "tp", "pp")]
    every = [*(case for case in _axes(model) if case.quick), *_pairs(), *_documents()]
    if len(set(spec.kinds)) > 1:
        # what depends on the blocks, where they differ
        titles += ["schedules: zbv, pp 2", "compiled: dp_shard 2 x tp 2"]
        titles += [f"activation checkpointing: {name}" for name in ("selective", "full, pp 2")]
        every += [*_schedules(), *_activation_checkpointing(), *_compiled()]
    chosen = [case for case in every if case.title in titles or case.group == "one axis"]
    return [case for case in chosen if has_ring or case.sets.get("parallel.context") != "ring"]


def _axes(model: str) -> list[Case]:
    ring = {"parallel.context": "ring"}
    alone = [Case("one axis", f"{axis} 2", axes(**{axis: 2}), quick=True) for axis in AXES]
    four = ["dp_replicate", "dp_shard", "cp", "pp", *(["tp"] if model == "gpt2" else [])]
    return [
        *alone,
        Case("one axis", "cp 2, ring", axes(cp=2) | ring, quick=True),
        *(Case("one axis", f"{axis} 4", axes(**{axis: 4})) for axis in four),
        Case("one axis", "cp 4, ring", axes(cp=4) | ring),
        Case("one axis", "dp_shard 3", axes(dp_shard=3) | {"train.batch": "1152 tok"}, _BATCH_OF_18),
        Case("one axis", "dp_shard 2, ZeRO-2", axes(dp_shard=2) | {"parallel.reshard": "never"}),
        Case("one axis", "dp_shard 4, resharded over pairs", axes(dp_shard=4) | {"parallel.reshard": 2}),
        Case("one axis", "dp_shard 2, offloaded to CPU", axes(dp_shard=2) | {"memory.offload_state": True}),
    ]


_BATCH_OF_18 = {"train.batch": "1152 tok"}


def _pairs() -> list[Case]:
    quick = {("dp_shard", "tp"), ("pp", "tp"), ("cp", "tp")}
    return [
        Case("two axes", f"{a} 2 x {b} 2", axes(**{a: 2, b: 2}), quick=(a, b) in quick)
        for a, b in combinations(AXES, 2)
    ]


def _deeper() -> list[Case]:
    layouts = [
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        {"pp": 2, "dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "cp": 2, "tp": 2},
        {"pp": 2, "cp": 2, "tp": 2},
        {"cp": 4, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "pp": 2},
        {"dp_shard": 2, "cp": 2, "tp": 2, "pp": 2},
    ]
    return [
        Case("more axes", " x ".join(f"{axis} {n}" for axis, n in each.items()), axes(**each))
        for each in layouts
    ]


def _schedules() -> list[Case]:
    cases = []
    for name in SCHEDULES:
        sets = {"parallel.schedule": name}
        quick = name in ("zbv", "interleaved-1f1b")
        cases.append(Case("schedules", f"{name}, pp 2", axes(pp=2) | sets, quick=quick))
        cases.append(Case("schedules", f"{name}, pp 2 x dp_shard 2", axes(pp=2, dp_shard=2) | sets))
    return cases


def _activation_checkpointing() -> list[Case]:
    kinds = ["full", "selective", "attention", "every:2", "fraction:1/3"]
    spread, key = axes(dp_shard=2, tp=2), "memory.activation_checkpointing"
    tiled = [("full", axes() | {key: "full"}), ("dp_shard 2 x tp 2", spread)]
    chosen = [
        *((kind, axes() | {key: kind}) for kind in kinds),
        *((f"{kind}, dp_shard 2 x tp 2", spread | {key: kind}) for kind in kinds[:3]),
        *((f"{kind}, cp 2", axes(cp=2) | {key: kind}) for kind in kinds[:3]),
        ("full, pp 2", axes(pp=2) | {key: "full"}),
        ("activations offloaded to CPU", axes() | {"memory.offload_activations": True}),
        *((f"tiled feed-forward, {name}", sets | _TILES) for name, sets in tiled),
    ]
    return [Case("activation checkpointing", name, sets) for name, sets in chosen]


_TILES = {"memory.ffn_tile": 24}


def _gradients() -> list[Case]:
    one = {"train.micro_batch": 1}
    shard, hybrid = axes(dp_shard=2), axes(dp_replicate=2, dp_shard=2)
    each, last = {"parallel.sync": "each"}, {"parallel.sync": "last"}
    accumulated = [
        ("16 micro-batches", axes() | one, False),
        ("8 micro-batches, dp_shard 2", shard | one | last, False),
        ("2 micro-batches, dp_shard 2", shard | {"train.micro_batch": 4} | last, True),
        ("reduced per micro-batch, dp_shard 2", shard | one | each, False),
        ("reduced per micro-batch, HSDP 2 x 2", hybrid | one | each, False),
        ("8 micro-batches, tp 2", axes(tp=2) | {"train.micro_batch": 2}, False),
        ("16 micro-batches, pp 2", axes(pp=2) | one, False),
    ]
    return [
        *(Case("gradient accumulation", name, sets, quick=quick) for name, sets, quick in accumulated),
        Case("loss", "chunks of 7 tokens", axes() | {"memory.loss_chunk": 7}),
        Case("loss", "whole logits, tp 2", axes(tp=2) | {"memory.loss_chunk": False}),
        Case("loss", "chunks of 100 tokens, tp 2", axes(tp=2) | {"memory.loss_chunk": 100}),
        Case("loss", "z-loss, tp 2", axes(tp=2) | _Z_LOSS, _Z_LOSS),
        Case("loss", "a vocabulary of 641, tp 2", axes(tp=2) | _ODD, _ODD),
        Case("loss", "a vocabulary of 641, dp_shard 2 x tp 2", axes(dp_shard=2, tp=2) | _ODD, _ODD),
    ]


_Z_LOSS = {"train.z_loss": 1e-2}
_ODD = {"model.vocab_size": 641}
_MASK = {"data.document_mask": True, "data.packing": "bestfit"}


def _documents() -> list[Case]:
    layouts = [axes(**{axis: 2}) for axis in AXES]
    ring = axes(cp=2) | {"parallel.context": "ring"}
    return [
        *(
            Case("document masks", f"{axis} 2", each | _MASK, _MASK)
            for axis, each in zip(AXES, layouts, strict=True)
        ),
        Case("document masks", "cp 2, ring", ring | _MASK, _MASK, quick=True),
        Case("document masks", "cp 4 x tp 2", axes(cp=4, tp=2) | _MASK, _MASK),
        Case("document masks", "pp 2 x cp 2", axes(pp=2, cp=2) | _MASK, _MASK),
    ]


def _optimizers() -> list[Case]:
    spread = axes(dp_shard=2, tp=2)
    made = []
    for name in ("muon", "sgd"):
        sets = {"optim.name": name}
        made.append(Case("optimizers", f"{name}, dp_shard 2 x tp 2", spread | sets, sets))
    return made


def _compiled() -> list[Case]:
    compiled = {"precision.compile": True}
    spread = axes(dp_shard=2, tp=2) | compiled
    return [
        Case("compiled", "1 process", axes() | compiled),
        Case("compiled", "dp_shard 2 x tp 2", spread),
        Case(
            "compiled",
            "selective, dp_shard 2 x tp 2",
            spread | {"memory.activation_checkpointing": "selective"},
        ),
    ]


# about three times the measured differences
BF16 = Tolerance(2e-3, 1e-3, 1e-2)
BF16_WEIGHTS = Tolerance(2e-3, 1e-3, 4e-2)
FLOAT8 = Tolerance(1e-2, 1.5e-2, 5e-2)
STATES = {
    "bf16": Tolerance(1e-4, 1e-5, 4e-3),
    "int8": Tolerance(2e-4, 1e-5, 2.5e-2),
    "float8": Tolerance(1e-3, 1e-5, 6e-2),
}


def _precisions() -> list[Case]:
    bf16 = {"precision.compute": "bf16"}
    made = [Case("bf16 against fp32", "1 process", axes() | bf16, tolerance=BF16)]
    for each in (axes(dp_shard=2), axes(tp=2), axes(pp=2), axes(cp=2), axes(dp_shard=2, tp=2)):
        name = " x ".join(
            f"{axis} {each[key]}" for axis in AXES if each.get(key := f"parallel.{axis}", 1) > 1
        )
        made.append(Case("bf16 against fp32", name, each | bf16, tolerance=BF16))
    for name in ("zero-bubble", "zbv"):
        split = axes(pp=2) | bf16 | {"parallel.schedule": name}
        made.append(Case("bf16 against fp32", f"{name}, pp 2", split, tolerance=BF16))
    pure = axes() | bf16 | {"precision.master": "bf16"}
    made.append(Case("bf16 against fp32", "bf16 weights", pure, tolerance=BF16_WEIGHTS))
    reduced = axes(dp_shard=2) | bf16 | {"precision.reduce": "bf16"}
    made.append(Case("bf16 against fp32", "dp_shard 2, reduced in bf16", reduced, tolerance=BF16))
    fp16 = {"precision.compute": "fp16"}
    # one process skips a step that overflows; ranks with fewer sequences and smaller sums take it
    made.append(Case("fp16", "tp 2", axes(tp=2) | fp16, fp16, tolerance=BF16))
    for kind in ("tensorwise", "rowwise"):
        float8 = bf16 | {"precision.float8": kind}
        made.append(Case("float8 against fp32", kind, axes() | float8, tolerance=FLOAT8))
        spread = axes(dp_shard=2, tp=2) | float8
        made.append(Case("float8 against fp32", f"{kind}, dp_shard 2 x tp 2", spread, tolerance=FLOAT8))
    head = bf16 | {"precision.float8": "tensorwise", "precision.float8_head": True}
    for name, each in (("with float8 head", axes()), ("with float8 head, tp 2", axes(tp=2))):
        made.append(Case("float8 against fp32", name, each | head, tolerance=FLOAT8))
    for state, tolerance in STATES.items():
        sets = axes(dp_shard=2) | {"optim.state": state}
        made.append(Case("optimizer state against fp32", f"{state}, dp_shard 2", sets, tolerance=tolerance))
    return made


def _on_a_gpu() -> list[Case]:
    """Return modes with their own CUDA streams or kernels; the reference is fp32 in one process."""
    bf16, compiled = {"precision.compute": "bf16"}, {"precision.compile": True}
    gather = {"precision.float8": "tensorwise", "precision.float8_all_gather": True}
    shards, spread, ring = axes(dp_shard=2), axes(dp_shard=2, tp=2), {"parallel.context": "ring"}
    packed = bf16 | compiled | _MASK
    offload = [("state", "memory.offload_state"), ("activations", "memory.offload_activations")]
    return [
        Case("GPU", "compiled bf16, dp_shard 2 x tp 2", spread | bf16 | compiled, tolerance=BF16),
        Case("GPU", "compiled bf16, pp 2", axes(pp=2) | bf16 | compiled, tolerance=BF16),
        *(
            Case("GPU", f"{name} offloaded, dp_shard 2", shards | bf16 | {key: True}, tolerance=BF16)
            for name, key in offload
        ),
        Case("GPU", "float8 all-gather, dp_shard 2", shards | bf16 | gather, tolerance=FLOAT8),
        Case(
            "GPU",
            "float8 all-gather compiled, dp_shard 2",
            shards | bf16 | gather | compiled,
            tolerance=FLOAT8,
        ),
        # against bf16 in one process: with documents bf16 alone changes the first gradient norm by 0.2 %
        *(
            Case("GPU", f"documents, compiled bf16, cp 2{name}", axes(cp=2) | how | packed, packed, BF16)
            for name, how in (("", {}), (", ring", ring))
        ),
    ]
