"""A stored model, whatever its format: Arriero's tensor names, each tensor read when it is needed."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.errors import UserError
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
SHARD_BYTES = 5 * 10**9

Advance = Callable[[int], None]
Cut = tuple[slice, ...]


def no_progress(_: int) -> None:
    pass


@dataclass(frozen=True)
class ModelReader:
    """`tensors` has shapes and dtypes, on meta; a tied head is not among them. `extra_files` are the files
    that travel beside the weights, `tokens` the ids a Hugging Face config names, such as eos_token_id, and
    `add_bos_token` where it is known how texts began in training. `load_part` reads a slice of a tensor
    without the rest, where the format allows it."""

    format: str
    where: str
    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    load: Callable[[str], Tensor]
    extra_files: Mapping[str, Path] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    load_part: Callable[[str, Cut], Tensor] | None = None

    def part(self, name: str, cut: Cut) -> Tensor:
        return self.load(name)[cut] if self.load_part is None else self.load_part(name, cut)

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        return sum(t.numel() * (dtype or t.dtype).itemsize for t in self.tensors.values())

    def state(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """All of it in memory, as a model's `load_state_dict` wants it."""
        state = {name: cast(self.load(name), dtype, name) for name in self.tensors}
        if self.spec.tied:
            state["head.weight"] = state["embedding.weight"]
        return state


@dataclass(frozen=True)
class WriteOptions:
    """How a model is written; what does not concern a format is passed over."""

    dtype: torch.dtype | None = None
    shard_bytes: int = SHARD_BYTES
    model_parallel: int = 1
    meta_rule: str | None = None


DEFAULT_OPTIONS = WriteOptions()


def find_extra_files(directory: Path) -> dict[str, Path]:
    return {name: directory / name for name in EXTRA_FILES if (directory / name).is_file()}


def copy_extra_files(source: ModelReader, directory: Path) -> None:
    for name, path in source.extra_files.items():
        if path.resolve() != (directory / name).resolve():
            shutil.copyfile(path, directory / name)


def retyped(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}


def cast(tensor: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    if dtype is None or tensor.dtype == dtype:
        return tensor
    out = tensor.to(dtype)
    if dtype == torch.float16 and not torch.isfinite(out).all() and torch.isfinite(tensor).all():
        raise UserError(f"{name} holds numbers too large for fp16", "convert to bf16 or fp32")
    return out


def check_dtypes(tensors: Mapping[str, Tensor], where: str) -> None:
    known = set(DTYPES.values())
    if odd := {n: t.dtype for n, t in tensors.items() if t.dtype not in known}:
        name, dtype = next(iter(odd.items()))
        raise UserError(
            f"{where} holds {len(odd)} tensors of other types, such as {name} of {str(dtype)[6:]}",
            "only fp32, bf16 and fp16 weights can be read",
        )


def raw_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def read_into(path: Path, begins: int, tensor: Tensor, row_stride: int | None = None) -> None:
    """Fill a contiguous tensor; with `row_stride` its rows lie that many bytes apart in the file.

    The file is read, not mapped: mapped pages would count as memory until the file is closed.
    """
    view = raw_bytes(tensor)
    width = len(view) // len(tensor) if row_stride and len(tensor) else len(view)
    try:
        with path.open("rb", buffering=0) as file:
            for row, start in enumerate(range(0, len(view), width or 1)):
                file.seek(begins + row * (row_stride or 0))
                done = start
                while done < start + width and (got := file.readinto(view[done : start + width])):
                    done += got
                if done < start + width:
                    raise UserError(f"{path} ends too early", "copy or download it again")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", "copy or download it again") from None
