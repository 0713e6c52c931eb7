"""The cases of `bench parity`: every layout and mode that must reproduce the losses of its reference."""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from math import inf, prod
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


_DEGREE = re.compile(rf"\b({'|'.join(AXES)}) (\d+)")
_RING = {"parallel.context": "ring"}
_SPREAD = "dp_shard 2 x tp 2"
_MASK = {"data.document_mask": True, "data.packing": "bestfit"}
_BF16, _COMPILED = {"precision.compute": "bf16"}, {"precision.compile": True}


def _named(
    group: str,
    names: Iterable[str],
    mode: Mapping[str, Any] = {},
    against: Mapping[str, Any] = {},
    tolerance: Tolerance = FP32,
    quick: Container[str] = (),
) -> list[Case]:
    """Return a case for each name, which contains its layout: "full, dp_shard 2 x tp 2"."""
    layouts = {name: axes(**{axis: int(n) for axis, n in _DEGREE.findall(name)}) for name in names}
    return [
        Case(group, name, {**layout, **mode}, against, tolerance, name in quick)
        for name, layout in layouts.items()
    ]


def _axes(model: str) -> list[Case]:
    group, batch = "one axis", {"train.batch": "1152 tok"}
    alone = [f"{axis} 2" for axis in AXES]
    four = ["dp_replicate", "dp_shard", "cp", "pp", *(["tp"] if model == "gpt2" else [])]
    return [
        *_named(group, alone, quick=alone),
        *_named(group, ["cp 2, ring"], _RING, quick=["cp 2, ring"]),
        *_named(group, [f"{axis} 4" for axis in four]),
        *_named(group, ["cp 4, ring"], _RING),
        *_named(group, ["dp_shard 3"], batch, batch),
        *_named(group, ["dp_shard 2, ZeRO-2"], {"parallel.reshard": "never"}),
        *_named(group, ["dp_shard 4, resharded over pairs"], {"parallel.reshard": 2}),
        *_named(group, ["dp_shard 2, offloaded to CPU"], {"memory.offload_state": True}),
    ]


def _pairs() -> list[Case]:
    names = [f"{a} 2 x {b} 2" for a, b in combinations(AXES, 2)]
    return _named("two axes", names, quick=[_SPREAD, "pp 2 x tp 2", "cp 2 x tp 2"])


def _deeper() -> list[Case]:
    names = [
        "dp_replicate 2 x dp_shard 2 x tp 2",
        "pp 2 x dp_shard 2 x tp 2",
        "dp_shard 2 x cp 2 x tp 2",
        "pp 2 x cp 2 x tp 2",
        "cp 4 x tp 2",
        "dp_replicate 2 x dp_shard 2 x cp 2 x pp 2",
        "dp_shard 2 x cp 2 x tp 2 x pp 2",
    ]
    return _named("more axes", names)


def _schedules() -> list[Case]:
    quick = ["zbv, pp 2", "interleaved-1f1b, pp 2"]
    return [
        case
        for name in SCHEDULES
        for case in _named(
            "schedules",
            [f"{name}, pp 2", f"{name}, pp 2 x dp_shard 2"],
            {"parallel.schedule": name},
            quick=quick,
        )
    ]


def _activation_checkpointing() -> list[Case]:
    group, key = "activation checkpointing", "memory.activation_checkpointing"
    kinds = ["full", "selective", "attention", "every:2", "fraction:1/3"]
    names = [*kinds, *(f"{kind}, {where}" for where in (_SPREAD, "cp 2") for kind in kinds[:3]), "full, pp 2"]
    tiles = {"memory.ffn_tile": 24}
    return [
        *(case for name in names for case in _named(group, [name], {key: name.partition(",")[0]})),
        *_named(group, ["activations offloaded to CPU"], {"memory.offload_activations": True}),
        *_named(group, ["tiled feed-forward, full"], {key: "full", **tiles}),
        *_named(group, [f"tiled feed-forward, {_SPREAD}"], tiles),
    ]


def _gradients() -> list[Case]:
    group, one = "gradient accumulation", {"train.micro_batch": 1}
    each, last = {"parallel.sync": "each", **one}, {"parallel.sync": "last"}
    two, hybrid = "2 micro-batches, dp_shard 2", axes(dp_replicate=2, dp_shard=2)
    z_loss, odd = {"train.z_loss": 1e-2}, {"model.vocab_size": 641}
    return [
        *_named(group, ["16 micro-batches"], one),
        *_named(group, ["8 micro-batches, dp_shard 2"], one | last),
        *_named(group, [two], {"train.micro_batch": 4, **last}, quick=[two]),
        *_named(group, ["reduced per micro-batch, dp_shard 2"], each),
        Case(group, "reduced per micro-batch, HSDP 2 x 2", hybrid | each),
        *_named(group, ["8 micro-batches, tp 2"], {"train.micro_batch": 2}),
        *_named(group, ["16 micro-batches, pp 2"], one),
        *_named("loss", ["chunks of 7 tokens"], {"memory.loss_chunk": 7}),
        *_named("loss", ["whole logits, tp 2"], {"memory.loss_chunk": False}),
        *_named("loss", ["chunks of 100 tokens, tp 2"], {"memory.loss_chunk": 100}),
        *_named("loss", ["z-loss, tp 2"], z_loss, z_loss),
        *_named("loss", [f"a vocabulary of 641, {where}" for where in ("tp 2", _SPREAD)], odd, odd),
    ]


