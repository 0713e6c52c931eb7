"""The dimensions of a model and what follows from them: parameters, bytes, FLOPs per token. No torch."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from arriero.errors import UserError, nearest
from arriero.model.family import ParameterCounts, families, family_of

_REQUIRED = ("vocab_size", "dim", "layers", "heads", "ffn", "max_seq_len")
_COUNTS = (*_REQUIRED, "kv_heads", "head_dim", "nominal_params", "sliding_window")
_FLAGS = ("tied", "qkv_bias", "qk_norm")
# Options of attention that only some families have, with their values elsewhere.
_OPTIONS: dict[str, Any] = {
    "qkv_bias": False,
    "qk_norm": False,
    "sliding_window": None,
    "max_window_layers": 0,
}
_REALS = ("norm_eps", "rope_theta")
# Limits far above any model: a damaged file must not cause an endless loop or a huge allocation.
_MOST_LAYERS = 10_000
_LARGEST_DIM = 2**31


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the RoPE frequencies, which extends the context length; `type` is Hugging Face's rope_type.

    linear divides all frequencies by `factor`. llama3 and yarn divide those that make fewer turns than
    `low_freq_factor` in the original context, and keep those above `high_freq_factor` (yarn: beta_slow and
    beta_fast). dynamic changes nothing up to `max_seq_len`. yarn multiplies q and k by `attention_factor`.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    type: str = "llama3"
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.type in ("linear", "dynamic"):
            # not used, and not in a Hugging Face directory: the same model must be equal
            for name, value in zip(_SCALING_NUMBERS[1:], (1.0, 4.0, 8192), strict=True):
                object.__setattr__(self, name, value)

    @property
    def amplitude(self) -> float:
        """Return what sines and cosines are multiplied by."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(max(1.0, self.factor)) + 1.0

    def problems(self) -> list[str]:
        numbers = [value for value in vars(self).values() if isinstance(value, float | int)]
        if self.type not in ROPE_TYPES:
            return [f"rope_scaling.type must be {', '.join(ROPE_TYPES)}, not {self.type!r}"]
        if self.type != "yarn" and (self.attention_factor is not None or not self.truncate):
            return [f"rope_scaling of type {self.type} has no attention_factor and no truncate"]
        if not all(0 < value < _LARGEST_DIM for value in numbers if value is not False):
            return [f"rope_scaling must hold positive numbers below {_LARGEST_DIM:,}"]
        if self.low_freq_factor >= self.high_freq_factor:
            return ["rope_scaling needs low_freq_factor below high_freq_factor"]
        return []


ROPE_TYPES = ("llama3", "linear", "dynamic", "yarn")
_SCALING_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")


