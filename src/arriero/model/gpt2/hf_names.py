"""GPT-2 as Hugging Face names it: q, k and v in one matrix, linear weights transposed (Conv1D)."""

from collections.abc import Mapping
from typing import Any

from arriero.model.name_maps import HuggingFaceNames
from arriero.model.spec import ModelSpec


def _fused(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    return {
        f"transformer.h.{layer}.attn.c_attn.{kind}": tuple(
            f"blocks.{layer}.attention.{part}.{kind}" for part in "qkv"
        )
        for layer in range(spec.layers)
        for kind in ("weight", "bias")
    }


def _config(_: ModelSpec) -> dict[str, Any]:
    return {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def _from_config(fields: dict[str, Any], _config: Mapping[str, Any], _where: str) -> dict[str, Any]:
    if fields["ffn"] is None and isinstance(fields["dim"], int):
        fields["ffn"] = 4 * fields["dim"]
    return fields


def _current_name(name: str) -> str:
    """Add the name of the outer module, which the first GPT-2 files lack."""
    return f"transformer.{name}" if name.startswith(("wte.", "wpe.", "h.", "ln_f.")) else name


NAMES = HuggingFaceNames(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields={
        "vocab_size": "vocab_size",
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ffn": "n_inner",
        "max_seq_len": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    },
    fixed={
        "activation_function": "gelu_new",
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
    },
    tensors={
        "embedding.weight": "transformer.wte.weight",
        "positions.weight": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
    },
    blocks="transformer.h",
    block={
        "attention_norm": "ln_1",
        "attention.o": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
    },
    kinds=("weight", "bias"),
    fused=_fused,
    transposed=r"\.(c_attn|c_proj|c_fc)\.weight$",
    config=_config,
    from_config=_from_config,
    current_name=_current_name,
    not_weights=r"\.attn\.(masked_)?bias$",
)
