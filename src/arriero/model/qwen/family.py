"""Qwen2, Qwen2.5 and Qwen3: Llama with biases on q, k and v, or with norms of q and k. Imports no torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from arriero.model.family import lazily
from arriero.model.llama.family import LLAMA

_USUAL = {"norm_eps": 1e-6, "rope_theta": 1e6, "tied": False}


def _problems(fields: Mapping[str, Any]) -> list[str]:
    where, layers = (fields.get("extra") or {}).get("window_layers", ()), fields.get("layers", 0)
    problems = LLAMA.problems(fields)
    if where and not ("sliding_window" in fields and not fields.get("max_window_layers")):
        problems.append("extra.window_layers needs sliding_window, and no max_window_layers")
    if layers and not all(type(i) is int and i in range(layers) for i in where):
        problems.append(f"extra.window_layers must be numbers from 0 to {layers - 1}")
    return problems


QWEN2 = replace(
    LLAMA,
    name="qwen2",
    defaults={**_USUAL, "qkv_bias": True},
    options=("sliding_window", "max_window_layers"),
    extra={"window_layers": ()},
    problems=_problems,
    hf=lazily("arriero.model.qwen.hf_names:QWEN2_NAMES"),
    meta=None,
    presets=Path(__file__).with_name("presets.toml"),
)
# its presets are in the same file
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    defaults={**_USUAL, "qk_norm": True},
    hf=lazily("arriero.model.qwen.hf_names:QWEN3_NAMES"),
    presets=None,
)