@dataclass(frozen=True)
class ModelSpec:
    """`extra` holds the fields that only the model's family has.

    With a `sliding_window`, a token attends to that many tokens up to itself, except in the first
    `max_window_layers` blocks. `qkv_bias` adds biases to q, k and v; `qk_norm` normalises heads of q and k.
    """

    family: str
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
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    nominal_params: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if problems := _shape_problems(vars(self)):
            raise _cannot_build(problems)
        object.__setattr__(self, "extra", {**family_of(self.family).extra, **self.extra})

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "ModelSpec":
        """Complete the fields with the defaults of the family; all problems are reported at once."""
        given, problems = _typed(values)
        given.setdefault("family", "llama")
        family = families().get(given["family"])
        known = {**(family.defaults if family else {}), **given}
        heads, dim = known.get("heads", 0), known.get("dim", 0)
        if heads > 0 and "kv_heads" not in problems:
            known.setdefault("kv_heads", heads)
        if heads > 0 and dim > 0 and known.get("head_dim") is None:
            known["head_dim"] = dim // heads
            if dim % heads:
                del known["head_dim"]
                problems["head_dim"] = f"dim {dim} is not divisible by heads {heads}: give head_dim"
        if found := [*problems.values(), *_shape_problems(known)]:
            raise _cannot_build(found)
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that have a value; options of attention where they differ from the family's."""
        usual = {**_OPTIONS, **family_of(self.family).defaults}
        values = asdict(self)
        if self.rope_scaling is not None:
            plain = asdict(RopeScaling(1.0))
            values["rope_scaling"] = {
                n: v for n, v in values["rope_scaling"].items() if n in _SCALING_NUMBERS or v != plain[n]
            }
        return {
            name: value
            for name, value in values.items()
            if value is not None and value != {} and not (name in _OPTIONS and value == usual[name])
        }

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a block, or None where it attends to all tokens before."""
        return self.sliding_window if layer in self._windowed else None

    @cached_property
    def _windowed(self) -> frozenset[int]:
        if self.sliding_window is None:
            return frozenset()
        return frozenset(self.extra.get("window_layers") or range(self.max_window_layers, self.layers))

    def keep_blocks(self, blocks: Sequence[int]) -> "ModelSpec":
        """Return the model with only these blocks, numbered from 0."""

        def renumbered(numbers: Collection[int]) -> tuple[int, ...]:
            return tuple(i for i, block in enumerate(blocks) if block in numbers)

        windowed, extra = renumbered(self._windowed), dict(self.extra)
        # these fields hold numbers of blocks
        extra |= {name: renumbered(extra[name]) for name in extra if name.endswith("_layers")}
        first = windowed[0] if windowed else 0
        at_the_end = windowed == tuple(range(first, len(blocks)))
        if "window_layers" in extra:
            extra["window_layers"] = () if at_the_end else windowed
        window = {
            "sliding_window": self.sliding_window if windowed else None,
            "max_window_layers": first if at_the_end else 0,
        }
        return replace(self, layers=len(blocks), nominal_params=None, extra=extra, **window)

    def mean_over_layers(self, of_window: Callable[[int | None], float]) -> float:
        """Return the mean over the blocks of a function of their sliding window."""
        windowed = len(self._windowed) / self.layers
        found = windowed * of_window(self.sliding_window) if windowed else 0.0
        return found + ((1 - windowed) * of_window(None) if windowed < 1 else 0.0)

    def attended(self, length: float) -> float:
        """Return the document length at which causal attention without window has the same FLOPs."""
        return self.mean_over_layers(lambda w: length if w is None or w >= length else 2 * w - w * w / length)

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @cached_property
    def counts(self) -> ParameterCounts:
        return family_of(self.family).count_parameters(self)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.dim

    @property
    def input_embedding_parameters(self) -> int:
        """Parameters of tables that are only looked up: tokens and, in some families, positions."""
        return self.embedding_parameters + self.counts.other_embeddings

    @cached_property
    def kinds(self) -> tuple["ModelSpec", ...]:
        """For each block a model with only its kind of blocks: this one, if its blocks are equal."""
        kinds = family_of(self.family).kinds
        return tuple(kinds(self)) if kinds else (self,) * self.layers

    @cached_property
    def _blocks(self) -> tuple[int, int]:
        """Numbers of matmul parameters and of others in all blocks."""
        counts = [(number, kind.counts) for kind, number in Counter(self.kinds).items()]
        return sum(n * c.block_matmul for n, c in counts), sum(n * c.block_other for n, c in counts)

    @property
    def block_matmul_parameters(self) -> int:
        """Matmul parameters of a block, on average where blocks differ."""
        return round(self._blocks[0] / self.layers)

    @property
    def block_parameters(self) -> int:
        return round(sum(self._blocks) / self.layers)

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied by: all linear layers and the head, tied or not."""
        return self._blocks[0] + self.embedding_parameters

    @property
    def parameters(self) -> int:
        head = 0 if self.tied else self.embedding_parameters
        return self.input_embedding_parameters + sum(self._blocks) + self.counts.final_norm + head

    @property
    def bf16_bytes(self) -> int:
        return 2 * self.parameters


def _cannot_build(problems: Sequence[str]) -> UserError:
    todo = "correct these under [model]"
    if any(each.endswith(" is missing") for each in problems):
        todo += ", or set model.preset (`arriero config models` lists them)"
    return UserError(f"this model cannot be built: {'; '.join(problems)}", todo)


