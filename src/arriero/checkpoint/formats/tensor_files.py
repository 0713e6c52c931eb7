"""Files of named tensors, read and written one tensor at a time: safetensors and torch.save.

Private torch APIs, tested with 2.11 and 2.13: `torch.serialization.skip_data`, FakeTensorMode, and
`_checkpoint_offset`, where the loader stores the file offset of a storage.
"""

import hashlib
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from arriero.errors import UserError
from arriero.files import Advance, no_progress

Slices = tuple[slice, ...]

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_CODES |= {torch.int8: "I8"}
_TYPES = {code: dtype for dtype, code in _CODES.items()} | {"F8_E4M3": torch.float8_e4m3fn}
_TYPES |= {"U8": torch.uint8, "BOOL": torch.bool, "I64": torch.int64, "I32": torch.int32}
_AGAIN = "copy or download it again"


class SafetensorsReader:
    """Reads a safetensors file. `tensors` has names, shapes and dtypes on the meta device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # safe_open checks the header and the length of the file
            with safe_open(path, framework="pt"), path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a whole safetensors file ({error})", _AGAIN) from None
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self.tensors = {name: _on_meta(name, entry, path) for name, entry in entries.items()}
        self._begins = {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items()}

    def read(self, name: str) -> Tensor:
        tensor = torch.empty_like(self.tensors[name], device="cpu")
        _read_into(self.path, self._begins[name], tensor)
        return tensor

    def read_flat(self, name: str, start: int, stop: int) -> Tensor:
        """Read the elements from `start` to `stop` of the flattened tensor."""
        dtype = self.tensors[name].dtype
        part = torch.empty(stop - start, dtype=dtype)
        _read_into(self.path, self._begins[name] + start * dtype.itemsize, part)
        return part

    def read_slice(self, name: str, slices: Slices) -> Tensor:
        """Read only the bytes of the slice of a vector or matrix: rows at once, columns row by row."""
        planned = self.tensors[name]
        if planned.ndim not in (1, 2):
            return self.read(name)[slices]
        part = torch.empty(planned[slices].shape, dtype=planned.dtype)
        row_bytes = planned.stride(0) * planned.dtype.itemsize
        begins = self._begins[name] + (slices[0].start or 0) * row_bytes
        if part.shape[1:] == planned.shape[1:]:
            _read_into(self.path, begins, part)
        else:
            begins += (slices[1].start or 0) * planned.dtype.itemsize
            _read_into(self.path, begins, part, row_stride=row_bytes)
        return part


def split_by_size(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Divide names, in order, into lists of at most `most` bytes; a larger one is alone."""
    batch: list[str] = []
    left = most
    for name, size in sizes.items():
        if batch and size > left:
            yield batch
            batch, left = [], most
        batch.append(name)
        left -= size
    if batch:
        yield batch


def _on_meta(name: str, entry: Mapping[str, Any], path: Path) -> Tensor:
    if entry["dtype"] not in _TYPES:
        raise UserError(
            f"{path}: {name} is of type {entry['dtype']}", "only fp32, bf16 and fp16 weights can be read"
        )
    return torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]], device="meta")


class SafetensorsWriter:
    """Writes a safetensors file: the header at once, then the tensors in order, each whole or in parts.

    `tensors` has the shapes and dtypes on the meta device. `sha256` is the checksum of what was written;
    the file is synced to disk at the end of the block.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            start, end = end, end + tensor.nbytes
            shape = list(tensor.shape)
            header[name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._left, self._digest = end, hashlib.sha256()
        self._file = path.open("wb")
        self._put(len(text).to_bytes(8, "little") + text)

    def write(self, part: Tensor) -> None:
        self._left -= part.nbytes
        self._put(_raw_bytes(part))

    def _put(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._digest.update(content)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            assert kind is not None or self._left == 0, "a tensor was not written"
            self._file.flush()
            os.fsync(self._file.fileno())


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], load: Callable[[str], Tensor], advance: Advance = no_progress
) -> None:
    """Write the header, then one tensor after the other, and sync the file.

    `tensors` has the shapes and dtypes on the meta device.
    """
    with SafetensorsWriter(path, tensors) as file:
        for name, planned in tensors.items():
            tensor = load(name)
            assert tensor.shape == planned.shape and tensor.dtype == planned.dtype, name
            file.write(tensor)
            advance(tensor.nbytes)
            del tensor


class TorchReader:
    """Reads a torch.save file without running its code. `tensors` is on the meta device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = _torch_index(path)

    def read(self, name: str) -> Tensor:
        planned = self.tensors[name]
        reach = sum((size - 1) * step for size, step in zip(planned.shape, planned.stride(), strict=True)) + 1
        begins = _offset(planned) + int(planned.storage_offset()) * planned.dtype.itemsize
        flat = torch.empty(reach if planned.numel() else 0, dtype=planned.dtype)
        _read_into(self.path, begins, flat)
        return flat.as_strided(planned.shape, planned.stride()).contiguous()

    def read_slice(self, name: str, slices: Slices) -> Tensor:
        return self.read(name)[slices]


