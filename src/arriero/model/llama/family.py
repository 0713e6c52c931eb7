"""Llama 2 and 3: fields, parameter counts, tensor-parallel placements, presets. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.model.family import DECODER_PLACEMENTS, Family, ParameterCounts, built_by, lazily

if TYPE_CHECKING:
    from arriero.model.costs import BlockMemory, Mode
    from arriero.model.spec import ModelSpec


def _count(spec: "ModelSpec") -> ParameterCounts:
    attention = 2 * spec.dim * (spec.heads + spec.kv_heads) * spec.head_dim
    other = 2 * spec.dim + (2 * spec.head_dim if spec.qk_norm else 0)
    if spec.qkv_bias:
        other += (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    return ParameterCounts(attention + 3 * spec.dim * spec.ffn, other, final_norm=spec.dim)


def _problems(fields: Mapping[str, Any]) -> list[str]:
    problems = []
    if fields.get("head_dim", 0) % 2:
        problems.append(f"head_dim {fields['head_dim']} is odd, but RoPE rotates pairs of dimensions")
    if "rope_theta" not in fields:
        problems.append("rope_theta is missing")
    scaling = fields.get("rope_scaling")
    if scaling is not None:
        problems += scaling.problems()
        if scaling.type == "yarn" and fields.get("rope_theta", 2.0) <= 1.0:
            problems.append(f"rope_theta {fields['rope_theta']} must be above 1 for yarn")
    return problems


def _shapes(spec: "ModelSpec") -> dict[str, tuple[int, ...]]:
    dim, ffn, query, kv = spec.dim, spec.ffn, spec.attention_width, spec.kv_heads * spec.head_dim
    biases = {f"attention.{name}.bias": (width,) for name, width in zip("qkv", (query, kv, kv), strict=True)}
    norms = {f"attention.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
    return {
        "attention_norm.weight": (dim,),
        "attention.q.weight": (query, dim),
        "attention.k.weight": (kv, dim),
        "attention.v.weight": (kv, dim),
        **(biases if spec.qkv_bias else {}),
        **(norms if spec.qk_norm else {}),
        "attention.o.weight": (dim, query),
        "ffn_norm.weight": (dim,),
        "ffn.gate.weight": (ffn, dim),
        "ffn.up.weight": (ffn, dim),
        "ffn.down.weight": (dim, ffn),
    }


def _memory(spec: "ModelSpec", mode: "Mode") -> "BlockMemory":
    """Return the bytes of a block; `tests/model/test_block_costs.py` compares them with the traced module."""
    from arriero.model.costs import Affine, memory_of

    dim, ffn, query, kv, size = (
        spec.dim, spec.ffn, spec.attention_width, spec.kv_heads * spec.head_dim, mode.element,
    )  # fmt: skip
    # v is a view of the fused product, which is kept whole
    v = query + 2 * kv if mode.fused_qkv else kv
    # input, both norms, result of attention's projection; rotated q and k, v, result of attention
    elements = 4 * dim + 2 * query + kv + v
    statistics = 4 * (2 + spec.heads)
    fixed = size * (query + 2 * kv) * dim if mode.fused_qkv else 0
    if mode.float8:
        # inputs of matmuls and all weights are kept in 8 bits, gate and up in one tensor
        elements += query + kv - 2 * dim + (kv if not mode.fused_qkv else 0)
        kept = size * (elements + 2 * ffn) + 2 * dim + query + ffn
        fixed = spec.block_matmul_parameters
    else:
        kept = size * (elements + (3 if mode.compiled else 4) * ffn)
    if not mode.compiled and not mode.on_gpu:
        # RMSNorm is no single operator there: it keeps its input and result in fp32, instead of the residual
        kept += 16 * dim - size * dim if size == 2 else 2 * size * dim
    if spec.qk_norm:
        statistics += 4 * (spec.heads + spec.kv_heads)
        if not mode.compiled and not mode.on_gpu:
            kept += 8 * (query + kv)
        elif size == 4 or not mode.fused_qkv:
            kept += size * (query + kv)
    matmuls = [query + 2 * kv] if mode.fused_qkv or mode.float8 else [query, kv, kv]
    matmuls += [dim, 2 * ffn, dim] if mode.float8 else [dim, ffn, ffn, dim]
    return memory_of(
        mode,
        dim,
        kept + statistics,
        fixed,
        size * query + 4 * spec.heads,
        [size * width for width in matmuls],
        Affine(size * (2 * dim + ffn), 2 * size * dim * ffn)
        if mode.compiled
        else Affine(size * (2 * dim + 2 * ffn), size * dim * ffn),
        gathered=2 * size * dim,
    )


LLAMA = Family(
    name="llama",
    build=built_by("arriero.model.llama.module:Llama"),
    count_parameters=_count,
    defaults={"norm_eps": 1e-5, "rope_theta": 10000.0, "tied": False},
    problems=_problems,
    placements=DECODER_PLACEMENTS,
    hf=lazily("arriero.model.llama.hf_names:NAMES"),
    meta=lazily("arriero.model.llama.meta_names"),
    presets=Path(__file__).with_name("presets.toml"),
    block_shapes=_shapes,
    block_memory=_memory,
)
