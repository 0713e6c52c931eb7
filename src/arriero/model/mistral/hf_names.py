"""Mistral as Hugging Face names it: the tensors of Llama, and `sliding_window`, 4096 unless given."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arriero.model.llama import hf_names as llama
from arriero.model.spec import ModelSpec


def _config(spec: ModelSpec) -> dict[str, Any]:
    return llama.rope_config(spec) | {"sliding_window": spec.sliding_window}


def _from_config(fields: dict[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    own = {
        "kv_heads": config.get("num_key_value_heads", 8),
        "sliding_window": config.get("sliding_window", 4096),
    }
    return llama.fields_from_config(fields, config, where) | own


NAMES = replace(
    llama.NAMES,
    model_type="mistral",
    architecture="MistralForCausalLM",
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "layer_types": None},
    config=_config,
    from_config=_from_config,
)
