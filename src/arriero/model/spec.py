"""The shape of a model, and what follows from it by arithmetic alone: parameters, bytes, FLOPs per token."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from arriero.errors import UserError, nearest

Family = Literal["llama", "gpt2"]
FAMILIES = ("llama", "gpt2")

_REQUIRED = ("vocab_size", "dim", "layers", "heads", "ffn", "max_seq_len")
_COUNTS = (*_REQUIRED, "kv_heads", "head_dim", "nominal_params")
_REALS = ("norm_eps", "rope_theta")
# far beyond any model, so that a damaged file cannot make a loop or an allocation that never ends
_MOST_LAYERS = 10_000
_LARGEST_DIM = 2**31
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"norm_eps": 1e-5, "rope_theta": 10000.0, "tied": False},
    "gpt2": {"norm_eps": 1e-5, "tied": True},
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow rotations, to reach past the length first trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclass(frozen=True)
class ModelSpec:
    family: Family
    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    nominal_params: int | None = None

    def __post_init__(self) -> None:
        if problems := _shape_problems(vars(self)):
            raise _impossible(problems)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "ModelSpec":
        """Fills in kv_heads, head_dim, norm_eps, rope_theta and tied; reports every problem at once."""
        given, problems = _typed(values)
        given.setdefault("family", "llama")
        known = {**_DEFAULTS.get(str(given["family"]), {}), **given}
        heads, dim = known.get("heads", 0), known.get("dim", 0)
        if heads > 0 and "kv_heads" not in problems:
            known.setdefault("kv_heads", heads)
        if heads > 0 and dim > 0 and values.get("head_dim") is None:
            known["head_dim"] = dim // heads
            if dim % heads:
                del known["head_dim"]
                problems["head_dim"] = f"dim {dim} is not divisible by heads {heads}: give head_dim"
        if found := [*problems.values(), *_shape_problems(known)]:
            raise _impossible(found)
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.dim

    @property
    def input_embedding_parameters(self) -> int:
        """Tables that are only looked up: the tokens', and GPT-2's positions."""
        positions = self.max_seq_len * self.dim if self.family == "gpt2" else 0
        return self.embedding_parameters + positions

    @property
    def block_matmul_parameters(self) -> int:
        attention = 2 * self.dim * (self.heads + self.kv_heads) * self.head_dim
        return attention + (3 if self.family == "llama" else 2) * self.dim * self.ffn

    @property
    def block_parameters(self) -> int:
        if self.family == "llama":
            return self.block_matmul_parameters + 2 * self.dim
        norms_and_biases = 4 * self.dim + 3 * self.attention_width + self.dim + self.ffn + self.dim
        return self.block_matmul_parameters + norms_and_biases

    @property
    def matmul_parameters(self) -> int:
        """Weights every token is multiplied by: all linears and the head once, tied or not."""
        return self.layers * self.block_matmul_parameters + self.embedding_parameters

    @property
    def parameters(self) -> int:
        last_norm = self.dim if self.family == "llama" else 2 * self.dim
        head = 0 if self.tied else self.embedding_parameters
        return self.input_embedding_parameters + self.layers * self.block_parameters + last_norm + head

    @property
    def bf16_bytes(self) -> int:
        return 2 * self.parameters


def _impossible(problems: Sequence[str]) -> UserError:
    return UserError(f"this model cannot be built: {'; '.join(problems)}", "correct these under [model]")


def _typed(values: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields that are well formed, and a sentence for each that is not."""
    names = [f.name for f in fields(ModelSpec)]
    good: dict[str, Any] = {}
    problems = {n: f"{n} is missing" for n in _REQUIRED if values.get(n) is None}
    for name, value in values.items():
        if name not in names:
            near = nearest(name, names)
            problems[name] = f"{name} is not a model field" + (f" (did you mean {near}?)" if near else "")
        elif value is None or (name == "rope_scaling" and value is False):
            continue
        elif name == "rope_scaling":
            _take_scaling(value, good, problems)
        elif kind := _wrong_kind(name, value):
            problems[name] = f"{name} must be {kind}, not {value!r}"
        else:
            good[name] = _as_float(value) if name in _REALS else value
    return good, problems


