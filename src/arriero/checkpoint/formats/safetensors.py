"""Safetensors files written and read a tensor at a time."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from arriero.checkpoint.formats.source import Advance, raw_bytes, silent
from arriero.errors import UserError

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_TYPES = {code: dtype for dtype, code in _CODES.items()} | {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
_TYPES |= {"U8": torch.uint8, "BOOL": torch.bool, "I64": torch.int64, "I32": torch.int32}


def safetensors_index(path: Path) -> dict[str, Tensor]:
    """Names, shapes and types, on meta; reads the header alone."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: _on_meta(s.get_shape(), s.get_dtype(), n, path) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def safetensors_tensor(path: Path, name: str) -> Tensor:
    """The file is opened anew for each, so that pages of the last one do not stay in memory."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name).clone()
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], load: Callable[[str], Tensor], advance: Advance = silent
) -> None:
    """`tensors` tells shapes and types beforehand, as the header comes first."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, planned in tensors.items():
            tensor = load(name)
            assert tensor.shape == planned.shape and tensor.dtype == planned.dtype, name
            file.write(raw_bytes(tensor))
            advance(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _on_meta(shape: list[int], code: str, name: str, path: Path) -> Tensor:
    if code not in _TYPES:
        raise UserError(f"{path}: {name} is of type {code}", "only fp32, bf16 and fp16 weights can be read")
    return torch.empty(shape, dtype=_TYPES[code], device="meta")


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is not a whole safetensors file ({error})", "copy or download it again")
