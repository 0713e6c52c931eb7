"""A PEFT adapter directory: adapter_model.safetensors and adapter_config.json, beside its base model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arriero.checkpoint.formats.model_reader import Adapter, ModelReader, WriteOptions, find_extra_files
from arriero.checkpoint.formats.tensor_files import SafetensorsReader, write_safetensors
from arriero.errors import UserError
from arriero.files import Advance, no_progress
from arriero.model.adapters import AdapterSettings
from arriero.model.attention_prompts import (
    GATE,
    PREFIX_K,
    PREFIX_V,
    PROMPT,
    GatedPromptSettings,
    PrefixSettings,
)
from arriero.model.description import ADAPTER as CONFIG
from arriero.model.description import read_json, write_json
from arriero.model.family import family_of
from arriero.model.lora import A, B, LoraSettings, merge
from arriero.model.name_maps import check_tensors, own_from_hf, unchanged
from arriero.model.spec import ModelSpec

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EMBEDDINGS = "prompt_embeddings"
_SUFFIXES = {A: ".lora_A.weight", B: ".lora_B.weight"}
_PROMPTS = {PROMPT: ".adaption_prompt", GATE: ".adaption_gate"}
# settings of PEFT that change what an adapter computes, and the value that is supported
_PLAIN = {
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
_KINDS = {"LORA": LoraSettings, "PREFIX_TUNING": PrefixSettings, "ADAPTION_PROMPT": GatedPromptSettings}


class Part(NamedTuple):
    """A tensor of a PEFT file: the adapter's tensors it is made of, side by side, and its shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


def with_adapter(source: ModelReader, adapter: Adapter) -> ModelReader:
    """Return a reader of the model with its adapter, merged into its weights if that is possible."""
    check_tensors(adapter.tensors, adapter.settings.tensors(source.tensors), source.where)
    settings = adapter.settings
    if not isinstance(settings, LoraSettings):
        return replace(source, adapter=adapter)

    def load(name: str) -> Tensor:
        layer, weight = name.removesuffix(".weight"), source.load(name)
        if layer + A not in adapter.tensors:
            return weight
        return merge(weight, adapter.load(layer + A), adapter.load(layer + B), settings.scale)

    return replace(source, load=load, load_slice=None, adapter=adapter)


def open_peft(directory: Path, open_base: Callable[[str], ModelReader]) -> ModelReader:
    """Open the base model that an adapter names, with the adapter."""
    config = read_json(directory / CONFIG)
    kind, base = config.get("peft_type"), config.get("base_model_name_or_path")
    other = [
        f"{key} = {config[key]!r}"
        for key, plain in _PLAIN.items()
        if config.get(key, plain) not in (plain, None)
    ]
    if kind not in _KINDS or other:
        what = f"{directory / CONFIG} asks for {', '.join(other) or f'peft_type = {kind!r}'}"
        raise UserError(what, "plain LoRA, prefix tuning and LLaMA-Adapter (ADAPTION_PROMPT) can be read")
    if not isinstance(base, str):
        raise UserError(f"{directory / CONFIG} lacks base_model_name_or_path", "copy or download it again")
    source, file = open_base(base), SafetensorsReader(directory / WEIGHTS)
    settings = _settings(directory, config, source, file)
    parts = peft_parts(source.spec, source.tensors, settings)
    if unknown := [name for name in file.tensors if name not in parts]:
        raise UserError(
            f"{directory / WEIGHTS} has {unknown[0]}, which {base} does not have", "give its base model"
        )
    if missing := [name for name in parts if name not in file.tensors]:
        raise UserError(f"{directory / WEIGHTS} lacks {missing[0]}", "copy or download it again")
    for name, part in parts.items():
        if tuple(file.tensors[name].shape) != part.shape:
            found, wanted = list(file.tensors[name].shape), list(part.shape)
            what = f"{directory / WEIGHTS}: {name} has the shape {found}, and {base} needs {wanted}"
            raise UserError(what, "give its base model")
    made = settings.tensors(source.tensors)
    places = {ours: (theirs, i) for theirs, part in parts.items() for i, ours in enumerate(part.names)}

    def load(name: str) -> Tensor:
        theirs, i = places[name]
        return _cut(file.read(theirs), len(parts[theirs].names), i).reshape(made[name].shape)

    tensors = {name: tensor.to(file.tensors[places[name][0]].dtype) for name, tensor in made.items()}
    opened = with_adapter(source, Adapter(settings, tensors, load, base))
    how = "merged into" if settings.merges else "an adapter of"
    return replace(
        opened,
        format="peft",
        where=str(directory),
        extra_files={**source.extra_files, **find_extra_files(directory)},
        remarks=(*source.remarks, f"{how} {base}"),
    )


