"""Hugging Face: names, config.json and model.safetensors, both ways and bit for bit."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from arriero.errors import UserError
from arriero.model.spec import ModelSpec

State = Mapping[str, Tensor]

_LLAMA = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_GPT2 = {
    "embedding.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.o": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
_FIELDS = {
    "llama": {
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "max_seq_len": "max_position_embeddings",
        "tied": "tie_word_embeddings",
    },
    "gpt2": {
        "vocab_size": "vocab_size",
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ffn": "n_inner",
        "max_seq_len": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    },
}
_FIXED: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
    },
}
_CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
_NOT_WEIGHTS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


def to_hf(state: State, spec: ModelSpec) -> dict[str, Tensor]:
    """A tied head is left out: Hugging Face stores the shared tensor once, as the embedding."""
    _check(
        state, (name for name in _own_names(spec) if not _is_tied_head(name, spec)), spec, "the model state"
    )
    out = {theirs: state[ours] for ours, theirs in _names(spec).items()}
    if spec.family == "gpt2":
        for layer in range(spec.layers):
            for kind in ("weight", "bias"):
                parts = [state[f"blocks.{layer}.attention.{p}.{kind}"] for p in "qkv"]
                out[f"transformer.h.{layer}.attn.c_attn.{kind}"] = torch.cat(parts)
    return {name: _conv1d(name, tensor) for name, tensor in out.items()}


def from_hf(state: State, spec: ModelSpec) -> dict[str, Tensor]:
    state = {
        _with_prefix(name, spec): tensor for name, tensor in state.items() if not _NOT_WEIGHTS.search(name)
    }
    fused = [f"transformer.h.{n}.attn.c_attn.{k}" for n in range(spec.layers) for k in ("weight", "bias")]
    fused = fused if spec.family == "gpt2" else []
    _check(state, [*_names(spec).values(), *fused], spec, "the Hugging Face state")
    out = {ours: _conv1d(theirs, state[theirs]) for ours, theirs in _names(spec).items()}
    for name in fused:
        _, _, layer, _, _, kind = name.split(".")
        parts = _conv1d(name, state[name]).chunk(3)
        out |= {
            f"blocks.{layer}.attention.{p}.{kind}": t.contiguous() for p, t in zip("qkv", parts, strict=True)
        }
    if spec.tied:
        out["head.weight"] = out["embedding.weight"]
    return out


def hf_config(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    config = {theirs: getattr(spec, ours) for ours, theirs in _FIELDS[spec.family].items()}
    config |= {"model_type": spec.family, "dtype": str(dtype).removeprefix("torch."), **_FIXED[spec.family]}
    config |= {"initializer_range": 0.02, "bos_token_id": None, "eos_token_id": None}
    if spec.family == "gpt2":
        config["architectures"] = ["GPT2LMHeadModel"]
        return config | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    scaling = _hf_scaling(spec)
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": spec.norm_eps,
        # readers before transformers 5 look for the two keys apart, later ones for rope_parameters
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": spec.rope_theta, **(scaling or {"rope_type": "default"})},
    }


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    family = config.get("model_type")
    if family not in _FIELDS:
        raise UserError(f"a Hugging Face model of type {family!r}", "only llama and gpt2 can be read")
    odd = [f"{k} = {config[k]!r}" for k, v in _FIXED[family].items() if config.get(k, v) != v]
    if odd:
        raise UserError(
            f"config.json asks for {', '.join(odd)}", "this variant of the model is not supported"
        )
    fields = {"family": family} | {ours: config.get(theirs) for ours, theirs in _FIELDS[family].items()}
    if family == "llama":
        fields |= {"norm_eps": config.get("rms_norm_eps", 1e-6)} | _rope_from_hf(config)
    elif fields["ffn"] is None and fields["dim"] is not None:
        fields["ffn"] = 4 * fields["dim"]
    return ModelSpec.from_dict(fields)


def save_hf(
    directory: str | Path,
    model_state: State,
    spec: ModelSpec,
    tokenizer_file: str | Path | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> None:
    """A directory that `from_pretrained` loads off-line; transformers itself refuses dim % heads != 0."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: t.detach().cpu().contiguous() for name, t in to_hf(model_state, spec).items()}
    config = hf_config(spec, next(iter(state.values())).dtype)
    if tokenizer_file is not None:
        config |= _save_tokenizer(directory, Path(tokenizer_file), spec, bos_token, eos_token)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)


