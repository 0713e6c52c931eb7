"""Meta's format of Llama: tensor names, params.json, RoPE order, and how tensors are split into shards.

Mistral's files have the same tensors in one shard, and their own keys in params.json.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from arriero.errors import UserError, first_problem
from arriero.model.description import read_json
from arriero.model.name_maps import TensorRule, unchanged
from arriero.model.spec import ModelSpec, RopeScaling

ShardRule = Literal["llama2", "llama3"]

_MISTRAL = "mistral"
EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"
_BLOCK = {
    "attention_norm": "attention_norm",
    "attention.q": "attention.wq",
    "attention.k": "attention.wk",
    "attention.v": "attention.wv",
    "attention.o": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "feed_forward.w1",
    "ffn.up": "feed_forward.w3",
    "ffn.down": "feed_forward.w2",
}
_BY_ROWS, _BY_COLUMNS = ("wq", "wk", "wv", "w1", "w3", "output"), ("wo", "w2")
_FOREIGN = ("vision_chunk_size", "vision_model", "moe_args", "quantization_args", "lora_args")
_FOREIGN += ("vision_encoder", "moe", "yarn", "llama_4_scaling", "q_lora_rank", "quantization", "lora")
# the context length of Mistral 7B; params.json has none
_MISTRAL_CONTEXT = 32768
_MISTRAL_KEYS = {
    "dim": "dim",
    "n_layers": "layers",
    "head_dim": "head_dim",
    "hidden_dim": "ffn",
    "n_heads": "heads",
    "n_kv_heads": "kv_heads",
    "norm_eps": "norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
}
_SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
# (multiple_of, ffn_dim_multiplier) of the published Llama 2 and 3 models
_WIDTHS = ((256, None), (256, 1.5), (4096, 1.3), (1024, 1.3), (4096, 1.2))


_Dim = Annotated[int, Field(ge=1, le=2**31)]
_Real = Annotated[float, Field(gt=0, le=1e15)]


class _Params(BaseModel):
    """Types of params.json. Defaults are for type checks only; `spec_from_params` reports missing keys."""

    dim: _Dim = 1
    n_layers: _Dim = 1
    n_heads: _Dim = 1
    n_kv_heads: _Dim | None = None
    vocab_size: Annotated[int, Field(ge=-1, le=2**31)] = -1
    multiple_of: _Dim = 256
    ffn_dim_multiplier: _Real | None = None
    norm_eps: _Real = 1e-5
    rope_theta: _Real | None = 10000.0
    use_scaled_rope: bool = False
    head_dim: _Dim | None = None
    hidden_dim: _Dim | None = None
    sliding_window: _Dim | None = None
    max_position_embeddings: _Dim | None = None


def read_params(path: Path) -> dict[str, Any]:
    """Read params.json and check the type of each key that describes a Llama."""
    params = read_json(path)
    try:
        _Params.model_validate(params, strict=True)
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error.errors())}", "copy or download it again") from None
    return params


def rule_of(spec: ModelSpec) -> ShardRule:
    """Return which of Meta's two code bases reads a model, by its vocabulary: 32,000 or 128,256."""
    if spec.family == _MISTRAL:
        return "llama3"
    return "llama3" if spec.rope_scaling is not None or spec.vocab_size > 2**16 else "llama2"


def is_safetensors(spec: ModelSpec) -> bool:
    """Return whether the weights are one safetensors file, as Mistral publishes them."""
    return spec.family == _MISTRAL


def meta_from_own(spec: ModelSpec, kv_heads: int | None = None) -> dict[str, TensorRule]:
    """Map each of Meta's tensors to ours; a tied head is stored too. `kv_heads` may exceed the model's."""
    recipe = {}
    for ours, theirs in _names(spec).items():
        recipe[theirs] = TensorRule((ours,), _to_meta(theirs, spec, kv_heads or spec.kv_heads))
    return recipe if not spec.tied else recipe | {HEAD: TensorRule(("embedding.weight",))}