def _cut(tensor: Tensor, count: int, number: int) -> Tensor:
    return tensor.chunk(count, dim=-1)[number].contiguous() if count > 1 else tensor


def _settings(
    directory: Path, config: Mapping[str, Any], source: ModelReader, file: SafetensorsReader
) -> AdapterSettings:
    def number(key: str) -> Any:
        if not isinstance(value := config.get(key), int | float) or value <= 0:
            raise UserError(f"{directory / CONFIG} lacks {key}", "copy or download it again")
        return value

    if config["peft_type"] == "PREFIX_TUNING":
        return PrefixSettings(number("num_virtual_tokens"))
    if config["peft_type"] == "ADAPTION_PROMPT":
        layers = number("adapter_layers")
        return GatedPromptSettings(number("adapter_len"), None if layers == source.spec.layers else layers)
    every = _lora_names(source.spec, source.tensors)
    known = {theirs: ours for ours, theirs in every.items()}
    targets = {known[name].removesuffix(A) for name in file.tensors if known.get(name, "").endswith(A)}
    return LoraSettings(number("r"), number("lora_alpha"), targets=tuple(sorted(targets)) or ("*",))


def write_peft(
    source: ModelReader, directory: Path, writing: WriteOptions, advance: Advance = no_progress
) -> None:
    """Write the adapter of a model alone; the model itself is named by its path."""
    adapter = source.adapter
    if adapter is None:
        raise UserError(
            f"{source.where} has no adapter", "give a checkpoint of a run with an adapter, or use --to hf"
        )
    if (why := check_peft_names(source.spec, source.tensors, adapter.settings)) is not None:
        raise UserError(f"{source.where}: PEFT cannot hold this adapter: {why}", "use --to hf to merge it")
    parts = peft_parts(source.spec, source.tensors, adapter.settings)
    planned = {}
    for name, part in parts.items():
        dtype = writing.dtype or adapter.tensors[part.names[0]].dtype
        planned[name] = torch.empty(part.shape, dtype=dtype, device="meta")

    read = adapter.load

    def load(name: str) -> Tensor:
        whole = torch.cat([read(ours) for ours in parts[name].names], dim=-1)
        return whole.reshape(parts[name].shape).to(planned[name].dtype).contiguous()

    write_safetensors(directory / WEIGHTS, planned, load, advance)
    write_json(directory / CONFIG, _config(source, adapter, list(planned)))


