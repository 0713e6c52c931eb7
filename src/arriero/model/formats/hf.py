"""Hugging Face: names and config.json, both ways and bit for bit."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arriero.errors import UserError
from arriero.model.formats.recipe import Made, as_it_is, refuse_other_names
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
    config |= {"model_type": spec.family, "dtype": str(dtype).removeprefix("torch."), **_FIXED[spec.family]}
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


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    family = config.get("model_type")
    if family not in _FIELDS:
        raise UserError(f"a Hugging Face model of type {family!r}", "only llama and gpt2 can be read")
    odd = [f"{k} = {config[k]!r}" for k, v in _FIXED[family].items() if config.get(k, v) != v]
    if odd:
        raise UserError(
            f"config.json asks for {', '.join(odd)}", "this variant of the model is not supported"
        )
    fields = {"family": family} | {ours: config.get(theirs) for ours, theirs in _FIELDS[family].items()}
    if family == "llama":
        fields |= {"norm_eps": config.get("rms_norm_eps", 1e-6)} | _rope_from_hf(config)
    elif fields["ffn"] is None and fields["dim"] is not None:
        fields["ffn"] = 4 * fields["dim"]
    return ModelSpec.from_dict(fields)


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


def _rope_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise UserError(
            f"config.json asks for rope scaling of type {kind!r}", "only llama3 scaling can be read"
        )
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values = {name.replace("position_embeddings", "seq_len"): rope.get(name) for name in names}
    return {"rope_theta": theta, "rope_scaling": values}
