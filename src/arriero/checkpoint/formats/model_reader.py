"""A stored model, whatever its format: Arriero's tensor names, each tensor read when it is needed."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.checkpoint.formats.tensor_files import Slices
from arriero.errors import UserError
from arriero.model.adapters import AdapterSettings
from arriero.model.description import write_description
from arriero.model.spec import ModelSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EXTRA_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Adapter:
    """An adapter: its tensors on the meta device, how to load them, and the model it belongs to."""

    settings: AdapterSettings
    tensors: Mapping[str, Tensor]
    load: Callable[[str], Tensor]
    base: str | None = None


@dataclass(frozen=True)
class ModelReader:
    """`tensors` has shapes and dtypes on the meta device; a tied head is not among them.

    `extra_files` are copied beside the weights. `tokens` has the token ids of a Hugging Face config, such as
    eos_token_id, and `add_bos_token` if it is known whether training texts began with the BOS. `load_slice`
    reads a slice without the rest of the tensor, where the format allows it. `adapter` is merged
    into the weights by `load` if it can be (LoRA), and else part of the model beside them.
    """

    format: str
    where: str
    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    load: Callable[[str], Tensor]
    extra_files: Mapping[str, Path] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    load_slice: Callable[[str, Slices], Tensor] | None = None
    adapter: Adapter | None = None

    @property
    def unmerged(self) -> Adapter | None:
        """The adapter that is not part of the weights."""
        return self.adapter if self.adapter is not None and not self.adapter.settings.merges else None

    def require_weights(self, todo: str = "use --to peft, or name its base model") -> None:
        """Raise UserError if weights alone are not the model."""
        if (adapter := self.unmerged) is not None:
            what = f"{self.where} has {adapter.settings.label}, which cannot be merged into weights"
            raise UserError(what, todo)

    def read_slice(self, name: str, slices: Slices) -> Tensor:
        return self.load(name)[slices] if self.load_slice is None else self.load_slice(name, slices)

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        return sum(t.numel() * (dtype or t.dtype).itemsize for t in self.tensors.values())

    def with_dtype(self, dtype: torch.dtype | None) -> "ModelReader":
        """Return a reader that casts every tensor; fp16 overflow is an error."""
        if dtype is None:
            return self
        tensors = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        return replace(
            self, tensors=tensors, load=lambda name: _cast(self.load(name), dtype, name), load_slice=None
        )

    def state(self) -> dict[str, Tensor]:
        """Load all tensors, for a module's `load_state_dict`."""
        state = {name: self.load(name) for name in self.tensors}
        if self.spec.tied:
            state["head.weight"] = state["embedding.weight"]
        return state


@dataclass(frozen=True)
class WriteOptions:
    """How to write a model; a format ignores the options of the others."""

    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    model_parallel: int = 1
    meta_rule: str | None = None


DEFAULT_OPTIONS = WriteOptions()


def find_extra_files(directory: Path) -> dict[str, Path]:
    return {name: directory / name for name in EXTRA_FILES if (directory / name).is_file()}


def copy_extra_files(source: ModelReader, directory: Path) -> None:
    for name, path in source.extra_files.items():
        if path.resolve() != (directory / name).resolve():
            shutil.copyfile(path, directory / name)


def write_model_files(source: ModelReader, directory: Path) -> None:
    """Write model.toml and the extra files of a format with Arriero's tensor names."""
    write_description(source.spec, source.tokens, directory)
    copy_extra_files(source, directory)


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    cast = tensor.to(dtype)
    if dtype == torch.float16 and not torch.isfinite(cast).all() and torch.isfinite(tensor).all():
        raise UserError(f"{name} has values too large for fp16", "convert to bf16 or fp32")
    return cast


def check_dtypes(tensors: Mapping[str, Tensor], where: str) -> None:
    known = set(DTYPES.values())
    if odd := {n: t.dtype for n, t in tensors.items() if t.dtype not in known}:
        name, dtype = next(iter(odd.items()))
        raise UserError(
            f"{where} holds {len(odd)} tensors of other types, such as {name} of {str(dtype)[6:]}",
            "only fp32, bf16 and fp16 weights can be read",
        )
