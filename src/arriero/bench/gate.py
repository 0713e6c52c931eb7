"""No speed without the right loss: a mode on a small model beside fp32, before it may be measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from arriero.bench.cases import BF16, BF16_WEIGHTS, FLOAT8, FP32, STATES, Case, Tolerance
from arriero.bench.parity import Parity
from arriero.bench.result import Gate
from arriero.config.schema import RunConfig

STEPS = 10
# of the 16 sequences of a step, so that gradients accumulate
MICRO_BATCH = 8
# a chunk that a step of 1024 tokens has several of
CHUNK = 128
TILE = 24
_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_PLAIN: dict[str, Any] = {
    "master": "fp32",
    "float8": "off",
    "float8_exclude": [],
    "float8_all_gather": False,
    "float8_head": False,
    "kernels": False,
}
# the compiler orders sums anew
COMPILED = Tolerance(1e-4, 1e-4, inf)
# in fewer bits than 32: short documents see few keys, and their gradients are noisier
MASKED = Tolerance(1e-3, 5e-3, inf)


@dataclass(frozen=True)
class Mode:
    """How a run computes, as its device decided: what may make its numbers other than those of fp32."""

    compute: str
    compiled: bool
    precision: Mapping[str, Any]
    memory: Mapping[str, Any]
    optim: Mapping[str, Any]
    data: Mapping[str, Any]
    parallel: Mapping[str, Any]

    @property
    def is_reference(self) -> bool:
        """Plain fp32 by PyTorch's own kernels, not compiled, nothing recomputed or rounded."""
        return self.compute == "float32" and self == reference_of(self)

    def __str__(self) -> str:
        checkpointing = self.memory["activation_checkpointing"]
        weights = ", bf16 weights" if self.precision["master"] == "bf16" else ""
        parts = [
            _NAMES[self.compute] + weights,
            "compiled" if self.compiled else "",
            f"float8 {self.precision['float8']}" if self.precision["float8"] != "off" else "",
            "float8 head" if self.precision["float8_head"] else "",
            f"{checkpointing} activation checkpointing" if checkpointing != "none" else "",
            "activations in host memory" if self.memory["offload_activations"] else "",
            "ffn in tiles" if self.memory["ffn_tile"] else "",
            "" if self.optim["name"] == "adamw" else self.optim["name"],
            f"{self.optim['state']} states" if self.optim["state"] != "fp32" else "",
        ]
        return ", ".join(filter(None, parts))


def mode_of(config: RunConfig, compute: str, compiled: bool, kernels: bool) -> Mode:
    precision = config.precision.model_dump(mode="json", include=set(_PLAIN)) | {"kernels": kernels}
    memory = config.memory.model_dump(
        mode="json", include={"activation_checkpointing", "offload_activations", "ffn_tile"}
    )
    chunk = CHUNK if config.memory.loss_chunk else False
    # of sequences of 64, whatever the run's
    memory["ffn_tile"] = TILE if config.memory.ffn_tile else False
    optim = config.optim.model_dump(mode="json", exclude={"lr"}, exclude_none=True)
    data = config.data.model_dump(mode="json", include={"document_mask", "packing"})
    parallel = _float8_layout(config)
    return Mode(compute, compiled, precision, memory | {"loss_chunk": chunk}, optim, data, parallel)


def _float8_layout(config: RunConfig) -> dict[str, int]:
    """Split layers and weights gathered in float8 are multiplied by other kernels, so they are judged so."""
    if config.precision.float8 == "off":
        return {}
    split = {"tp": 2} if config.parallel.tp > 1 else {}
    return split | ({"dp_shard": 2} if config.precision.float8_all_gather else {})


def reference_of(mode: Mode) -> Mode:
    """The same optimizer and documents in fp32. fp16 is judged beside plain fp16: both skip first steps."""
    plain = {
        **mode.memory,
        "activation_checkpointing": "none",
        "offload_activations": False,
        "ffn_tile": False,
    }
    return Mode(
        mode.compute if mode.compute == "float16" else "float32",
        False,
        _PLAIN,
        plain,
        {**mode.optim, "state": "fp32"},
        mode.data,
        {},
    )


def tolerance_of(mode: Mode) -> Tolerance:
    """The bounds of all that the mode does, together; final weights are for `bench parity`."""
    bounds = [FP32]
    if mode.compiled:
        bounds.append(COMPILED)
    if mode.precision["master"] == "bf16":
        bounds.append(BF16_WEIGHTS)
    elif mode.compute != "float32":
        bounds.append(BF16)
    if mode.data["document_mask"] and mode.compute != "float32":
        bounds.append(MASKED)
    if mode.precision["float8"] != "off":
        bounds.append(FLOAT8)
    if mode.optim["state"] != "fp32":
        bounds.append(STATES[mode.optim["state"]])
    return Tolerance(sum(b.loss for b in bounds), sum(b.norm for b in bounds), inf)


def sets_of(mode: Mode) -> dict[str, Any]:
    sets: dict[str, Any] = {
        "precision.compute": _NAMES[mode.compute],
        "precision.compile": mode.compiled,
        "train.micro_batch": MICRO_BATCH,
    }
    for section in ("precision", "memory", "optim", "data", "parallel"):
        for name, value in getattr(mode, section).items():
            sets[f"{section}.{name}"] = tuple(value) if isinstance(value, list) else value
    return sets


def judge(mode: Mode, family: str, device: str, cache_dir: Path) -> Gate:
    """Trains both on `device`, in processes of their own. Plain fp16 has none to be judged beside."""
    if mode == reference_of(mode):
        return Gate(needed=not mode.is_reference, holds=None)
    bounds, sets = tolerance_of(mode), sets_of(mode)
    case = Case("gate", str(mode), sets, sets_of(reference_of(mode)), bounds)
    common = {"run.device": device, "train.horizon": f"{STEPS} steps"}
    verdict = Parity(family, cache_dir, common).judge(case)
    return Gate(
        needed=True,
        holds=verdict.holds,
        model=f"{family}-test",
        settings=as_written(sets),
        steps=STEPS,
        loss=_known(verdict.loss),
        loss_bound=bounds.loss,
        norm=_known(verdict.norm),
        norm_bound=bounds.norm,
        error=verdict.error,
    )


def as_written(sets: Mapping[str, Any]) -> dict[str, Any]:
    """As the settings come back from a file."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in sets.items()}


def _known(difference: float) -> float | None:
    return difference if isfinite(difference) else None