def own_from_meta(spec: ModelSpec, kv_heads: int | None = None) -> dict[str, TensorRule]:
    """Map each tensor of ours to Meta's."""
    recipe = {}
    for ours, theirs in _names(spec).items():
        recipe[ours] = TensorRule((theirs,), _from_meta(theirs, spec, kv_heads or spec.kv_heads))
    return recipe


def stored_kv_heads(spec: ModelSpec, shards: int) -> int:
    """Return the number of kv heads in the files: with more shards than heads, each is stored repeatedly."""
    return max(spec.kv_heads, shards)


def split(name: str, tensor: Tensor, shards: int, rule: ShardRule) -> list[Tensor]:
    dim = _split_dim(name, rule)
    if dim is None:
        return [tensor] * shards
    return list(tensor.chunk(shards, dim=dim))


def merged_shape(name: str, pieces: Sequence[Tensor], rule: ShardRule) -> tuple[int, ...]:
    shape, dim = list(pieces[0].shape), _split_dim(name, rule)
    if dim is not None and dim < len(shape):
        shape[dim] = sum(piece.shape[dim] for piece in pieces)
    return tuple(shape)


def merge(name: str, pieces: Sequence[Callable[[], Tensor]], shape: Sequence[int], rule: ShardRule) -> Tensor:
    """Merge shards with one of them in memory beside the whole; replicated tensors are read once."""
    dim = _split_dim(name, rule)
    if dim is None or len(pieces) == 1:
        return pieces[0]()
    whole, start = None, 0
    for read in pieces:
        piece = read()
        whole = torch.empty(tuple(shape), dtype=piece.dtype) if whole is None else whole
        whole.narrow(dim, start, piece.shape[dim]).copy_(piece)
        start += piece.shape[dim]
    assert whole is not None
    return whole


def rule_of_stored_shards(embedding: Tensor, dim: int) -> ShardRule:
    """Return the rule of stored shards: Llama 2 splits the embedding by columns, Llama 3 by rows."""
    return "llama3" if embedding.shape[-1] == dim else "llama2"


def check_divisible(spec: ModelSpec, shards: int, rule: ShardRule) -> None:
    """Raise UserError if the model cannot be split into that many model-parallel shards."""
    if spec.family == _MISTRAL and shards > 1:
        raise UserError("Mistral's format has one file", "leave --model-parallel out")
    counts = {"heads": spec.heads, "ffn": spec.ffn, "vocab_size": spec.vocab_size}
    counts |= {"dim": spec.dim} if rule == "llama2" else {}
    undivided = [f"{name} {count}" for name, count in counts.items() if count % shards]
    if spec.kv_heads % shards and shards % spec.kv_heads:
        undivided.append(f"kv_heads {spec.kv_heads}")
    if undivided:
        raise UserError(
            f"{shards} model-parallel shards do not divide {', '.join(undivided)}",
            "choose another --model-parallel",
        )


def meta_params(spec: ModelSpec, rule: ShardRule, kv_heads: int | None = None) -> dict[str, Any]:
    """Return params.json with only the keys that Meta's code of that generation, or Mistral's, accepts."""
    _check_expressible(spec)
    if spec.family == _MISTRAL:
        window = {} if spec.sliding_window is None else {"sliding_window": spec.sliding_window}
        return {theirs: getattr(spec, ours) for theirs, ours in _MISTRAL_KEYS.items()} | window
    multiple, multiplier = _width(spec)
    params: dict[str, Any] = {
        "dim": spec.dim,
        "n_layers": spec.layers,
        "n_heads": spec.heads,
        "n_kv_heads": kv_heads or spec.kv_heads,
        "vocab_size": spec.vocab_size,
        "multiple_of": multiple,
    }
    params |= {} if multiplier is None else {"ffn_dim_multiplier": multiplier}
    params["norm_eps"] = spec.norm_eps
    params |= {"rope_theta": spec.rope_theta} if rule == "llama3" or spec.rope_theta != 10000.0 else {}
    return params | ({"use_scaled_rope": True} if spec.rope_scaling is not None else {})