def _wrong_kind(name: str, value: object) -> str | None:
    """What the value should have been."""
    if name == "tied":
        return None if isinstance(value, bool) else "true or false"
    if name == "family":
        return None if isinstance(value, str) else "a name"
    wanted, kind = (int, "a whole number") if name in _COUNTS else (int | float, "a number")
    return None if isinstance(value, wanted) and not isinstance(value, bool) else kind


def _take_scaling(value: object, good: dict[str, Any], problems: dict[str, str]) -> None:
    names = [f.name for f in fields(RopeScaling)]
    if isinstance(value, RopeScaling):
        good["rope_scaling"] = value
    elif not isinstance(value, Mapping) or sorted(value) != sorted(names):
        problems["rope_scaling"] = f"rope_scaling needs exactly {', '.join(names)}, not {value!r}"
    elif any(isinstance(v, bool) or not isinstance(v, int | float) for v in value.values()):
        problems["rope_scaling"] = f"rope_scaling holds something that is not a number: {dict(value)!r}"
    else:
        length = _as_float(value[names[-1]])
        if not length.is_integer():
            problems["rope_scaling"] = f"{names[-1]} must be a whole number, not {value[names[-1]]!r}"
            return
        reals = {n: _as_float(value[n]) for n in names[:-1]}
        good["rope_scaling"] = RopeScaling(**reals, original_max_seq_len=int(length))


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shape_problems(known: Mapping[str, Any]) -> list[str]:
    """Judges the fields that are there, so that one bad field does not hide another."""
    f = {n: v for n, v in known.items() if v is not None}
    most = dict.fromkeys(_COUNTS, _LARGEST_DIM) | {"layers": _MOST_LAYERS, "nominal_params": 2**63}
    bad = {n: f"must be positive, not {f[n]}" for n in (*_COUNTS, *_REALS) if n in f and not f[n] > 0}
    bad |= {n: f"must be at most {limit:,}, not {f[n]}" for n, limit in most.items() if f.get(n, 0) > limit}
    bad |= {n: f"must be finite, not {f[n]}" for n in _REALS if f.get(n) == math.inf}
    problems = [f"{n} {what}" for n, what in bad.items()]
    f = {n: v for n, v in f.items() if n not in bad}
    family = f.get("family")
    if family not in FAMILIES:
        problems.append(f"family must be {' or '.join(FAMILIES)}, not {family!r}")
    if {"heads", "kv_heads"} <= f.keys() and f["heads"] % f["kv_heads"]:
        problems.append(f"heads {f['heads']} is not divisible by kv_heads {f['kv_heads']}")
    problems += _llama_problems(f) if family == "llama" else _gpt2_problems(f) if family == "gpt2" else []
    return problems


def _llama_problems(f: Mapping[str, Any]) -> list[str]:
    problems = []
    if f.get("head_dim", 0) % 2:
        problems.append(f"head_dim {f['head_dim']} is odd, but rope turns pairs")
    if "rope_theta" not in f:
        problems.append("rope_theta is missing")
    scaling = f.get("rope_scaling")
    if scaling is None:
        return problems
    if not all(0 < value < _LARGEST_DIM for value in asdict(scaling).values()):
        problems.append(f"rope_scaling must hold positive numbers below {_LARGEST_DIM:,}")
    elif scaling.low_freq_factor >= scaling.high_freq_factor:
        problems.append("rope_scaling needs low_freq_factor below high_freq_factor")
    return problems


