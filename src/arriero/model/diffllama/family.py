"""DiffLlama: Llama with differential attention (https://arxiv.org/abs/2410.05258). Imports no torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.model.family import DECODER_PLACEMENTS, ParameterCounts, built_by, lazily
from arriero.model.llama.family import LLAMA

if TYPE_CHECKING:
    from arriero.model.spec import ModelSpec


def _count(spec: "ModelSpec") -> ParameterCounts:
    plain = LLAMA.count_parameters(spec)
    return replace(plain, block_other=plain.block_other + 4 * spec.head_dim)


def _problems(fields: Mapping[str, Any]) -> list[str]:
    problems = LLAMA.problems(fields)
    if fields.get("kv_heads", 2) % 2:
        problems.append(f"kv_heads {fields['kv_heads']} is odd, but differential attention pairs heads")
    return problems


def _sequence_flops(spec: "ModelSpec", attended: float) -> float:
    """Return the FLOPs of the scores of all heads, and of their products with values of twice the width."""
    return 3 * spec.layers * spec.attention_width * attended


def _tp_counts(spec: "ModelSpec") -> Mapping[str, int]:
    return {"kv_heads / 2": spec.kv_heads // 2, "ffn": spec.ffn}


DIFFLLAMA = replace(
    LLAMA,
    name="diffllama",
    build=built_by("arriero.model.diffllama.module:DiffLlama"),
    count_parameters=_count,
    problems=_problems,
    placements={**DECODER_PLACEMENTS, "blocks.*.attention.difference": "per head"},
    hf=lazily("arriero.model.diffllama.hf_names:NAMES"),
    meta=None,
    presets=Path(__file__).with_name("presets.toml"),
    block_shapes=None,
    block_memory=None,
    sequence_flops=_sequence_flops,
    tp_counts=_tp_counts,
)