def _typed(values: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the right type, and a sentence for each other one."""
    names = [f.name for f in fields(ModelSpec)]
    good: dict[str, Any] = {}
    known = families().get(str(values.get("family") or "llama"))
    usual = known.defaults if known else {}
    problems = {n: f"{n} is missing" for n in _REQUIRED if values.get(n) is None and n not in usual}
    for name, value in values.items():
        if name not in names:
            near = nearest(name, names)
            problems[name] = f"{name} is not a model field" + (f" (did you mean {near}?)" if near else "")
        elif value is None or (name in ("rope_scaling", "sliding_window") and value is False):
            continue
        elif name == "rope_scaling":
            _take_scaling(value, good, problems)
        elif name == "extra":
            _take_extra(value, str(values.get("family") or "llama"), good, problems)
        elif kind := _wrong_kind(name, value):
            problems[name] = f"{name} must be {kind}, not {value!r}"
        else:
            good[name] = _as_float(value) if name in _REALS else value
    return good, problems


def _wrong_kind(name: str, value: object) -> str | None:
    """Return what the value should have been, or None if it is right."""
    if name in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name == "family":
        return None if isinstance(value, str) else "a name"
    whole = name in (*_COUNTS, "max_window_layers")
    wanted, kind = (int, "a whole number") if whole else (int | float, "a number")
    return None if isinstance(value, wanted) and not isinstance(value, bool) else kind


def _take_scaling(value: object, good: dict[str, Any], problems: dict[str, str]) -> None:
    kinds: dict[str, Any] = dict.fromkeys(_SCALING_NUMBERS, int | float)
    kinds |= {"type": str, "attention_factor": int | float | None, "truncate": bool}
    if isinstance(value, RopeScaling):
        good["rope_scaling"] = value
    elif not isinstance(value, Mapping) or not set(_SCALING_NUMBERS) <= set(value) <= set(kinds):
        needed = ", ".join(_SCALING_NUMBERS)
        problems["rope_scaling"] = f"rope_scaling needs {needed} and no unknown keys, not {value!r}"
    elif wrong := [n for n, v in value.items() if not _is_a(v, kinds[n])]:
        problems["rope_scaling"] = f"rope_scaling has a wrong {', '.join(wrong)}: {dict(value)!r}"
    else:
        reals: dict[str, Any] = {
            n: _as_float(v) if n in (*_SCALING_NUMBERS, "attention_factor") and v is not None else v
            for n, v in value.items()
        }
        length = reals["original_max_seq_len"]
        if not length.is_integer():
            problems["rope_scaling"] = f"original_max_seq_len must be a whole number, not {length!r}"
            return
        reals["original_max_seq_len"] = int(length)
        good["rope_scaling"] = RopeScaling(**reals)


def _is_a(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _take_extra(value: object, family: str, good: dict[str, Any], problems: dict[str, str]) -> None:
    """Check the family's own fields: known names, and the type of their default."""
    known = families()[family].extra if family in families() else {}
    if not isinstance(value, Mapping):
        problems["extra"] = f"extra must be a table, not {value!r}"
        return
    value = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    for name, item in value.items():
        if name not in known:
            near = nearest(name, list(known))
            hint = f" (did you mean {near}?)" if near else ""
            problems[f"extra.{name}"] = f"extra.{name} is not a field of the family {family}{hint}"
        elif type(item) is not type(known[name]) and not (
            isinstance(known[name], float) and type(item) is int
        ):
            kind = "list" if known[name] == () else type(known[name]).__name__
            problems[f"extra.{name}"] = f"extra.{name} must be of type {kind}, not {item!r}"
    good["extra"] = {name: item for name, item in value.items() if f"extra.{name}" not in problems}


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shape_problems(known: Mapping[str, Any]) -> list[str]:
    """Check the fields that are given, so that one bad field does not hide another."""
    f = {n: v for n, v in known.items() if v is not None}
    most = dict.fromkeys(_COUNTS, _LARGEST_DIM) | {"layers": _MOST_LAYERS, "nominal_params": 2**63}
    family = f.get("family")
    zero = {n for n, v in families()[family].defaults.items() if v == 0} if family in families() else set()
    bad = {
        n: f"must be positive, not {f[n]}"
        for n in (*_COUNTS, *_REALS)
        if n in f and not f[n] > 0 and not (n in zero and f[n] == 0)
    }
    bad |= {n: f"must be at most {limit:,}, not {f[n]}" for n, limit in most.items() if f.get(n, 0) > limit}
    bad |= {n: f"must be finite, not {f[n]}" for n in _REALS if f.get(n) == math.inf}
    problems = [f"{n} {what}" for n, what in bad.items()]
    f = {n: v for n, v in f.items() if n not in bad}
    if family not in families():
        problems.append(f"family must be {' or '.join(families())}, not {family!r}")
    if {"heads", "kv_heads"} <= f.keys() and f["heads"] % f["kv_heads"]:
        problems.append(f"heads {f['heads']} is not divisible by kv_heads {f['kv_heads']}")
    if family not in families():
        return problems
    if f.get("max_window_layers", 0) < 0:
        problems.append(f"max_window_layers must not be negative, not {f['max_window_layers']}")
    usual = {**_OPTIONS, **families()[family].defaults}
    for name in _OPTIONS:
        if f.get(name, _OPTIONS[name]) != usual[name] and name not in families()[family].options:
            problems.append(f"{name} cannot be set for the family {family}")
    return problems + families()[family].problems(f)


@dataclass(frozen=True)
class Recompute:
    """The shares of a block's forward pass that backward repeats, as a mean over the blocks.

    `matmul` is a share of the FLOPs of its matmuls, `attention` of attention. A feed-forward layer in tiles
    that is recomputed inside a recomputed block is computed three times: then `matmul` may exceed 1.
    """

    matmul: float = 0.0
    attention: float = 0.0


@dataclass(frozen=True)
class Workload:
    """What attention and recomputation depend on; `attended` is the mean length of a token's document."""

    seq_len: int
    attended: float
    recompute: Recompute


@dataclass(frozen=True)
class FlopFormula:
    """A way to count FLOPs per token, forward and backward, by the name of the project that uses it."""

    formula: str
    count: Callable[[ModelSpec, Workload], float]


def sequence_flops(spec: ModelSpec, attended: float) -> float:
    """Return the FLOPs per token of what mixes tokens in the forward pass of all blocks, without masked
    positions: attention, or what the family has in its place."""
    given = family_of(spec.family).sequence_flops
    return given(spec, attended) if given else 2 * spec.layers * spec.attention_width * attended


def _causal_attention(spec: ModelSpec, work: Workload) -> float:
    return sequence_flops(spec, work.attended)


def _full_attention(spec: ModelSpec, work: Workload) -> float:
    """Return the FLOPs of forward and backward of attention as if it were not causal."""
    fixed = sequence_flops(spec, 0.0)
    return 6 * (sequence_flops(spec, work.seq_len) - fixed) + 3 * fixed


def _causal(spec: ModelSpec, work: Workload) -> float:
    return 6 * spec.matmul_parameters + 3 * _causal_attention(spec, work)


def _palm(spec: ModelSpec, work: Workload) -> float:
    return 6 * spec.matmul_parameters + _full_attention(spec, work)


def _llm_train_bench(spec: ModelSpec, work: Workload) -> float:
    return 6 * spec.parameters + _full_attention(spec, work)


def _frontier_torchtitan(spec: ModelSpec, work: Workload) -> float:
    return 6 * (spec.parameters - spec.input_embedding_parameters) + _full_attention(spec, work)


def _nnscaler(spec: ModelSpec, work: Workload) -> float:
    return 6 * (spec.nominal_params or spec.parameters) + 12 * spec.layers * spec.dim * work.seq_len


def _hfu(spec: ModelSpec, work: Workload) -> float:
    attention, matmuls = _causal_attention(spec, work), 2 * spec.layers * spec.block_matmul_parameters
    again = work.recompute.matmul * matmuls + work.recompute.attention * attention
    return _causal(spec, work) + 0.5 * attention + again


FLOP_FORMULAS: dict[str, FlopFormula] = {
    "causal": FlopFormula("6 N_matmul + 6 L H hd T (causal; packed: T = sum l^2 / sum l)", _causal),
    "palm": FlopFormula("6 N_matmul + 12 L H hd T", _palm),
    "llm-train-bench": FlopFormula("6 N_all + 12 L H hd T", _llm_train_bench),
    "frontier-torchtitan": FlopFormula("6 (N_all - input embedding) + 12 L H hd T", _frontier_torchtitan),
    "nnscaler": FlopFormula("6 P + 12 L d T, P the nominal size", _nnscaler),
    "hfu": FlopFormula(
        "causal + half an attention forward + what the backward pass recomputes of the blocks", _hfu
    ),
}
# Names of formulas in results that older versions stored.
OLD_FORMULA_NAMES = {
    "honest": "causal",
    "bench-seed": "llm-train-bench",
    "frontier-seed": "frontier-torchtitan",
}


def attended_by(spec: ModelSpec, flops: float) -> float:
    """Return the mean `attended` length at which a token costs `flops` by the causal formula."""
    fixed = sequence_flops(spec, 0.0)
    per_length = sequence_flops(spec, 1.0) - fixed
    return (flops / 3 - 2 * spec.matmul_parameters - fixed) / per_length if per_length else 0.0


def flops_per_token(
    spec: ModelSpec,
    seq_len: int,
    formula: str = "causal",
    recompute: float | Recompute = 0.0,
    attended: float | None = None,
) -> float:
    """Return the FLOPs of forward and backward per token.

    Only `causal` and `hfu` depend on `attended`, and only `hfu` on what is recomputed: a fraction of the
    blocks, or shares of their matmuls and attention. `attended` is twice the mean number of tokens that a
    token attends to: the mean document length, or less with a sliding window.
    """
    if formula not in FLOP_FORMULAS:
        raise ValueError(f"no FLOP formula '{formula}'; there are {', '.join(FLOP_FORMULAS)}")
    again = recompute if isinstance(recompute, Recompute) else Recompute(recompute, recompute)
    if seq_len < 1 or not (0 <= again.matmul <= 2 and 0 <= again.attention <= 1):
        raise ValueError(f"seq_len {seq_len} must be positive and recompute {recompute} between 0 and 1")
    work = Workload(seq_len, spec.attended(seq_len) if attended is None else attended, again)
    return float(FLOP_FORMULAS[formula].count(spec, work))
