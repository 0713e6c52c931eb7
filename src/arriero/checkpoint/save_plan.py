"""Which rank writes which part of a tensor, and DCP's index of all parts: computed once and cached.

Names, shapes, layout and the sizes of the files do not change while a run trains, so later saves exchange
only whether anything changed. torch builds several Python objects per chunk of its index and pickles them
while holding the GIL; here numpy assembles the same pickle. Private torch API, tested with 2.11 and 2.13:
`_StorageInfo`.
"""

import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from arriero.checkpoint.ranks import Ranks
from arriero.files import sha256_of

if TYPE_CHECKING:
    from arriero.checkpoint.state import LocalPart

Ints = np.ndarray
VERSION = "1.0.0"
# pickled fragments number their memo entries from 0; these must not collide
_FIRST_MEMO = 10_000
_NEW, _STATE, _DONE = b")\x81", b"}(", b"ub"
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


@dataclass(frozen=True)
class Tensors:
    """Names, dtypes and whole shapes of the tensors of a run."""

    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Chunks:
    """One row per stored chunk, ordered by `tensor`: its `file`, and `begin` and `length` in bytes.

    `offsets` and `sizes` have as many columns as the tensor with the most dimensions.
    """

    tensor: Ints
    offsets: Ints
    sizes: Ints
    file: Ints
    begin: Ints
    length: Ints


def metadata_bytes(tensors: Tensors, chunks: Chunks, files: Sequence[str]) -> bytes:
    """Return the content of `.metadata`, which unpickles to the same objects as torch's own."""
    writer = _Writer()
    classes = (Metadata, TensorStorageMetadata, ChunkStorageMetadata, MetadataIndex, _StorageInfo, torch.Size)
    words = "properties size chunks offsets sizes fqn offset index relative_path length"
    for each in (*classes, *words.split()):
        writer.remember(each)
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
    writer.out += [b"u", *map(_plain, ("storage_meta", None, "version", VERSION)), _DONE, b"."]
    return b"".join(writer.out)


def _plain(value: Any) -> bytes:
    """Return the pickle of a value without its header and its final STOP."""
    return pickle.dumps(value, protocol=2)[2:-1]


class _Writer:
    """Collects opcodes of pickle protocol 2. `remember` adds a value to the memo, `get` refers to it."""

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
    """Return `count` records of constants and integers, each with its opcode unless it is unsigned 32-bit."""
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


@dataclass(frozen=True)
class PartTable:
    """The parts of a rank. `heads` has a line per tensor: name, dtype, shape. `rows` has offset and size of
    each part, padded with 0 and 1 to the most dimensions of any tensor of the rank."""

    heads: bytes
    rows: Ints

    @staticmethod
    def of(parts: "Mapping[str, LocalPart]") -> "PartTable":
        lines, most = [], max((len(part.shape) for part in parts.values()), default=0)
        rows = np.tile(np.repeat(np.array([0, 1]), most), (len(parts), 1))
        for row, (name, part) in zip(rows, parts.items(), strict=True):
            shape = ",".join(map(str, part.shape))
            lines.append(f"{name}\t{str(part.local.dtype).removeprefix('torch.')}\t{shape}")
            row[: len(part.shape)] = part.offset
            row[most : most + len(part.shape)] = part.local.shape
        return PartTable("\n".join(lines).encode(), rows)

    def same_as(self, other: "PartTable") -> bool:
        return self.heads == other.heads and np.array_equal(self.rows, other.rows)

    def packed(self) -> tuple[bytes, bytes, int]:
        return zlib.compress(self.heads, 1), pack(self.rows), self.rows.shape[1]


def pack(ints: Ints) -> bytes:
    """Compress the differences of neighbouring rows, which are similar."""
    return zlib.compress(np.diff(ints, axis=0, prepend=0).astype("<i8").tobytes(), 1)


def unpack(packed: bytes, columns: int = 1) -> Ints:
    flat = np.frombuffer(zlib.decompress(packed), "<i8")
    return flat.reshape(-1, columns).cumsum(axis=0) if columns else flat.reshape(0, 0)


