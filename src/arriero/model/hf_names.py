"""Hugging Face: names and config.json, both ways and bit for bit."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arriero.errors import UserError
from arriero.model.name_maps import Made, as_it_is, refuse_other_names
from arriero.model.spec import ModelSpec

State = Mapping[str, Tensor]

_LLAMA = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_GPT2 = {
    "embedding.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.o": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
_FIELDS = {
    "llama": {
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "max_seq_len": "max_position_embeddings",
        "tied": "tie_word_embeddings",
    },
    "gpt2": {
        "vocab_size": "vocab_size",
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ffn": "n_inner",
        "max_seq_len": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    },
}
_FIXED: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
    },
}
_CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
_NOT_WEIGHTS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


def hf_from_own(spec: ModelSpec) -> dict[str, Made]:
    """A tied head is left out: Hugging Face stores the shared tensor once, as the embedding."""
    recipe = {theirs: Made((ours,), _made(theirs)) for ours, theirs in _names(spec).items()}
    for layer, kind in _fused(spec):
        parts = tuple(f"blocks.{layer}.attention.{p}.{kind}" for p in "qkv")
        name = f"transformer.h.{layer}.attn.c_attn.{kind}"
        recipe[name] = Made(parts, partial(_fuse, _made(name)))
    return recipe


def own_from_hf(spec: ModelSpec) -> dict[str, Made]:
    recipe = {ours: Made((theirs,), _made(theirs)) for ours, theirs in _names(spec).items()}
    for layer, kind in _fused(spec):
        name = f"transformer.h.{layer}.attn.c_attn.{kind}"
        for i, p in enumerate("qkv"):
            recipe[f"blocks.{layer}.attention.{p}.{kind}"] = Made((name,), partial(_third, _made(name), i))
    return recipe


def to_hf(state: State, spec: ModelSpec) -> dict[str, Tensor]:
    own = [name for name in state if not _is_tied_head(name, spec)]
    refuse_other_names(own, own_from_hf(spec), "the model state")
    return {name: made.of(state.__getitem__) for name, made in hf_from_own(spec).items()}


def from_hf(state: State, spec: ModelSpec) -> dict[str, Tensor]:
    found = hf_names(state, spec)
    refuse_other_names(found, hf_from_own(spec), "the Hugging Face state")
    out = {name: made.of(lambda n: state[found[n]]) for name, made in own_from_hf(spec).items()}
    if spec.tied:
        out["head.weight"] = out["embedding.weight"]
    return out


def hf_names(names: Iterable[str], spec: ModelSpec) -> dict[str, str]:
    """From the names transformers writes today to those found; what is no weight of its own is left out."""
    weights = (name for name in names if not _NOT_WEIGHTS.search(name) and not _is_tied_head(name, spec))
    return {_with_prefix(name, spec): name for name in weights}


def hf_config(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    config = {theirs: getattr(spec, ours) for ours, theirs in _FIELDS[spec.family].items()}
    name = str(dtype).removeprefix("torch.")
    # transformers before version 5 reads torch_dtype, later ones dtype
    config |= {"model_type": spec.family, "dtype": name, "torch_dtype": name, **_FIXED[spec.family]}
    config |= {"initializer_range": 0.02, "bos_token_id": None, "eos_token_id": None}
    if spec.family == "gpt2":
        config["architectures"] = ["GPT2LMHeadModel"]
        return config | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    scaling = _hf_scaling(spec)
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": spec.norm_eps,
        # readers before transformers 5 look for the two keys apart, later ones for rope_parameters
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": spec.rope_theta, **(scaling or {"rope_type": "default"})},
    }


def spec_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """`where` is what errors name; they use Hugging Face's names of the fields."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FIELDS:
        raise UserError(f"{where}: model_type is {family!r}", "only llama and gpt2 can be read")
    odd = [f"{k} = {config[k]!r}" for k, v in _FIXED[family].items() if config.get(k, v) != v]
    if odd:
        raise UserError(f"{where} asks for {', '.join(odd)}", "this variant of the model is not supported")
    fields = {"family": family} | {ours: config.get(theirs) for ours, theirs in _FIELDS[family].items()}
    if family == "llama":
        fields |= {"norm_eps": config.get("rms_norm_eps", 1e-6)} | _rope_from_hf(config, where)
    elif fields["ffn"] is None and isinstance(fields["dim"], int):
        fields["ffn"] = 4 * fields["dim"]
    try:
        return ModelSpec.from_dict(fields)
    except UserError as error:
        names = _FIELDS[family] | ({"norm_eps": "rms_norm_eps"} if family == "llama" else {})
        words = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), error.what)
        raise UserError(f"{where}: {words}", "correct it, or copy or download it again") from None


