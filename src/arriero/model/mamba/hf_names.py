"""Mamba-2 and Bamba as Hugging Face names them: one matrix projects z, x, B, C and dt, one conv has three."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from arriero.errors import UserError
from arriero.model.llama.hf_names import NAMES as LLAMA_NAMES
from arriero.model.llama.hf_names import fields_from_config, rope_config
from arriero.model.mamba.family import ROTARY, Shape, attention_layers
from arriero.model.name_maps import Fused, HuggingFaceNames
from arriero.model.spec import ModelSpec


def _mixer(spec: ModelSpec, ours: str, theirs: str) -> tuple[dict[str, str], dict[str, Fused]]:
    """Return names that are one tensor on both sides, and those that hold several of ours."""
    shape = Shape.of(spec)
    grouped = shape.groups * shape.state
    rows = {"z": shape.width, "x": shape.width, "b": grouped, "c": grouped, "dt": shape.heads}
    convolved = {f"conv_{name}": rows[name] for name in "xbc"}
    names = {
        f"{ours}.scan.a_log": f"{theirs}.A_log",
        f"{ours}.scan.skip": f"{theirs}.D",
        f"{ours}.scan.dt_bias": f"{theirs}.dt_bias",
        f"{ours}.norm.weight": f"{theirs}.norm.weight",
    }
    fused: dict[str, Fused] = {}
    for kind in ("weight", "bias")[: 1 + shape.bias]:
        names[f"{ours}.o.{kind}"] = f"{theirs}.out_proj.{kind}"
        fused[f"{theirs}.in_proj.{kind}"] = {f"{ours}.{name}.{kind}": n for name, n in rows.items()}
    for kind, stored in (("taps", "weight"), ("bias", "bias"))[: 1 + shape.conv_bias]:
        fused[f"{theirs}.conv1d.{stored}"] = {f"{ours}.{name}.{kind}": n for name, n in convolved.items()}
    return names, fused


def _mamba2_block(spec: ModelSpec, layer: int) -> tuple[dict[str, str], dict[str, Fused]]:
    ours, theirs = f"blocks.{layer}", f"backbone.layers.{layer}"
    names, fused = _mixer(spec, f"{ours}.mixer", f"{theirs}.mixer")
    return names | {f"{ours}.mixer_norm.weight": f"{theirs}.norm.weight"}, fused


def _bamba_block(spec: ModelSpec, layer: int) -> tuple[dict[str, str], dict[str, Fused]]:
    ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
    names, fused = {}, {}
    if layer in attention_layers(spec):
        names = {f"{ours}.attention.{n}.weight": f"{theirs}.self_attn.{n}_proj.weight" for n in "qkvo"}
    else:
        names, fused = _mixer(spec, f"{ours}.mixer", f"{theirs}.mamba")
    norm = "attention_norm" if layer in attention_layers(spec) else "mixer_norm"
    names[f"{ours}.{norm}.weight"] = f"{theirs}.input_layernorm.weight"
    names[f"{ours}.ffn_norm.weight"] = f"{theirs}.pre_ff_layernorm.weight"
    for name in ("gate", "up", "down"):
        names[f"{ours}.ffn.{name}.weight"] = f"{theirs}.feed_forward.{name}_proj.weight"
    return names, fused


def _names(block: Callable[..., Any], spec: ModelSpec) -> dict[str, str]:
    return {ours: theirs for i in range(spec.layers) for ours, theirs in block(spec, i)[0].items()}


def _fused(block: Callable[..., Any], spec: ModelSpec) -> dict[str, Fused]:
    return {theirs: parts for i in range(spec.layers) for theirs, parts in block(spec, i)[1].items()}


def _mamba2_config(spec: ModelSpec) -> dict[str, Any]:
    shape = Shape.of(spec)
    return {
        "state_size": shape.state,
        "n_groups": shape.groups,
        "conv_kernel": shape.conv,
        "chunk_size": shape.chunk,
        "expand": shape.width // spec.dim,
        "use_bias": shape.bias,
        "use_conv_bias": shape.conv_bias,
        "time_step_limit": list(shape.dt_limits),
        # transformers keeps the residual in fp32 by default, we in the precision of the activations
        "residual_in_fp32": False,
    }


def _bamba_config(spec: ModelSpec) -> dict[str, Any]:
    shape, rope = Shape.of(spec), rope_config(spec)
    rope["rope_parameters"] |= {"partial_rotary_factor": ROTARY}
    return rope | {
        "mamba_n_heads": shape.heads,
        "mamba_d_head": shape.head_dim,
        "mamba_n_groups": shape.groups,
        "mamba_d_state": shape.state,
        "mamba_d_conv": shape.conv,
        "mamba_chunk_size": shape.chunk,
        "mamba_expand": shape.width // spec.dim,
        "mamba_proj_bias": shape.bias,
        "mamba_conv_bias": shape.conv_bias,
        "time_step_limit": list(shape.dt_limits),
        "attn_layer_indices": sorted(attention_layers(spec)),
    }


def _count(config: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = config.get(key, default)
    if type(value) is not int or not 0 <= value < 2**31:
        raise UserError(f"{where}: {key} is {value!r}, not a positive number", "copy or download it again")
    return value or default


def _limits(config: Mapping[str, Any], where: str) -> tuple[float, ...]:
    limits = config.get("time_step_limit")
    if limits is None:
        return ()
    if isinstance(limits, list | tuple):
        # transformers 5 writes infinity so
        limits = [inf if each == {"__float__": "Infinity"} else each for each in limits]
    if not isinstance(limits, list | tuple) or not all(isinstance(each, int | float) for each in limits):
        raise UserError(f"{where}: time_step_limit is {limits!r}, not two numbers", "correct it")
    return () if tuple(limits) == (0.0, inf) else tuple(map(float, limits))


def _mamba2_from_config(fields: dict[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    defaults = {"head_dim": 64, "heads": 128, "tied": False, "norm_eps": 1e-5}
    fields = fields | {name: value for name, value in defaults.items() if fields.get(name) is None}
    extra = {
        "groups": config.get("n_groups", 8),
        "state": config.get("state_size", 128),
        "conv": config.get("conv_kernel", 4),
        "chunk": config.get("chunk_size", 256),
        "bias": config.get("use_bias", False),
        "conv_bias": config.get("use_conv_bias", True),
        "dt_limits": _limits(config, where),
    }
    # a state-space model has no longest sequence: transformers stores none
    length = config.get("max_position_embeddings", 1 << 20)
    return fields | {"extra": extra, "max_seq_len": length, "kv_heads": None}


def _bamba_from_config(fields: dict[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    heads, expand = _count(config, "mamba_n_heads", 128, where), _count(config, "mamba_expand", 2, where)
    dim = _count(config, "hidden_size", 0, where)
    expanded, head_dim = expand * dim, config.get("mamba_d_head", "auto")
    head_dim = expanded // heads if head_dim in ("auto", None) else head_dim
    where_attention = config.get("attn_layer_indices") or []
    if not isinstance(where_attention, list | tuple) or any(type(i) is not int for i in where_attention):
        raise UserError(f"{where}: attn_layer_indices is {where_attention!r}, not a list", "correct it")
    extra = {
        "groups": config.get("mamba_n_groups", 1),
        "state": config.get("mamba_d_state", 256),
        "conv": config.get("mamba_d_conv", 4),
        "chunk": config.get("mamba_chunk_size", 256),
        "bias": config.get("mamba_proj_bias", False),
        "conv_bias": config.get("mamba_conv_bias", True),
        "dt_limits": _limits(config, where),
        "ssm_heads": 0 if expanded == 2 * dim else heads,
        "ssm_head_dim": head_dim,
        "attention_layers": tuple(where_attention),
    }
    given: dict[str, Any] = {"rms_norm_eps": 1e-5, **_without_factor(config, where)}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(given.get(key), Mapping):
            given[key] = _without_factor(given[key], f"{where}: {key}")
    own = {"extra": extra, "kv_heads": config.get("num_key_value_heads", 8)}
    return fields_from_config(fields, given, where) | own


def _without_factor(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Remove the share of rotated dimensions, for which transformers has one value."""
    factor = table.get("partial_rotary_factor", ROTARY)
    if factor != ROTARY:
        what = f"{where} asks for partial_rotary_factor = {factor!r}"
        raise UserError(what, f"transformers uses {ROTARY} for this model, and so does arriero")
    return {name: value for name, value in table.items() if name != "partial_rotary_factor"}


MAMBA2_NAMES = HuggingFaceNames(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    fields={
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_heads",
        "head_dim": "head_dim",
        "max_seq_len": "max_position_embeddings",
        "norm_eps": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    },
    fixed={"hidden_act": "silu"},
    tensors={"embedding.weight": "backbone.embeddings.weight", "norm.weight": "backbone.norm_f.weight"},
    blocks="backbone.layers",
    block={},
    further=partial(_names, _mamba2_block),
    fused=partial(_fused, _mamba2_block),
    config=_mamba2_config,
    from_config=_mamba2_from_config,
    current_name=lambda name: name.replace("backbone.embedding.", "backbone.embeddings."),
)
BAMBA_NAMES = replace(
    LLAMA_NAMES,
    model_type="bamba",
    architecture="BambaForCausalLM",
    tensors={"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.final_layernorm.weight"},
    block={},
    further=partial(_names, _bamba_block),
    fused=partial(_fused, _bamba_block),
    config=_bamba_config,
    from_config=_bamba_from_config,
)