def _config(source: ModelReader, adapter: Adapter, names: list[str]) -> dict[str, Any]:
    settings, spec = adapter.settings, source.spec
    common: dict[str, Any] = {"task_type": "CAUSAL_LM", "inference_mode": True}
    common["base_model_name_or_path"] = _base_name(adapter.base)
    if isinstance(settings, PrefixSettings):
        return common | {
            "peft_type": "PREFIX_TUNING",
            "num_virtual_tokens": settings.tokens,
            "num_layers": spec.layers,
            "num_attention_heads": spec.kv_heads,
            "token_dim": spec.kv_heads * spec.head_dim,
            "encoder_hidden_size": spec.kv_heads * spec.head_dim,
            "num_transformer_submodules": 1,
            "prefix_projection": False,
        }
    if isinstance(settings, GatedPromptSettings):
        return common | {
            "peft_type": "ADAPTION_PROMPT",
            "adapter_len": settings.tokens,
            "adapter_layers": settings.layers or spec.layers,
            "target_modules": "self_attn",
        }
    layers = {_layer(name) for name in names}
    every = {_layer(name) for name in _lora_names(spec, source.tensors).values()}
    ends = {layer.rsplit(".", 1)[-1] for layer in layers}
    # PEFT matches the end of a name, which must not reach layers without an adapter
    exact = {layer for layer in every if layer.rsplit(".", 1)[-1] in ends} == layers
    return (
        _PLAIN
        | common
        | {
            "peft_type": "LORA",
            "r": settings.rank,
            "lora_alpha": settings.alpha,
            "lora_dropout": settings.dropout,
            "target_modules": sorted(ends if exact else layers),
        }
    )


def _base_name(base: str | None) -> str | None:
    """Return the base model as PEFT names it: a path that is valid in any folder, or OWNER/MODEL."""
    if base is None:
        return None
    return str(Path(base).resolve()) if Path(base).exists() else base.removeprefix("hf://")


def _layer(name: str) -> str:
    return name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0]


def peft_parts(spec: ModelSpec, own: Mapping[str, Tensor], settings: AdapterSettings) -> dict[str, Part]:
    """Map the tensors of a PEFT file to the adapter's, which must have names in PEFT."""
    made = settings.tensors(own)
    if isinstance(settings, PrefixSettings):
        layers = sorted({n.removesuffix(PREFIX_K) for n in made if n.endswith(PREFIX_K)}, key=_block)
        names = tuple(layer + end for layer in layers for end in (PREFIX_K, PREFIX_V))
        return {_EMBEDDINGS: Part(names, (settings.tokens, sum(made[name].shape[1] for name in names)))}
    if isinstance(settings, GatedPromptSettings):
        parts = {}
        for name, tensor in made.items():
            end = PROMPT if name.endswith(PROMPT) else GATE
            shape = (1, *tensor.shape) if end == PROMPT else tuple(tensor.shape)
            theirs = f"{_PREFIX}model.layers.{_block(name)}.self_attn{_PROMPTS[end]}"
            parts[theirs] = Part((name,), shape)
        return parts
    names = _lora_names(spec, own)
    return {names[ours]: Part((ours,), tuple(tensor.shape)) for ours, tensor in made.items()}


def _block(name: str) -> int:
    return int(name.split(".")[1])


def _lora_names(spec: ModelSpec, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Map the names of all possible LoRA tensors to PEFT's.

    A layer that Hugging Face stores transposed or fused with others has none.
    """
    recipe, names = own_from_hf(spec), {}
    for ours in own:
        layer, made = ours.removesuffix(".weight"), recipe[ours]
        if layer.startswith("blocks.") and made.make is unchanged and own[ours].ndim == 2:
            theirs = made.parts[0].removesuffix(".weight")
            names |= {layer + end: f"{_PREFIX}{theirs}{suffix}" for end, suffix in _SUFFIXES.items()}
    return names


def check_peft_names(spec: ModelSpec, own: Mapping[str, Tensor], settings: AdapterSettings) -> str | None:
    """Return why an adapter cannot be written for PEFT; None if it can."""
    made = settings.tensors(own)
    if isinstance(settings, PrefixSettings):
        has_all = len(made) == 2 * spec.layers
        return None if has_all else "it has keys and values for every block, and some have no attention"
    if isinstance(settings, GatedPromptSettings):
        hf = family_of(spec.family).hf
        if hf is None or not hf().peft_prompts:
            return f"it has no prompts for the family {spec.family}"
        whole = spec.heads * spec.head_dim == spec.dim
        return None if whole else "it assumes that heads x head_dim is dim"
    names = _lora_names(spec, own)
    missing = [name for name in made if name not in names]
    return f"Hugging Face stores {missing[0].rsplit('.', 1)[0]} in another form" if missing else None
