"""Files of named tensors, read and written one tensor at a time: safetensors and torch.save."""

import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from arriero.checkpoint.formats.model_reader import Advance, Cut, no_progress, raw_bytes, read_into
from arriero.errors import UserError


class TorchReader:
    """`tensors` has names, shapes and types, on meta; `read` gives one, and nothing else is held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = _index(path)

    def read(self, name: str) -> Tensor:
        planned = self.tensors[name]
        reach = sum((size - 1) * step for size, step in zip(planned.shape, planned.stride(), strict=True)) + 1
        begins = _offset(planned) + int(planned.storage_offset()) * planned.dtype.itemsize
        flat = torch.empty(reach if planned.numel() else 0, dtype=planned.dtype)
        read_into(self.path, begins, flat)
        return flat.as_strided(planned.shape, planned.stride()).contiguous()


def _index(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), "unknown code")
        raise UserError(
            f"{path} is a pickle with more than tensors in it ({reason}), and is not opened",
            "such a file could run any code; ask its author for safetensors",
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as a file of torch.save ({str(error).splitlines()[0]})",
            "copy or download it again; a file older than torch 1.6 must be saved anew",
        ) from None
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        raise UserError(f"{path} is not a flat table of names and tensors", "give a file of weights alone")
    return dict(state)


def _offset(tensor: Tensor) -> int:
    """Where its contents lie in the file; the loader notes it on the storages it leaves empty."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


class TorchFileWriter:
    """A file of empty places for `tensors`, which are then filled in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._sums: dict[int, int] = {}
        with FakeTensorMode():
            empty = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(empty, path)
        self._places = {name: (_offset(t), t) for name, t in _index(path).items()}
        self._file = path.open("r+b")

    def put(self, name: str, tensor: Tensor) -> None:
        offset, planned = self._places[name]
        assert tensor.shape == planned.shape and tensor.dtype == planned.dtype, name
        content = raw_bytes(tensor)
        self._file.seek(offset)
        self._file.write(content)
        self._sums[offset] = zlib.crc32(content)

    def __enter__(self) -> "TorchFileWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                assert len(self._sums) == len(self._places), "a tensor was not written"
                write_checksums(self._file, self._sums)


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
    path: Path, tensors: Mapping[str, Tensor], load: Callable[[str], Tensor], advance: Advance = no_progress
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


_LOCAL, _CENTRAL = 30, 46
_DESCRIPTOR = b"PK\x07\x08"


def write_checksums(file: BinaryIO, sums: Mapping[int, int]) -> None:
    """`sums` are CRC-32 by where in the file the contents begin; other entries keep theirs."""
    with zipfile.ZipFile(file) as archive:
        entries, at = archive.infolist(), archive.start_dir
    for entry in entries:
        begins = _contents_of(file, entry)
        if begins in sums:
            checksum = struct.pack("<L", sums[begins])
            _write(file, at + 16, checksum)
            after = begins + entry.file_size
            if _read(file, after, 4) == _DESCRIPTOR:
                _write(file, after + 4, checksum)
        at += _CENTRAL + sum(struct.unpack("<3H", _read(file, at + 28, 6)))


def _contents_of(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    name, extra = struct.unpack("<2H", _read(file, entry.header_offset + 26, 4))
    return entry.header_offset + _LOCAL + name + extra


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


def _write(file: BinaryIO, at: int, content: bytes) -> None:
    file.seek(at)
    file.write(content)