def _gpt2_problems(f: Mapping[str, Any]) -> list[str]:
    problems = [
        f"gpt2 has learned positions: {n} does not apply" for n in ("rope_theta", "rope_scaling") if n in f
    ]
    if {"heads", "kv_heads"} <= f.keys() and f["heads"] != f["kv_heads"]:
        problems.append(f"gpt2 has as many kv_heads as heads, not {f['kv_heads']} and {f['heads']}")
    if {"heads", "head_dim", "dim"} <= f.keys() and f["heads"] * f["head_dim"] != f["dim"]:
        problems.append(
            f"gpt2 needs heads x head_dim = dim, not {f['heads']} x {f['head_dim']} and {f['dim']}"
        )
    return problems


@dataclass(frozen=True)
class Workload:
    """A token's surroundings; `attended` is the mean length of the document a token lies in."""

    seq_len: int
    attended: float
    recompute: float


@dataclass(frozen=True)
class Convention:
    formula: str
    count: Callable[[ModelSpec, Workload], float]


def _causal_forward(spec: ModelSpec, work: Workload) -> float:
    return 2 * spec.layers * spec.attention_width * work.attended


def _square(spec: ModelSpec, work: Workload) -> float:
    return 12 * spec.layers * spec.attention_width * work.seq_len


def _honest(spec: ModelSpec, work: Workload) -> float:
    return 6 * spec.matmul_parameters + 3 * _causal_forward(spec, work)


def _palm(spec: ModelSpec, work: Workload) -> float:
    return 6 * spec.matmul_parameters + _square(spec, work)


def _bench_seed(spec: ModelSpec, work: Workload) -> float:
    return 6 * spec.parameters + _square(spec, work)


def _frontier_seed(spec: ModelSpec, work: Workload) -> float:
    return 6 * (spec.parameters - spec.input_embedding_parameters) + _square(spec, work)


def _nnscaler(spec: ModelSpec, work: Workload) -> float:
    return 6 * (spec.nominal_params or spec.parameters) + 12 * spec.layers * spec.dim * work.seq_len


def _hfu(spec: ModelSpec, work: Workload) -> float:
    attention = _causal_forward(spec, work)
    blocks = 2 * spec.layers * spec.block_matmul_parameters + attention
    return _honest(spec, work) + 0.5 * attention + work.recompute * blocks


CONVENTIONS: dict[str, Convention] = {
    "honest": Convention("6 N_matmul + 6 L H hd T (causal; packed: T = sum l^2 / sum l)", _honest),
    "palm": Convention("6 N_matmul + 12 L H hd T", _palm),
    "bench-seed": Convention("6 N_all + 12 L H hd T", _bench_seed),
    "frontier-seed": Convention("6 (N_all - input embedding) + 12 L H hd T", _frontier_seed),
    "nnscaler": Convention("6 P + 12 L d T, P the nominal size", _nnscaler),
    "hfu": Convention(
        "honest + half an attention forward + the blocks' forward as often as recomputed", _hfu
    ),
}


def attended_within(document_lengths: Sequence[int]) -> float:
    """The mean length of the document a token stands in: what attention costs when documents are masked."""
    return sum(n * n for n in document_lengths) / sum(document_lengths)


def attended_by(spec: ModelSpec, flops: float) -> float:
    """The mean document length at which a token costs `flops` by the causal formula."""
    return (flops - 6 * spec.matmul_parameters) / (6 * spec.layers * spec.attention_width)


def flops_per_token(
    spec: ModelSpec,
    seq_len: int,
    convention: str = "honest",
    recompute: float = 0.0,
    attended: float | None = None,
) -> float:
    """Forward and backward. Only `honest` and `hfu` look at `attended`, only `hfu` at recomputation."""
    if convention not in CONVENTIONS:
        raise ValueError(f"no FLOP convention '{convention}'; there are {', '.join(CONVENTIONS)}")
    if seq_len < 1 or not 0 <= recompute <= 1:
        raise ValueError(f"seq_len {seq_len} must be positive and recompute {recompute} between 0 and 1")
    work = Workload(seq_len, seq_len if attended is None else attended, recompute)
    return float(CONVENTIONS[convention].count(spec, work))
