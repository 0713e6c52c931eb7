"""Mamba-2 and Bamba, its hybrid with attention: fields, parameter counts, placements. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.model.family import DECODER_PLACEMENTS, Family, ParameterCounts, Placement, built_by, lazily
from arriero.model.llama.family import LLAMA

if TYPE_CHECKING:
    from arriero.model.spec import ModelSpec

# Bamba rotates this share of the dimensions of an attention head
ROTARY = 0.5


@dataclass(frozen=True)
class Shape:
    """The dimensions of a state-space mixer."""

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    chunk: int
    bias: bool
    conv_bias: bool
    dt_limits: tuple[float, ...]

    @classmethod
    def of(cls, spec: "ModelSpec") -> "Shape":
        heads, head_dim = spec.heads, spec.head_dim
        if "ssm_heads" in spec.extra:
            head_dim = spec.extra["ssm_head_dim"]
            heads = spec.extra["ssm_heads"] or 2 * spec.dim // head_dim
        shared: dict[str, Any] = {name: spec.extra[name] for name in _MIXER}
        shared["dt_limits"] = shared["dt_limits"] or (0.0, inf)
        return cls(heads, head_dim, **shared)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def attention_layers(spec: "ModelSpec") -> frozenset[int]:
    """Return the numbers of the blocks that have attention."""
    return frozenset(spec.extra.get("attention_layers", ()))


def _kinds(spec: "ModelSpec") -> Sequence["ModelSpec"]:
    """Return for each block a model of one block like it."""
    if spec.layers == 1:
        return [spec]
    mamba, attention = (
        replace(spec, layers=1, extra={**spec.extra, "attention_layers": where}) for where in ((), (0,))
    )
    return [attention if i in attention_layers(spec) else mamba for i in range(spec.layers)]


def _count(spec: "ModelSpec") -> ParameterCounts:
    """Return the numbers of a model whose blocks are of one kind: that of the first one."""
    dim, shape = spec.dim, Shape.of(spec)
    ffn, norms = 3 * dim * spec.ffn, dim * (2 if spec.ffn else 1)
    if 0 in attention_layers(spec):
        attention = 2 * dim * (spec.heads + spec.kv_heads) * spec.head_dim
        return ParameterCounts(attention + ffn, norms, final_norm=dim)
    grouped = shape.groups * shape.state
    matmul = dim * (3 * shape.width + 2 * grouped + shape.heads)
    convolved = (shape.width + 2 * grouped) * (shape.conv + shape.conv_bias)
    biases = (2 * shape.width + 2 * grouped + shape.heads + dim) * shape.bias
    other = norms + convolved + biases + 3 * shape.heads + shape.width
    return ParameterCounts(matmul + ffn, other, final_norm=dim)


def _sequence_flops(spec: "ModelSpec", attended: float) -> float:
    """Return the FLOPs of attention where there is some, and of the scan, which do not depend on the length.

    A scan updates and reads its states, and a token meets half of the others in its chunk.
    """
    shape, blocks = Shape.of(spec), len(attention_layers(spec))
    inside = shape.chunk * (shape.width + shape.groups * shape.state)
    scan = 4 * shape.width * shape.state + inside
    return 2 * blocks * spec.attention_width * attended + (spec.layers - blocks) * scan


def _problems(fields: Mapping[str, Any]) -> list[str]:
    extra = {**_MIXER, **(fields.get("extra") or {})}
    problems = [f"extra.{name} must be positive, not {extra[name]}" for name in _SIZES if extra[name] < 1]
    limits = extra["dt_limits"]
    numbers = all(type(each) in (int, float) for each in limits)
    if limits and not (numbers and len(limits) == 2 and 0 <= limits[0] < limits[1]):
        problems.append(f"extra.dt_limits must be two growing numbers, or none, not {list(limits)}")
    return problems


def _mixer_problems(heads: int, head_dim: int, dim: int, extra: Mapping[str, Any]) -> list[str]:
    problems = []
    groups = extra.get("groups", _MIXER["groups"])
    if groups > 0 and heads % groups:
        problems.append(f"{heads} state-space heads do not divide over extra.groups {groups}")
    if heads * head_dim % dim:
        width = f"{heads} state-space heads of {head_dim}"
        problems.append(f"{width} are {heads * head_dim} wide, which is no multiple of dim {dim}")
    return problems


def _mamba2_problems(fields: Mapping[str, Any]) -> list[str]:
    problems = [
        f"mamba2 has no attention: {name} does not apply"
        for name in ("rope_theta", "rope_scaling")
        if name in fields
    ]
    if fields.get("ffn"):
        problems.append("mamba2 has no feed-forward layers: ffn must be 0")
    if fields.get("heads") and fields.get("kv_heads") and fields["heads"] != fields["kv_heads"]:
        problems.append("mamba2 has no kv_heads: leave them out")
    if not problems and {"heads", "head_dim", "dim"} <= fields.keys():
        heads, head_dim, dim = (fields[name] for name in ("heads", "head_dim", "dim"))
        problems += _mixer_problems(heads, head_dim, dim, fields.get("extra") or {})
    return problems + _problems(fields)


def _bamba_problems(fields: Mapping[str, Any]) -> list[str]:
    extra, problems = {**_BAMBA, **(fields.get("extra") or {})}, LLAMA.problems(fields)
    where, layers = extra["attention_layers"], fields.get("layers", 0)
    known = all(type(i) is int and i in range(layers) for i in where)
    if layers and not (known and len(set(where)) == len(where)):
        problems.append(f"extra.attention_layers must be different numbers from 0 to {layers - 1}")
    if fields.get("head_dim", 0) % 4 == 2:
        problems.append(f"head_dim {fields['head_dim']} is no multiple of 4: half of it is rotated in pairs")
    heads, head_dim, dim = extra["ssm_heads"], extra["ssm_head_dim"], fields.get("dim", 0)
    if heads < 0 or head_dim < 1:
        problems.append("extra.ssm_heads and extra.ssm_head_dim must be positive")
    elif dim:
        problems += _mixer_problems(heads or 2 * dim // head_dim, head_dim, dim, extra)
    return problems + _problems(fields)


def _tp_counts(spec: "ModelSpec") -> dict[str, int]:
    """Return what tensor parallelism divides; one group is computed on each rank."""
    shape, hybrid = Shape.of(spec), bool(attention_layers(spec))
    counts = {"heads": spec.heads, "kv_heads": spec.kv_heads} if hybrid else {}
    counts |= {"extra.ssm_heads" if "ssm_heads" in spec.extra else "heads": shape.heads, "ffn": spec.ffn}
    return counts if shape.groups == 1 else counts | {"extra.groups": shape.groups}


def _whole_sequences(spec: "ModelSpec") -> dict[str, int]:
    shape = Shape.of(spec)
    return {"state-space heads": shape.heads, "groups": shape.groups}


_SIZES = ("groups", "state", "conv", "chunk")
_MIXER: dict[str, Any] = {
    "groups": 1,
    "state": 128,
    "conv": 4,
    "chunk": 256,
    "bias": False,
    "conv_bias": True,
    "dt_limits": (),
}
_BAMBA: dict[str, Any] = {**_MIXER, "ssm_heads": 0, "ssm_head_dim": 64, "attention_layers": ()}

_PLACEMENTS: dict[str, Placement] = {
    **DECODER_PLACEMENTS,
    "blocks.*.mixer_norm": "sequence parallel",
    "blocks.*.mixer": "gather sequence",
    "blocks.*.mixer.z": "column-wise",
    "blocks.*.mixer.x": "column-wise",
    "blocks.*.mixer.dt": "column-wise",
    "blocks.*.mixer.b": "column-wise groups",
    "blocks.*.mixer.c": "column-wise groups",
    "blocks.*.mixer.conv_x": "own rows",
    "blocks.*.mixer.conv_b": "own groups",
    "blocks.*.mixer.conv_c": "own groups",
    "blocks.*.mixer.scan": "own rows",
    "blocks.*.mixer.norm": "own rows",
    "blocks.*.mixer.o": "row-wise",
}

MAMBA2 = Family(
    name="mamba2",
    build=built_by("arriero.model.mamba.module:Mamba"),
    count_parameters=_count,
    defaults={"norm_eps": 1e-5, "tied": False, "ffn": 0, "head_dim": 64},
    extra=_MIXER,
    problems=_mamba2_problems,
    placements=_PLACEMENTS,
    hf=lazily("arriero.model.mamba.hf_names:MAMBA2_NAMES"),
    presets=Path(__file__).with_name("mamba2.toml"),
    sequence_flops=_sequence_flops,
    tp_counts=_tp_counts,
    whole_sequences=_whole_sequences,
)
BAMBA = Family(
    name="bamba",
    build=built_by("arriero.model.mamba.module:Mamba"),
    count_parameters=_count,
    defaults={"norm_eps": 1e-5, "tied": False, "rope_theta": 10000.0},
    extra=_BAMBA,
    problems=_bamba_problems,
    placements=_PLACEMENTS,
    hf=lazily("arriero.model.mamba.hf_names:BAMBA_NAMES"),
    presets=Path(__file__).with_name("bamba.toml"),
    kinds=_kinds,
    sequence_flops=_sequence_flops,
    tp_counts=_tp_counts,
    whole_sequences=_whole_sequences,
)
