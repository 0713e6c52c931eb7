"""DiffLlama as Hugging Face names it. Its pairs of heads are half of all heads apart; ours are adjacent."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from arriero.model.diffllama.module import LAMBDAS
from arriero.model.llama import hf_names as llama
from arriero.model.spec import ModelSpec


def _lambdas(spec: ModelSpec) -> dict[str, str]:
    return {
        f"blocks.{layer}.attention.difference.{name}": f"model.layers.{layer}.self_attn.{name}"
        for layer in range(spec.layers)
        for name in LAMBDAS
    }


def _config(spec: ModelSpec) -> dict[str, Any]:
    return llama.rope_config(spec) | {"lambda_std_dev": 0.1}


def _from_config(fields: dict[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    return llama.fields_from_config(fields, {"rms_norm_eps": 1e-5, **config}, where)


def _apart(spec: ModelSpec, rows: Tensor) -> Tensor:
    return rows.unflatten(0, (spec.kv_heads // 2, 2, -1)).transpose(0, 1).flatten(0, 2)


def _adjacent(spec: ModelSpec, rows: Tensor) -> Tensor:
    return rows.unflatten(0, (2, spec.kv_heads // 2, -1)).transpose(0, 1).flatten(0, 2)


NAMES = replace(
    llama.NAMES,
    model_type="diffllama",
    architecture="DiffLlamaForCausalLM",
    peft_prompts=False,
    fixed={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
    further=_lambdas,
    config=_config,
    from_config=_from_config,
    reordered=(r"\.(q|k|v)_proj\.weight$", _apart, _adjacent),
)
