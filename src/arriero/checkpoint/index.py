"""DCP's `.metadata` for millions of chunks: the pickle that torch would write, assembled from arrays.

torch builds several Python objects per chunk and pickles them while holding the GIL. Records of one tensor
differ only in integers, so numpy writes them all at once.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

# private, but part of the file format: its fields are the same in torch 2.11 to 2.13
from torch.distributed.checkpoint.filesystem import _StorageInfo  # isort: skip

Ints = np.ndarray
VERSION = "1.0.0"
# pickled fragments number what they memoize from 0; ours must not collide
_FIRST_MEMO = 10_000
_NEW, _STATE, _DONE = b")\x81", b"}(", b"ub"
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


@dataclass(frozen=True)
class Tensors:
    """The tensors of a run: names, types and whole shapes."""

    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Chunks:
    """One row per stored chunk, ordered by `tensor`. `file` and `begin`, `length` in bytes say where it is.

    `offsets` and `sizes` have as many columns as the tensor with the most dimensions.
    """

    tensor: Ints
    offsets: Ints
    sizes: Ints
    file: Ints
    begin: Ints
    length: Ints


def metadata_bytes(tensors: Tensors, chunks: Chunks, files: Sequence[str]) -> bytes:
    """The content of `.metadata`, as torch's own pickle would be read back."""
    writer = _Writer()
    for each in (
        Metadata,
        TensorStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        _StorageInfo,
        torch.Size,
    ):
        writer.remember(each)
    for word in ("properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index"):
        writer.remember(word)
    for word in ("relative_path", "length"):
        writer.remember(word)
    for dtype in dict.fromkeys(tensors.dtypes):
        writer.remember(TensorProperties(dtype=dtype), key=dtype)
    for name in [*files, *tensors.names]:
        writer.remember(name)
    first_file = writer.memo[files[0]] if files else 0
    bounds = np.searchsorted(chunks.tensor, np.arange(len(tensors.names) + 1))
    writer.out += [writer.get(Metadata), _NEW, _STATE, _plain("state_dict_metadata"), b"}("]
    for i, name in enumerate(tensors.names):
        rows = slice(bounds[i], bounds[i + 1])
        writer.out.append(writer.get(name))
        writer.tensor(tensors.dtypes[i], tensors.shapes[i], chunks.offsets[rows], chunks.sizes[rows])
    writer.out += [b"u", _plain("planner_data"), _plain(None), _plain("storage_data"), b"}("]
    for i, name in enumerate(tensors.names):
        rows = slice(bounds[i], bounds[i + 1])
        if rows.stop > rows.start:
            places = (first_file + chunks.file[rows], chunks.begin[rows], chunks.length[rows])
            writer.places(name, chunks.offsets[rows, : len(tensors.shapes[i])], places)
    writer.out += [
        b"u",
        _plain("storage_meta"),
        _plain(None),
        _plain("version"),
        _plain(VERSION),
        _DONE,
        b".",
    ]
    return b"".join(writer.out)


def _plain(value: Any) -> bytes:
    """A value's own pickle, without the header and the final STOP."""
    return pickle.dumps(value, protocol=2)[2:-1]


class _Writer:
    """Opcodes of pickle protocol 2. What is remembered is referred to by a number of fixed width."""

    def __init__(self) -> None:
        self.out = [b"\x80\x02"]
        self.memo: dict[Any, int] = {}

    def remember(self, value: Any, key: Any = None) -> None:
        key = value if key is None else key
        if key in self.memo:
            return
        self.memo[key] = number = _FIRST_MEMO + len(self.memo)
        self.out += [_plain(value), b"r", number.to_bytes(4, "little"), b"0"]

    def get(self, key: Any) -> bytes:
        return b"j" + self.memo[key].to_bytes(4, "little")

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offsets: Ints, sizes: Ints) -> None:
        ndim = len(shape)
        self.out += [self.get(TensorStorageMetadata), _NEW, _STATE, self.get("properties"), self.get(dtype)]
        self.out += [self.get("size"), _plain(torch.Size(shape)), self.get("chunks"), b"]("]
        chunk = [
            self.get(ChunkStorageMetadata),
            _NEW,
            _STATE,
            self.get("offsets"),
            *self._size(offsets, ndim),
        ]
        self.out.append(_records(len(offsets), [*chunk, self.get("sizes"), *self._size(sizes, ndim), _DONE]))
        self.out += [b"e", _DONE]

    def places(self, name: str, offsets: Ints, places: tuple[Ints, Ints, Ints]) -> None:
        file, begin, length = places
        count, ndim = offsets.shape
        index = [self.get(MetadataIndex), _NEW, _STATE, self.get("fqn"), self.get(name), self.get("offset")]
        index += [*self._size(offsets, ndim), self.get("index"), np.arange(count), _DONE]
        info = [self.get(_StorageInfo), _NEW, _STATE, self.get("relative_path"), b"j", file.astype("<u4")]
        info += [self.get("offset"), begin, self.get("length"), length, _DONE]
        self.out.append(_records(count, [*index, *info]))

    def _size(self, values: Ints, ndim: int) -> list[bytes | Ints]:
        columns = [values[:, axis] for axis in range(ndim)]
        opening, closing = (b"(", b"t") if ndim > 3 else (b"", _TUPLES[ndim])
        return [self.get(torch.Size), opening, *columns, closing + b"\x85R"]


def _records(count: int, fields: Sequence[bytes | Ints]) -> bytes:
    """`count` records side by side: constants, and integers as opcode and value (unsigned 32 bits: bare)."""
    parts: list[tuple[bytes, Ints | None]] = []
    for field in fields:
        if isinstance(field, bytes):
            parts.append((field, None))
        elif field.dtype == np.dtype("<u4"):
            parts.append((b"", field))
        elif len(field) == 0 or field.max() < 2**31:
            parts.append((b"J", field.astype("<i4")))
        else:
            parts.append((b"\x8a\x08", field.astype("<i8")))
    width = sum(len(constant) + (0 if ints is None else ints.itemsize) for constant, ints in parts)
    table, at = np.empty((count, width), np.uint8), 0
    for constant, ints in parts:
        table[:, at : at + len(constant)] = np.frombuffer(constant, np.uint8)
        at += len(constant)
        if ints is not None:
            raw = np.ascontiguousarray(ints).view(np.uint8).reshape(count, ints.itemsize)
            table[:, at : at + ints.itemsize] = raw
            at += ints.itemsize
    return table.tobytes()
