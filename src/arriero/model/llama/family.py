"""Llama 2 and 3: fields, parameter counts, tensor-parallel placements, presets. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from arriero.model.family import DECODER_PLACEMENTS, Family, ParameterCounts

if TYPE_CHECKING:
    from arriero.model.language_model import LanguageModel
    from arriero.model.name_maps import HuggingFaceNames
    from arriero.model.spec import ModelSpec

_LARGEST = 2**31


def _build(spec: "ModelSpec") -> "LanguageModel":
    from arriero.model.llama.module import Llama

    return Llama(spec)


def _hf() -> "HuggingFaceNames":
    from arriero.model.llama.hf_names import NAMES

    return NAMES


def _meta() -> ModuleType:
    import arriero.model.llama.meta_names

    return arriero.model.llama.meta_names


def _count(spec: "ModelSpec") -> ParameterCounts:
    attention = 2 * spec.dim * (spec.heads + spec.kv_heads) * spec.head_dim
    return ParameterCounts(
        block_matmul=attention + 3 * spec.dim * spec.ffn, block_other=2 * spec.dim, final_norm=spec.dim
    )


def _problems(fields: Mapping[str, Any]) -> list[str]:
    problems = []
    if fields.get("head_dim", 0) % 2:
        problems.append(f"head_dim {fields['head_dim']} is odd, but RoPE rotates pairs of dimensions")
    if "rope_theta" not in fields:
        problems.append("rope_theta is missing")
    scaling = fields.get("rope_scaling")
    if scaling is None:
        return problems
    if not all(0 < value < _LARGEST for value in asdict(scaling).values()):
        problems.append(f"rope_scaling must hold positive numbers below {_LARGEST:,}")
    elif scaling.low_freq_factor >= scaling.high_freq_factor:
        problems.append("rope_scaling needs low_freq_factor below high_freq_factor")
    return problems


LLAMA = Family(
    name="llama",
    build=_build,
    count_parameters=_count,
    defaults={"norm_eps": 1e-5, "rope_theta": 10000.0, "tied": False},
    problems=_problems,
    placements={**DECODER_PLACEMENTS, "blocks.*.ffn.gate": "column-wise"},
    hf=_hf,
    meta=_meta,
    presets=Path(__file__).with_name("presets.toml"),
)