def spec_from_params(params: Mapping[str, Any], vocab_size: int, tied: bool) -> ModelSpec:
    """Read the model. `vocab_size` and `tied` come from the weights; params.json may not have them."""
    if foreign := [key for key in _FOREIGN if params.get(key) not in (None, -1)]:
        todo = "only plain Llama 2 and 3 and Mistral models can be read"
        raise UserError(f"params.json has {', '.join(foreign)}", todo)
    if missing := [key for key in ("dim", "n_layers", "n_heads") if key not in params]:
        raise UserError(
            f"params.json lacks {', '.join(missing)}", "give the file Meta ships with the weights"
        )
    if params.get("hidden_dim") is not None:
        return _checked(_mistral_fields(params, vocab_size, tied))
    theta, scaled = params.get("rope_theta") or 10000.0, params.get("use_scaled_rope", False)
    width = ffn_width(params["dim"], params.get("multiple_of", 256), params.get("ffn_dim_multiplier"))
    fields = {
        "family": "llama",
        "vocab_size": vocab_size,
        "dim": params["dim"],
        "layers": params["n_layers"],
        "heads": params["n_heads"],
        "kv_heads": params.get("n_kv_heads"),
        "ffn": width,
        "max_seq_len": _context(theta, scaled, vocab_size),
        "norm_eps": params.get("norm_eps", 1e-5),
        "rope_theta": theta,
        # the file does not have the factor: 32 for the tied models of 3.2, 8 for 3.1 and 3.3
        "rope_scaling": {"factor": 32.0 if tied else 8.0, **_SCALED} if scaled else None,
        "tied": tied,
    }
    return _checked(fields)


def _mistral_fields(params: Mapping[str, Any], vocab_size: int, tied: bool) -> dict[str, Any]:
    window = params.get("sliding_window")
    found = {ours: params.get(theirs) for theirs, ours in _MISTRAL_KEYS.items()}
    return found | {
        "family": _MISTRAL,
        "vocab_size": vocab_size,
        "max_seq_len": params.get("max_position_embeddings") or _MISTRAL_CONTEXT,
        "norm_eps": params.get("norm_eps", 1e-5),
        # as Mistral's own code has it
        "rope_theta": params.get("rope_theta") or (1e4 if window else 1e6),
        "sliding_window": window,
        "tied": tied,
    }


def _checked(fields: Mapping[str, Any]) -> ModelSpec:
    try:
        return ModelSpec.from_dict(fields)
    except UserError as error:
        raise UserError(f"params.json: {error.what}", "correct it, or copy or download it again") from None


