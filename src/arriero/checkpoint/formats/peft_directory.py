"""A PEFT adapter directory: adapter_model.safetensors and adapter_config.json, beside its base model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from arriero.checkpoint.formats.model_reader import Adapter, ModelReader, WriteOptions
from arriero.checkpoint.formats.tensor_files import (
    Advance,
    SafetensorsReader,
    no_progress,
    write_safetensors,
)
from arriero.errors import UserError
from arriero.model.description import read_json, write_json
from arriero.model.lora import A, B, LoraSettings, adapter_tensors, merge
from arriero.model.name_maps import check_tensors, own_from_hf, unchanged
from arriero.model.spec import ModelSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = {A: ".lora_A.weight", B: ".lora_B.weight"}
# settings of PEFT that change what an adapter computes, and the value that is supported
_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def with_adapter(source: ModelReader, adapter: Adapter) -> ModelReader:
    """Return a reader of the model with the adapter merged into its weights."""
    check_tensors(adapter.tensors, adapter_tensors(source.tensors, adapter.settings), source.where)

    def load(name: str) -> Tensor:
        layer, weight = name.removesuffix(".weight"), source.load(name)
        if layer + A not in adapter.tensors:
            return weight
        return merge(weight, adapter.load(layer + A), adapter.load(layer + B), adapter.settings.scale)

    return replace(source, load=load, load_slice=None, adapter=adapter)


def open_peft(directory: Path, open_base: Callable[[str], ModelReader]) -> ModelReader:
    """Open the base model that an adapter names, with the adapter merged into it."""
    config = read_json(directory / CONFIG)
    other = [
        f"{key} = {config[key]!r}"
        for key, plain in _PLAIN.items()
        if config.get(key, plain) not in (plain, None)
    ]
    if other:
        raise UserError(f"{directory / CONFIG} asks for {', '.join(other)}", "only plain LoRA can be read")
    base, rank, alpha = (config.get(key) for key in ("base_model_name_or_path", "r", "lora_alpha"))
    if not isinstance(base, str) or not isinstance(rank, int) or not isinstance(alpha, int | float):
        what = f"{directory / CONFIG} lacks base_model_name_or_path, r or lora_alpha"
        raise UserError(what, "copy or download it again")
    source, file = open_base(base), SafetensorsReader(directory / WEIGHTS)
    names = {theirs: ours for ours, theirs in peft_names(source.spec, source.tensors).items()}
    if unknown := [name for name in file.tensors if name not in names]:
        raise UserError(
            f"{directory / WEIGHTS} has {unknown[0]}, which {base} does not have", "give its base model"
        )
    stored = {names[name]: name for name in file.tensors}
    targets = tuple(sorted({name.removesuffix(A) for name in stored if name.endswith(A)}))
    adapter = Adapter(
        LoraSettings(rank, alpha, targets=targets),
        {ours: file.tensors[theirs] for ours, theirs in stored.items()},
        lambda name: file.read(stored[name]),
        base,
    )
    merged = with_adapter(source, adapter)
    return replace(
        merged, format="peft", where=str(directory), remarks=(*source.remarks, f"merged into {base}")
    )


def write_peft(
    source: ModelReader, directory: Path, writing: WriteOptions, advance: Advance = no_progress
) -> None:
    """Write the adapter of a model alone; the model itself is named by its path."""
    adapter = source.adapter
    if adapter is None:
        raise UserError(
            f"{source.where} has no adapter", "give a checkpoint of a run with [lora], or use --to hf"
        )
    names = peft_names(source.spec, source.tensors)
    planned = {
        names[ours]: tensor.to(writing.dtype or tensor.dtype) for ours, tensor in adapter.tensors.items()
    }
    ours_of = {names[ours]: ours for ours in adapter.tensors}

    def load(name: str) -> Tensor:
        return adapter.load(ours_of[name]).to(planned[name].dtype).contiguous()

    write_safetensors(directory / WEIGHTS, planned, load, advance)
    write_json(directory / CONFIG, _config(adapter, planned, names))


def _config(adapter: Adapter, planned: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    layers = {_layer(name) for name in planned}
    every = {_layer(name) for name in names.values()}
    ends = {layer.rsplit(".", 1)[-1] for layer in layers}
    # PEFT matches the end of a name, which must not reach layers without an adapter
    exact = {layer for layer in every if layer.rsplit(".", 1)[-1] in ends} == layers
    return _PLAIN | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _base_name(adapter.base),
        "r": adapter.settings.rank,
        "lora_alpha": adapter.settings.alpha,
        "lora_dropout": adapter.settings.dropout,
        "target_modules": sorted(ends if exact else layers),
        "inference_mode": True,
    }


def _base_name(base: str | None) -> str | None:
    """Return the base model as PEFT names it: a path that is valid in any folder, or OWNER/MODEL."""
    if base is None:
        return None
    return str(Path(base).resolve()) if Path(base).exists() else base.removeprefix("hf://")


def _layer(name: str) -> str:
    return name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0]


def peft_names(spec: ModelSpec, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Map the names of all possible adapter tensors to PEFT's.

    A layer that Hugging Face stores transposed or fused with others has none.
    """
    recipe, names = own_from_hf(spec), {}
    for ours in own:
        layer, made = ours.removesuffix(".weight"), recipe[ours]
        if layer.startswith("blocks.") and made.make is unchanged and own[ours].ndim == 2:
            theirs = made.parts[0].removesuffix(".weight")
            names |= {layer + end: f"{_PREFIX}{theirs}{suffix}" for end, suffix in _SUFFIXES.items()}
    return names


def check_peft_names(spec: ModelSpec, own: Mapping[str, Tensor], settings: LoraSettings) -> str | None:
    """Return why an adapter cannot be written for PEFT; None if it can."""
    names = peft_names(spec, own)
    missing = [name for name in adapter_tensors(own, settings) if name not in names]
    return f"Hugging Face stores {missing[0].rsplit('.', 1)[0]} in another form" if missing else None
