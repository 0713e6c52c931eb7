"""Safetensors files written and read a tensor at a time."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from arriero.checkpoint.formats.source import Advance, Cut, raw_bytes, read_into, silent
from arriero.errors import UserError

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_TYPES = {code: dtype for dtype, code in _CODES.items()} | {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
_TYPES |= {"U8": torch.uint8, "BOOL": torch.bool, "I64": torch.int64, "I32": torch.int32}


class SafetensorsReader:
    """`tensors` has names, shapes and types, on meta; `read` returns one of them, `read_part` a slice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(
                path, framework="pt"
            ):  # judges the header, and that the file is as long as it says
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path} is not a whole safetensors file ({error})", "copy or download it again"
            ) from None
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self.tensors = {name: _on_meta(name, entry, path) for name, entry in entries.items()}
        self._begins = {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items()}

    def read(self, name: str) -> Tensor:
        planned = self.tensors[name]
        tensor = torch.empty(planned.shape, dtype=planned.dtype)
        read_into(self.path, self._begins[name], tensor)
        return tensor

    def read_part(self, name: str, cut: Cut) -> Tensor:
        """Only the bytes of the slice are read, of vectors and matrices: rows at once, columns row by row."""
        planned = self.tensors[name]
        if planned.ndim not in (1, 2):
            return self.read(name)[cut]
        part = torch.empty(planned[cut].shape, dtype=planned.dtype)
        row_bytes = planned.stride(0) * planned.dtype.itemsize
        begins = self._begins[name] + (cut[0].start or 0) * row_bytes
        if part.shape[1:] == planned.shape[1:]:
            read_into(self.path, begins, part)
        else:
            begins += (cut[1].start or 0) * planned.dtype.itemsize
            read_into(self.path, begins, part, row_stride=row_bytes)
        return part


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], load: Callable[[str], Tensor], advance: Advance = silent
) -> None:
    """Write the header, then one tensor after the other, and flush the file to the disk.

    `tensors` has the shapes and types, on meta.
    """
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
            del tensor
        file.flush()
        os.fsync(file.fileno())


def _on_meta(name: str, entry: Mapping[str, Any], path: Path) -> Tensor:
    if entry["dtype"] not in _TYPES:
        raise UserError(
            f"{path}: {name} is of type {entry['dtype']}", "only fp32, bf16 and fp16 weights can be read"
        )
    return torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]], device="meta")