def _names(spec: ModelSpec) -> dict[str, str]:
    """Ours to theirs, for all tensors that map one to one."""
    llama = spec.family == "llama"
    names = dict(_LLAMA if llama else _GPT2)
    prefix, block = ("model.layers", _LLAMA_BLOCK) if llama else ("transformer.h", _GPT2_BLOCK)
    for layer in range(spec.layers):
        for ours, theirs in block.items():
            for kind in ("weight",) if llama else ("weight", "bias"):
                names[f"blocks.{layer}.{ours}.{kind}"] = f"{prefix}.{layer}.{theirs}.{kind}"
    return names if spec.tied else names | {"head.weight": "lm_head.weight"}


def _fused(spec: ModelSpec) -> list[tuple[int, str]]:
    """GPT-2 keeps q, k and v in one matrix."""
    layers = range(spec.layers) if spec.family == "gpt2" else ()
    return [(layer, kind) for layer in layers for kind in ("weight", "bias")]


def _is_tied_head(name: str, spec: ModelSpec) -> bool:
    return spec.tied and name in ("head.weight", "lm_head.weight")


def _with_prefix(name: str, spec: ModelSpec) -> str:
    """The first GPT-2 files were saved without the outer module's name."""
    bare = spec.family == "gpt2" and name.startswith(("wte.", "wpe.", "h.", "ln_f."))
    return f"transformer.{name}" if bare else name


def _made(theirs: str) -> Callable[[Tensor], Tensor]:
    return _transposed if _CONV1D.search(theirs) else as_it_is


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous()


def _fuse(make: Callable[[Tensor], Tensor], *parts: Tensor) -> Tensor:
    return make(torch.cat(parts))


def _third(make: Callable[[Tensor], Tensor], which: int, fused: Tensor) -> Tensor:
    return make(fused).chunk(3)[which].clone()


def _hf_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    if spec.rope_scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": spec.rope_scaling.factor,
        "low_freq_factor": spec.rope_scaling.low_freq_factor,
        "high_freq_factor": spec.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": spec.rope_scaling.original_max_seq_len,
    }


def _rope_from_hf(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """transformers applies rope_scaling alone where there is one, else rope_parameters; both must agree."""
    tables = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    found = [_rope(config, table, f"{where}: {key}") for key, table in tables.items()] or [{}]
    if found[0] != found[-1]:
        told = " and ".join(f"{key} = {dict(table)!r}" for key, table in tables.items())
        raise UserError(f"{where} contradicts itself: {told}", "remove the one that is wrong")
    theta, outer = found[0].get("rope_theta"), config.get("rope_theta")
    if theta is not None and outer is not None and theta != outer:
        told = f"rope_theta = {outer!r}, and {theta!r} in {next(iter(tables))}"
        raise UserError(f"{where} contradicts itself: {told}", "correct the one that is wrong")
    default = 10000.0 if outer is None else outer
    return found[0] | {"rope_theta": default if theta is None else theta}


def _rope(config: Mapping[str, Any], table: Any, where: str) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise UserError(f"{where} is {table!r}, not a table", "correct it, or copy or download it again")
    kind = table.get("rope_type", table.get("type", "default"))
    if any(isinstance(value, Mapping) for value in table.values()):
        kind = "a table per type of layer"
    if kind not in ("default", "llama3"):
        raise UserError(f"{where} asks for rope scaling of type {kind!r}", "only llama3 scaling can be read")
    partial_factor = table.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial_factor not in (None, 1):
        what = f"{where} asks for partial_rotary_factor = {partial_factor!r}"
        raise UserError(what, "this variant of the model is not supported")
    theta = table.get("rope_theta", config.get("rope_theta", 10000.0))
    if kind == "default":
        return {"rope_theta": theta}
    original = table.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    scaling = {name: table.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    scaling["original_max_seq_len"] = config.get("original_max_position_embeddings", original)
    return {"rope_theta": theta, "rope_scaling": scaling}