def _torch_index(path: Path) -> dict[str, Tensor]:
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
            f"{_AGAIN}; a file older than torch 1.6 must be saved again with a newer torch",
        ) from None
    if not isinstance(state, Mapping) or not all(isinstance(t, Tensor) for t in state.values()):
        raise UserError(f"{path} is not a flat table of names and tensors", "give a file of weights alone")
    return dict(state)


def _offset(tensor: Tensor) -> int:
    """Return where the content of a tensor of `_torch_index` begins in its file."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


def open_tensors(path: Path) -> SafetensorsReader | TorchReader:
    """Open a file of either kind, which its suffix names."""
    return SafetensorsReader(path) if path.suffix == ".safetensors" else TorchReader(path)


class TorchFileWriter:
    """Writes a torch.save file: first space for `tensors`, which `put` then fills in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._sums: dict[int, int] = {}
        with FakeTensorMode():
            empty = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(empty, path)
        self._places = {name: (_offset(t), t) for name, t in _torch_index(path).items()}
        self._file = path.open("r+b")

    def put(self, name: str, tensor: Tensor) -> None:
        offset, planned = self._places[name]
        assert tensor.shape == planned.shape and tensor.dtype == planned.dtype, name
        content = _raw_bytes(tensor)
        _write_at(self._file, offset, content)
        self._sums[offset] = zlib.crc32(content)

    def __enter__(self) -> "TorchFileWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            if kind is None:
                assert len(self._sums) == len(self._places), "a tensor was not written"
                _write_zip_checksums(self._file, self._sums)


def _write_zip_checksums(file: BinaryIO, sums: Mapping[int, int]) -> None:
    """Correct the CRC-32 of the zip entries whose content begins at the offsets in `sums`."""
    with zipfile.ZipFile(file) as archive:
        entries, at = archive.infolist(), archive.start_dir
    for entry in entries:
        name, extra = struct.unpack("<2H", _read_at(file, entry.header_offset + 26, 4))
        begins = entry.header_offset + 30 + name + extra
        if begins in sums:
            checksum = struct.pack("<L", sums[begins])
            _write_at(file, at + 16, checksum)
            after = begins + entry.file_size
            if _read_at(file, after, 4) == b"PK\x07\x08":
                _write_at(file, after + 4, checksum)
        at += 46 + sum(struct.unpack("<3H", _read_at(file, at + 28, 6)))


def _read_at(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)


def _write_at(file: BinaryIO, at: int, content: bytes | memoryview) -> None:
    file.seek(at)
    file.write(content)


def _raw_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _read_into(path: Path, begins: int, tensor: Tensor, row_stride: int | None = None) -> None:
    """Fill a contiguous tensor from a file; with `row_stride` its rows are that many bytes apart.

    The file is read, not mapped: mapped pages would count as memory until the file is closed.
    """
    view = _raw_bytes(tensor)
    width = len(view) // len(tensor) if row_stride and len(tensor) else len(view)
    try:
        with path.open("rb", buffering=0) as file:
            for row, start in enumerate(range(0, len(view), width or 1)):
                file.seek(begins + row * (row_stride or 0))
                done = start
                while done < start + width and (got := file.readinto(view[done : start + width])):
                    done += got
                if done < start + width:
                    raise UserError(f"{path} ends too early", _AGAIN)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", _AGAIN) from None
