"""GPT-2: fields, parameter counts, tensor-parallel placements, presets. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.model.family import DECODER_PLACEMENTS, Family, ParameterCounts

if TYPE_CHECKING:
    from arriero.model.language_model import LanguageModel
    from arriero.model.name_maps import HuggingFaceNames
    from arriero.model.spec import ModelSpec


def _build(spec: "ModelSpec") -> "LanguageModel":
    from arriero.model.gpt2.module import GPT2Model

    return GPT2Model(spec)


def _hf() -> "HuggingFaceNames":
    from arriero.model.gpt2.hf_names import NAMES

    return NAMES


def _count(spec: "ModelSpec") -> ParameterCounts:
    attention = 2 * spec.dim * (spec.heads + spec.kv_heads) * spec.head_dim
    norms, biases = 4 * spec.dim, 3 * spec.attention_width + spec.dim + spec.ffn + spec.dim
    return ParameterCounts(
        block_matmul=attention + 2 * spec.dim * spec.ffn,
        block_other=norms + biases,
        final_norm=2 * spec.dim,
        other_embeddings=spec.max_seq_len * spec.dim,
    )


def _problems(fields: Mapping[str, Any]) -> list[str]:
    problems = [
        f"gpt2 has learned positions: {name} does not apply"
        for name in ("rope_theta", "rope_scaling")
        if name in fields
    ]
    heads, kv_heads, head_dim, dim = (fields.get(n) for n in ("heads", "kv_heads", "head_dim", "dim"))
    if heads and kv_heads and heads != kv_heads:
        problems.append(f"gpt2 has as many kv_heads as heads, not {kv_heads} and {heads}")
    if heads and head_dim and dim and heads * head_dim != dim:
        problems.append(f"gpt2 needs heads x head_dim = dim, not {heads} x {head_dim} and {dim}")
    return problems


GPT2 = Family(
    name="gpt2",
    build=_build,
    count_parameters=_count,
    defaults={"norm_eps": 1e-5, "tied": True},
    problems=_problems,
    placements={**DECODER_PLACEMENTS, "positions": "position embedding"},
    hf=_hf,
    presets=Path(__file__).with_name("presets.toml"),
)
