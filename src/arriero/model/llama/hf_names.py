"""Llama as Hugging Face names it: config.json with its RoPE tables, and tensor names."""

import math
from collections.abc import Mapping
from typing import Any

from arriero.errors import UserError
from arriero.model.name_maps import HuggingFaceNames
from arriero.model.spec import ROPE_TYPES, ModelSpec

# the turns in the original context below which a frequency is scaled, and above which it is kept
_TURNS: dict[str, dict[str, Any]] = {
    "llama3": {"low_freq_factor": None, "high_freq_factor": None},
    "yarn": {"beta_slow": 1.0, "beta_fast": 32.0},
}


def rope_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of RoPE; those of other families with Llama's RoPE are the same."""
    scaling, own = None, spec.rope_scaling
    if own is not None:
        scaling = {"rope_type": own.type, "factor": own.factor}
        if own.type in _TURNS:
            turns = own.low_freq_factor, own.high_freq_factor
            scaling |= dict(zip(_TURNS[own.type], turns, strict=True))
            scaling["original_max_position_embeddings"] = own.original_max_seq_len
        if own.type == "yarn":
            given = {"attention_factor": own.attention_factor, "truncate": None if own.truncate else False}
            scaling |= {name: value for name, value in given.items() if value is not None}
    return {
        # transformers before version 5 reads the first two keys, later versions read rope_parameters
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": spec.rope_theta, **(scaling or {"rope_type": "default"})},
    }


def fields_from_config(fields: dict[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Complete the fields read from config.json by the epsilon of the norms and RoPE."""
    return fields | {"norm_eps": config.get("rms_norm_eps", 1e-6)} | _rope_from_config(config, where)


def _rope_from_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read RoPE: transformers uses rope_scaling where it is given, else rope_parameters; both must agree."""
    tables = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    found = [_rope(config, table, f"{where}: {key}") for key, table in tables.items()] or [{}]
    if found[0] != found[-1]:
        both = " and ".join(f"{key} = {dict(table)!r}" for key, table in tables.items())
        raise UserError(f"{where} contradicts itself: {both}", "remove the one that is wrong")
    theta, outer = found[0].get("rope_theta"), config.get("rope_theta")
    if theta is not None and outer is not None and theta != outer:
        both = f"rope_theta = {outer!r}, and {theta!r} in {next(iter(tables))}"
        raise UserError(f"{where} contradicts itself: {both}", "correct the one that is wrong")
    default = 10000.0 if outer is None else outer
    return found[0] | {"rope_theta": default if theta is None else theta}


def _rope(config: Mapping[str, Any], table: Any, where: str) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise UserError(f"{where} is {table!r}, not a table", "correct it, or copy or download it again")
    kind = table.get("rope_type", table.get("type", "default"))
    if any(isinstance(value, Mapping) for value in table.values()):
        kind = "a table per type of layer"
    if kind not in ("default", *ROPE_TYPES):
        what = f"{where} asks for rope scaling of type {kind!r}"
        raise UserError(what, f"only {', '.join(ROPE_TYPES)} scaling can be read")
    partial_factor = table.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial_factor not in (None, 1):
        what = f"{where} asks for partial_rotary_factor = {partial_factor!r}"
        raise UserError(what, "this variant of the model is not supported")
    theta = table.get("rope_theta", config.get("rope_theta", 10000.0))
    if kind == "default":
        return {"rope_theta": theta}
    original = table.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    scaling = {"type": kind, "factor": table.get("factor")}
    scaling["original_max_seq_len"] = config.get("original_max_position_embeddings", original)
    ours = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    # transformers takes a zero for no value
    found = [table.get(name) or usual for name, usual in _TURNS.get(kind, {}).items()]
    scaling |= dict(zip(ours, found or ours.values(), strict=True))
    if kind == "yarn":
        scaling |= {"attention_factor": _attention_factor(table), "truncate": table.get("truncate", True)}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _attention_factor(table: Mapping[str, Any]) -> Any:
    """Return yarn's factor of the attention; mscale and mscale_all_dim are another way to give it."""
    given, factor = table.get("attention_factor"), table.get("factor")
    scales: list[Any] = [table.get(name) for name in ("mscale", "mscale_all_dim")]
    if given is not None or not all(isinstance(x, int | float) and x for x in (*scales, factor)):
        return given
    over, under = (0.1 * scale * math.log(max(1.0, float(factor or 1.0))) + 1.0 for scale in scales)
    return over / under


NAMES = HuggingFaceNames(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "tied": "tie_word_embeddings",
    },
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    tensors={"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"},
    blocks="model.layers",
    block={
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    },
    config=rope_config,
    from_config=fields_from_config,
    not_weights=r"rotary_emb\.inv_freq$",
    peft_prompts=True,
)