def _documents() -> list[Case]:
    group, ring = "document masks", "cp 2, ring"
    return [
        *_named(group, [f"{axis} 2" for axis in AXES], _MASK, _MASK),
        *_named(group, [ring], _RING | _MASK, _MASK, quick=[ring]),
        *_named(group, ["cp 4 x tp 2", "pp 2 x cp 2"], _MASK, _MASK),
    ]


def _optimizers() -> list[Case]:
    modes = {name: {"optim.name": name} for name in ("muon", "sgd")}
    return [
        case
        for name, mode in modes.items()
        for case in _named("optimizers", [f"{name}, {_SPREAD}"], mode, mode)
    ]


def _compiled() -> list[Case]:
    selective = {"memory.activation_checkpointing": "selective"}
    return [
        *_named("compiled", ["1 process", _SPREAD], _COMPILED),
        *_named("compiled", [f"selective, {_SPREAD}"], _COMPILED | selective),
    ]


# about three times the measured differences
BF16 = Tolerance(2e-3, 1e-3, 1e-2)
BF16_WEIGHTS = Tolerance(2e-3, 1e-3, 4e-2)
# what document masks add below fp32: short documents attend to few keys, and their gradients are noisier
MASKED = Tolerance(1e-3, 5e-3, inf)
BF16_MASKED = Tolerance(BF16.loss + MASKED.loss, BF16.norm + MASKED.norm, BF16.weights)
FLOAT8 = Tolerance(1e-2, 1.5e-2, 5e-2)
STATES = {
    "bf16": Tolerance(1e-4, 1e-5, 4e-3),
    "int8": Tolerance(2e-4, 1e-5, 2.5e-2),
    "float8": Tolerance(1e-3, 1e-5, 6e-2),
}


def _precisions() -> list[Case]:
    group, float8, fp16 = "bf16 against fp32", "float8 against fp32", {"precision.compute": "fp16"}
    made = _named(group, ["1 process", "dp_shard 2", "tp 2", "pp 2", "cp 2", _SPREAD], _BF16, {}, BF16)
    for name in ("zero-bubble", "zbv"):
        made += _named(group, [f"{name}, pp 2"], _BF16 | {"parallel.schedule": name}, {}, BF16)
    made += _named(group, ["bf16 weights"], _BF16 | {"precision.master": "bf16"}, {}, BF16_WEIGHTS)
    made += _named(group, ["dp_shard 2, reduced in bf16"], _BF16 | {"precision.reduce": "bf16"}, {}, BF16)
    # one process skips a step that overflows; ranks with fewer sequences and smaller sums take it
    made += _named("fp16", ["tp 2"], fp16, fp16, BF16)
    for kind in ("tensorwise", "rowwise"):
        mode = _BF16 | {"precision.float8": kind}
        made += _named(float8, [kind, f"{kind}, {_SPREAD}"], mode, {}, FLOAT8)
    head = _BF16 | {"precision.float8": "tensorwise", "precision.float8_head": True}
    made += _named(float8, ["with float8 head", "with float8 head, tp 2"], head, {}, FLOAT8)
    for state, tolerance in STATES.items():
        mode = {"optim.state": state}
        made += _named("optimizer state against fp32", [f"{state}, dp_shard 2"], mode, {}, tolerance)
    return made


def _on_a_gpu() -> list[Case]:
    """Return modes with their own CUDA streams or kernels; the reference is fp32 in one process."""
    gather = _BF16 | {"precision.float8": "tensorwise", "precision.float8_all_gather": True}
    packed, documents = _BF16 | _COMPILED | _MASK, "documents, compiled bf16, cp 2"
    names = [f"compiled bf16, {_SPREAD}", "compiled bf16, pp 2"]
    made = _named("GPU", names, _BF16 | _COMPILED, {}, BF16)
    for name in ("state", "activations"):
        mode = _BF16 | {f"memory.offload_{name}": True}
        made += _named("GPU", [f"{name} offloaded, dp_shard 2"], mode, {}, BF16)
    made += _named("GPU", ["float8 all-gather, dp_shard 2"], gather, {}, FLOAT8)
    made += _named("GPU", ["float8 all-gather compiled, dp_shard 2"], gather | _COMPILED, {}, FLOAT8)
    # with documents bf16 alone changes the first gradient norm by 0.2 %: one process is compared with fp32
    made += _named("GPU", ["documents, compiled bf16, 1 process"], packed, _MASK, BF16_MASKED)
    made += _named("GPU", [documents], packed, packed, BF16)
    return made + _named("GPU", [f"{documents}, ring"], packed | _RING, packed, BF16)