def load_hf(directory: str | Path) -> tuple[dict[str, Tensor], ModelSpec]:
    """One file or several: large published models come in pieces with an index beside them."""
    directory = Path(directory)
    config, index = directory / "config.json", directory / "model.safetensors.index.json"
    if not config.is_file():
        raise UserError(f"{directory} holds no config.json", "give a Hugging Face model directory")
    files = ["model.safetensors"]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    if missing := [name for name in files if not (directory / name).is_file()]:
        raise UserError(f"{directory} lacks {', '.join(missing)}", "copy the safetensors files there")
    state: dict[str, Tensor] = {}
    for name in files:
        state |= load_file(directory / name)
    spec = spec_from_hf(json.loads(config.read_text(encoding="utf-8")))
    return from_hf(state, spec), spec


def _names(spec: ModelSpec) -> dict[str, str]:
    """Ours to theirs, for all tensors that map one to one."""
    llama = spec.family == "llama"
    names = dict(_LLAMA if llama else _GPT2)
    prefix, block = ("model.layers", _LLAMA_BLOCK) if llama else ("transformer.h", _GPT2_BLOCK)
    for layer in range(spec.layers):
        for ours, theirs in block.items():
            for kind in ("weight",) if llama else ("weight", "bias"):
                names[f"blocks.{layer}.{ours}.{kind}"] = f"{prefix}.{layer}.{theirs}.{kind}"
    return names if spec.tied else names | {"head.weight": "lm_head.weight"}


def _own_names(spec: ModelSpec) -> Iterable[str]:
    yield from _names(spec)
    if spec.family == "gpt2":
        for layer in range(spec.layers):
            yield from (f"blocks.{layer}.attention.{p}.{k}" for p in "qkv" for k in ("weight", "bias"))


def _is_tied_head(name: str, spec: ModelSpec) -> bool:
    return spec.tied and name in ("head.weight", "lm_head.weight")


def _check(state: State, wanted: Iterable[str], spec: ModelSpec, where: str) -> None:
    have, want = {name for name in state if not _is_tied_head(name, spec)}, set(wanted)
    problems = [
        f"{len(names)} {word} ({', '.join(sorted(names))})"
        for word, names in (("missing", want - have), ("unexpected", have - want))
        if names
    ]
    if problems:
        raise UserError(
            f"the tensors of {where} do not fit the model: {'; '.join(problems)}",
            "check that the weights and the model's shape belong together",
        )


def _with_prefix(name: str, spec: ModelSpec) -> str:
    """The first GPT-2 files were saved without the outer module's name."""
    bare = spec.family == "gpt2" and name.startswith(("wte.", "wpe.", "h.", "ln_f."))
    return f"transformer.{name}" if bare else name


def _conv1d(name: str, tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if _CONV1D.search(name) else tensor


def _hf_scaling(spec: ModelSpec) -> dict[str, Any] | None:
    if spec.rope_scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": spec.rope_scaling.factor,
        "low_freq_factor": spec.rope_scaling.low_freq_factor,
        "high_freq_factor": spec.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": spec.rope_scaling.original_max_seq_len,
    }


def _rope_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise UserError(
            f"config.json asks for rope scaling of type {kind!r}", "only llama3 scaling can be read"
        )
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values = {name.replace("position_embeddings", "seq_len"): rope.get(name) for name in names}
    return {"rope_theta": theta, "rope_scaling": values}


def _save_tokenizer(
    directory: Path, source: Path, spec: ModelSpec, bos_token: str | None, eos_token: str | None
) -> dict[str, int]:
    """The ids of the two special tokens, for config.json."""
    if source.resolve() != (directory / "tokenizer.json").resolve():
        shutil.copyfile(source, directory / "tokenizer.json")
    tokenizer = json.loads(source.read_text(encoding="utf-8"))
    ids = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    special = {name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token}
    if unknown := [token for token in special.values() if token not in ids]:
        raise UserError(f"{source} has no special token {', '.join(unknown)}", "name one of its added tokens")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.max_seq_len, **special}
    _write_json(directory / "tokenizer_config.json", about | {"clean_up_tokenization_spaces": False})
    return {f"{name}_id": ids[token] for name, token in special.items()}


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