class WritePlan:
    """The parts of all ranks, on rank 0: which rank writes each, and the index for the written sizes."""

    def __init__(self, packed: Sequence[tuple[bytes, bytes, int]]) -> None:
        known: dict[bytes, Ints] = {}
        numbers: dict[bytes, int] = {}
        self._counts = []
        tensor, tables = [], []
        most = max(columns for _, _, columns in packed) // 2
        for heads, rows, columns in packed:
            if heads not in known:
                lines = zlib.decompress(heads).split(b"\n")
                known[heads] = np.array(
                    [numbers.setdefault(line, len(numbers)) for line in lines if line], int
                )
            tensor.append(known[heads])
            tables.append(_padded(unpack(rows, columns), len(known[heads]), most))
            self._counts.append(len(known[heads]))
        self.tensors = _parsed(numbers)
        self._tensor, self._rows = np.concatenate(tensor), np.concatenate(tables)
        self._rank = np.repeat(np.arange(len(packed)), self._counts)
        self._chosen = self._choose(most)

    def _choose(self, most: int) -> Ints:
        """Return the rows to write, by tensor and offset: one of each part, however many ranks hold it."""
        amount = self._rows[:, most:].prod(axis=1)
        held = np.flatnonzero(amount)
        keys = np.stack([self._tensor[held], *self._rows[held, :most].T])
        order = np.lexsort(keys[::-1])
        first = _starts(keys[:, order])
        copies, rows = np.diff(first, append=len(order)), held[order]
        return rows[first + _takers(self._rank[rows[first]], copies, amount[rows[first]])]

    def masks(self) -> list[bytes]:
        """Return one bit per part for each rank: whether it writes the part."""
        written = np.zeros(len(self._rows), bool)
        written[self._chosen] = True
        ends = np.cumsum(self._counts)
        return [np.packbits(written[e - n : e]).tobytes() for e, n in zip(ends, self._counts, strict=True)]

    def index(self, lengths: Sequence[Ints]) -> bytes:
        """Return `.metadata`, given the bytes of each part in the order in which its rank wrote them."""
        begin, length = np.zeros(len(self._rows), int), np.zeros(len(self._rows), int)
        mine = np.sort(self._chosen)
        length[mine] = np.concatenate(lengths)
        begin[mine] = np.concatenate([np.cumsum(each) - each for each in lengths])
        chosen, most = self._chosen, self._rows.shape[1] // 2
        writers, file = np.unique(self._rank[chosen], return_inverse=True)
        chunks = Chunks(
            self._tensor[chosen],
            self._rows[chosen, :most],
            self._rows[chosen, most:],
            file,
            begin[chosen],
            length[chosen],
        )
        return metadata_bytes(self.tensors, chunks, [file_of(rank) for rank in writers.tolist()])


def _starts(keys: Ints) -> Ints:
    """Return the columns that differ from the previous one."""
    new = np.ones(keys.shape[1], bool)
    new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    return np.flatnonzero(new)


def _takers(first_rank: Ints, copies: Ints, amount: Ints) -> Ints:
    """Return which of its holders writes each part.

    Ranks that hold the same parts take turns, largest part first and in alternating direction, so that they
    write about as many bytes each.
    """
    taker = np.zeros(len(copies), int)
    shared = np.flatnonzero(copies > 1)
    shared = shared[np.lexsort((-amount[shared], copies[shared], first_rank[shared]))]
    starts = _starts(np.stack([first_rank[shared], copies[shared]]))
    turn = np.arange(len(shared)) - np.repeat(starts, np.diff(starts, append=len(shared)))
    lap, place = np.divmod(turn, copies[shared])
    taker[shared] = np.where(lap % 2 == 0, place, copies[shared] - 1 - place)
    return taker


def file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _padded(rows: Ints, count: int, most: int) -> Ints:
    have = rows.shape[1] // 2
    padded = np.tile(np.repeat(np.array([0, 1]), most), (count, 1))
    if have:
        padded[:, :have], padded[:, most : most + have] = rows[:, :have], rows[:, have:]
    return padded


def _parsed(numbers: Mapping[bytes, int]) -> Tensors:
    fields = [line.decode().split("\t") for line in numbers]
    return Tensors(
        [name for name, _, _ in fields],
        [getattr(torch, dtype) for _, dtype, _ in fields],
        [[int(n) for n in shape.split(",") if n] for _, _, shape in fields],
    )


class SavePlan:
    """The cached plan of all saves of a run; every rank has one, and all call its methods together."""

    def __init__(self) -> None:
        self._table: PartTable | None = None
        self._names: list[str] = []
        self._world: WritePlan | None = None
        self._lengths: Ints | None = None
        self._index, self._sha256 = b"", ""

    def names(self, parts: "Mapping[str, LocalPart]", ranks: Ranks) -> list[str]:
        """Return the names of the parts that this rank writes, in order."""
        table = PartTable.of(parts)
        if ranks.any(self._table is None or not table.same_as(self._table)):
            packed = ranks.gather_to_leader(table.packed)
            masks = ranks.on_leader(lambda: self._arrange(packed))
            mine = np.unpackbits(np.frombuffer(masks[ranks.rank], np.uint8), count=len(parts)).astype(bool)
            self._names = [name for name, wanted in zip(parts, mine, strict=True) if wanted]
            self._table, self._lengths = table, None
        return self._names

    def _arrange(self, packed: Sequence[tuple[bytes, bytes, int]]) -> list[bytes]:
        self._world = WritePlan(packed)
        return self._world.masks()

    def index(self, lengths: Sequence[int], ranks: Ranks) -> tuple[bytes, str]:
        """Return `.metadata` and its sha256 on rank 0, given the bytes of each part that this rank wrote."""
        written, table = np.array(lengths, int), self._table
        assert table is not None
        if ranks.any(self._lengths is None or not np.array_equal(written, self._lengths)):
            # rank 0 drops the parts of the others once it has an index
            again = table.packed() if self._lengths is not None else None
            found = ranks.gather_to_leader(lambda: (again, pack(written[:, None])))
            ranks.on_leader(lambda: self._make_index(found))
            self._lengths = written
        return self._index, self._sha256

    def _make_index(self, found: Sequence[tuple[tuple[bytes, bytes, int] | None, bytes]]) -> None:
        world = self._world or WritePlan([packed for packed, _ in found if packed is not None])
        self._index = world.index([unpack(lengths)[:, 0] for _, lengths in found])
        self._sha256 = sha256_of(self._index)
        self._world = None
