"""Qwen2 and Qwen3 as Hugging Face names them; both have the keys of a sliding window."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arriero.errors import UserError
from arriero.model.llama import hf_names as llama
from arriero.model.spec import ModelSpec

_KINDS = ("full_attention", "sliding_attention")
_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0}


def _biases(spec: ModelSpec) -> dict[str, str]:
    return {
        f"blocks.{layer}.attention.{part}.bias": f"model.layers.{layer}.self_attn.{part}_proj.bias"
        for layer in range(spec.layers)
        for part in "qkv"
    }


def _config(spec: ModelSpec) -> dict[str, Any]:
    windows = [spec.window(layer) is not None for layer in range(spec.layers)]
    return llama.rope_config(spec) | {
        "use_sliding_window": any(windows),
        "sliding_window": spec.sliding_window,
        "max_window_layers": spec.max_window_layers if any(windows) else spec.layers,
        "layer_types": [_KINDS[windowed] for windowed in windows],
    }


def _from_config(fields: dict[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    layers, first, kinds = fields["layers"], config.get("max_window_layers", 28), config.get("layer_types")
    fields = llama.fields_from_config(fields, config, where)
    fields["kv_heads"] = config.get("num_key_value_heads", 32)
    if not config.get("use_sliding_window"):
        return fields
    window = config.get("sliding_window", 4096)
    if isinstance(kinds, list):
        if len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
            what = f"{where}: layer_types is {kinds!r}, and num_hidden_layers is {layers!r}"
            raise UserError(what, f"give each layer {' or '.join(_KINDS)}")
        windowed = [i for i, kind in enumerate(kinds) if kind == _KINDS[1]]
        first = windowed[0] if windowed else len(kinds)
        if windowed and windowed != list(range(first, len(kinds))):
            return fields | {"sliding_window": window, "extra": {"window_layers": windowed}}
    if type(first) is not int:
        what = f"{where}: max_window_layers is {first!r}, not a whole number"
        raise UserError(what, "correct it, or copy or download it again")
    if not (isinstance(layers, int) and first >= layers):
        fields |= {"sliding_window": window, "max_window_layers": first}
    return fields


def _qwen3_from_config(fields: dict[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    return _from_config(fields, config, where) | {"head_dim": config.get("head_dim", 128)}


QWEN2_NAMES = replace(
    llama.NAMES,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    peft_prompts=False,
    fixed=_FIXED,
    further=_biases,
    config=_config,
    from_config=_from_config,
)
QWEN3_NAMES = replace(
    QWEN2_NAMES,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={**_FIXED, "attention_bias": False},
    block={**llama.NAMES.block, **{f"attention.{n}_norm": f"self_attn.{n}_norm" for n in "qk"}},
    further=lambda _: {},
    from_config=_qwen3_from_config,
)