def ffn_width(dim: int, multiple_of: int, multiplier: float | None) -> int:
    width = int(2 * (4 * dim) / 3)
    width = width if multiplier is None else int(multiplier * width)
    return -(-width // multiple_of) * multiple_of


def _names(spec: ModelSpec) -> dict[str, str]:
    names = {"embedding.weight": EMBEDDING, "norm.weight": "norm.weight"}
    for layer in range(spec.layers):
        for ours, theirs in _BLOCK.items():
            names[f"blocks.{layer}.{ours}.weight"] = f"layers.{layer}.{theirs}.weight"
    return names if spec.tied else names | {"head.weight": HEAD}


def _split_dim(name: str, rule: ShardRule) -> int | None:
    kind = name.split(".")[-2]
    if name == EMBEDDING:
        return 1 if rule == "llama2" else 0
    return 0 if kind in _BY_ROWS else 1 if kind in _BY_COLUMNS else None


def _to_meta(theirs: str, spec: ModelSpec, kv_heads: int) -> Callable[[Tensor], Tensor]:
    kind = theirs.split(".")[-2]
    if kind == "wq":
        return partial(_interleave, spec.heads, 1)
    if kind in ("wk", "wv"):
        repeats = kv_heads // spec.kv_heads
        return partial(_interleave if kind == "wk" else _repeat, spec.kv_heads, repeats)
    return unchanged


def _from_meta(theirs: str, spec: ModelSpec, kv_heads: int) -> Callable[[Tensor], Tensor]:
    kind = theirs.split(".")[-2]
    if kind == "wq":
        return partial(_deinterleave, spec.heads, 1)
    if kind in ("wk", "wv"):
        repeats = kv_heads // spec.kv_heads
        return partial(_deinterleave if kind == "wk" else _once, kv_heads, repeats)
    return unchanged


def _interleave(heads: int, repeats: int, tensor: Tensor) -> Tensor:
    """Reorder rows: Meta rotates dimensions 2i and 2i + 1, Arriero i and i + E/2."""
    halves = tensor.unflatten(0, (heads, 2, -1))
    return _repeat(heads, repeats, halves.transpose(1, 2).flatten(0, 2))


def _deinterleave(heads: int, repeats: int, tensor: Tensor) -> Tensor:
    pairs = _once(heads, repeats, tensor).unflatten(0, (heads // repeats, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def _repeat(heads: int, repeats: int, tensor: Tensor) -> Tensor:
    if repeats == 1:
        return tensor
    return tensor.unflatten(0, (heads, -1)).repeat_interleave(repeats, 0).flatten(0, 1)


def _once(heads: int, repeats: int, tensor: Tensor) -> Tensor:
    return tensor if repeats == 1 else tensor.unflatten(0, (heads, -1))[::repeats].flatten(0, 1)


def _width(spec: ModelSpec) -> tuple[int, float | None]:
    """Return multiple_of and ffn_dim_multiplier for this ffn: a published pair, else the shortest number."""
    for multiple, multiplier in _WIDTHS:
        if ffn_width(spec.dim, multiple, multiplier) == spec.ffn:
            return multiple, multiplier
    multiple = next(m for m in (256, 128, 64, 32, 16, 8, 4, 2, 1) if spec.ffn % m == 0)
    target = (spec.ffn - (multiple - 1) / 2 + (0.5 if multiple == 1 else 0.0)) / int(8 * spec.dim / 3)
    for digits in range(1, 16):
        if ffn_width(spec.dim, multiple, round(target, digits)) == spec.ffn:
            return multiple, round(target, digits)
    raise UserError(f"params.json cannot express ffn {spec.ffn} for dim {spec.dim}", "convert to hf instead")


def _context(theta: float, scaled: bool, vocab_size: int) -> int:
    """Return the published context length, which Meta's files do not contain."""
    if scaled:
        return 131072
    return 8192 if vocab_size > 2**16 else 16384 if theta >= 1e6 else 4096


def _check_expressible(spec: ModelSpec) -> None:
    if spec.family == _MISTRAL and spec.rope_scaling is not None:
        raise UserError("Mistral's params.json has no rope_scaling", "convert to hf, dcp or torch")
    if spec.head_dim * spec.heads != spec.dim and spec.family != _MISTRAL:
        raise UserError(
            f"Meta's layout needs heads x head_dim = dim, not {spec.heads} x {spec.head_dim} and {spec.dim}",
            "convert to hf, dcp or torch",
        )
    scaling = spec.rope_scaling
    if scaling is not None and scaling not in _scalings():
        raise UserError(
            "Meta's params.json can only say that rope is scaled as llama3 by 8 or 32 from 8192 between 1 "
            f"and 4, not as {scaling.type} by {scaling.factor:g} from {scaling.original_max_seq_len} between "
            f"{scaling.low_freq_factor:g} and {scaling.high_freq_factor:g}",
            "convert to hf, dcp or torch",
        )


def _scalings() -> list[RopeScaling]:
    return [RopeScaling(factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0)]
