"""GPT-2: fields, parameter counts, tensor-parallel placements, presets. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.model.family import DECODER_PLACEMENTS, Family, ParameterCounts, built_by, lazily

if TYPE_CHECKING:
    from arriero.model.costs import BlockMemory, Mode
    from arriero.model.spec import ModelSpec


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


def _shapes(spec: "ModelSpec") -> dict[str, tuple[int, ...]]:
    dim, ffn = spec.dim, spec.ffn
    matrices = dict.fromkeys((f"attention.{name}" for name in "qkvo"), (dim, dim))
    matrices |= {"ffn.up": (ffn, dim), "ffn.down": (dim, ffn)}
    norms = [f"{norm}.{kind}" for norm in ("attention_norm", "ffn_norm") for kind in ("weight", "bias")]
    return {
        **dict.fromkeys(norms, (dim,)),
        **{f"{name}.weight": shape for name, shape in matrices.items()},
        **{f"{name}.bias": shape[:1] for name, shape in matrices.items()},
    }


def _memory(spec: "ModelSpec", mode: "Mode") -> "BlockMemory":
    """Return the bytes of a block; `tests/model/test_block_costs.py` compares them with the traced module."""
    from arriero.model.costs import Affine, memory_of

    dim, ffn, size = spec.dim, spec.ffn, mode.element
    # input, both norms, q, k, v, result of attention and of its projection; before and after GELU
    kept = size * (8 * dim + 2 * ffn) + 4 * (4 + spec.heads)
    fixed = size * 3 * dim * dim if mode.fused_qkv else 0
    if mode.float8:
        kept += 3 * dim - size * 2 * dim + ffn - size * ffn
        fixed = spec.block_matmul_parameters
    matmuls = [3 * dim] if mode.fused_qkv or mode.float8 else [dim] * 3
    return memory_of(
        mode,
        dim,
        kept,
        fixed,
        size * dim + 4 * spec.heads,
        [size * width for width in (*matmuls, dim, ffn, dim)],
        Affine(size * (2 * dim + ffn), size * dim * ffn),
        gathered=2 * size * dim,
    )


GPT2 = Family(
    name="gpt2",
    build=built_by("arriero.model.gpt2.module:GPT2Model"),
    count_parameters=_count,
    defaults={"norm_eps": 1e-5, "tied": True},
    problems=_problems,
    placements={**DECODER_PLACEMENTS, "positions": "position embedding"},
    hf=lazily("arriero.model.gpt2.hf_names:NAMES"),
    presets=Path(__file__).with_name("presets.toml"),
    block_shapes=_shapes,
    block_memory=_memory,
)
