"""A shard: little-endian tokens in `.bin`, the documents in a Megatron v1 `.idx`."""

import bisect
import errno
import hashlib
import mmap
import os
import struct
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arriero.errors import UserError
from arriero.files import publish_file, sha256_of, sync

IDX_MAGIC = b"MMIDIDX\x00\x00"
IDX_VERSION = 1
SMALL_INDEX = 2**22
LENGTH, POINTER = struct.Struct("<i"), struct.Struct("<q")
REMAKE = "prepare the dataset again, or restore the file from a copy"
IDX_HEADER = struct.Struct("<9sQBQQ")


class Layout(NamedTuple):
    code: int
    numpy: np.dtype


DTYPES = {"uint16": Layout(8, np.dtype("<u2")), "int32": Layout(4, np.dtype("<i4"))}


def dtype_for(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 2**16 else "int32"


class Shard(NamedTuple):
    name: str
    tokens: int
    documents: int
    text_bytes: int
    bin_sha256: str
    idx_sha256: str


class ShardWriter:
    """Writes a shard under a temporary name; `close()` publishes it, an exception removes it."""

    def __init__(self, directory: Path, name: str, vocab_size: int) -> None:
        self.name = name
        self.tokens = 0
        self.text_bytes = 0
        self._vocab_size = vocab_size
        self._layout = DTYPES[dtype_for(vocab_size)]
        self._bin = directory / f"{name}.bin"
        self._idx = directory / f"{name}.idx"
        self._tmp = directory / f"{name}.bin.tmp"
        self._file = self._tmp.open("wb", buffering=2**20)
        self._digest = hashlib.sha256()
        self._lengths = array("i")

    def add(self, ids: np.ndarray, text_bytes: int = 0) -> None:
        ids = np.asarray(ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            bad = int(ids.max()) if ids.min() >= 0 else int(ids.min())
            raise UserError(
                f"{self._bin}: document {len(self._lengths)} has token id {bad} of {self._vocab_size}",
                "prepare with the tokenizer whose vocabulary is declared",
            )
        raw = ids.astype(self._layout.numpy).tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self._lengths.append(len(ids))
        self.tokens += len(ids)
        self.text_bytes += text_bytes

    def add_many(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Add consecutive documents whose ids are known to be in the vocabulary."""
        raw = ids.astype(self._layout.numpy, copy=False).data
        self._file.write(raw)
        self._digest.update(raw)
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())
        self.tokens += len(ids)

    def close(self) -> Shard:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        index = index_bytes(np.array(self._lengths, dtype="<i4"), self._layout)
        publish_file(self._idx, index)
        self._tmp.replace(self._bin)
        sync(self._bin.parent)
        return Shard(
            name=self.name,
            tokens=self.tokens,
            documents=len(self._lengths),
            text_bytes=self.text_bytes,
            bin_sha256=self._digest.hexdigest(),
            idx_sha256=sha256_of(index),
        )

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            self._file.close()
            self._tmp.unlink(missing_ok=True)


def index_bytes(lengths: np.ndarray, layout: Layout) -> bytes:
    """Return the Megatron v1 index of consecutive documents of one sequence each."""
    n = len(lengths)
    pointers = (_starts(lengths) * layout.numpy.itemsize).astype("<i8", copy=False)
    header = IDX_HEADER.pack(IDX_MAGIC, IDX_VERSION, layout.code, n, n + 1)
    table = np.arange(n + 1, dtype="<i8")
    return header + lengths.astype("<i4").tobytes() + pointers.tobytes() + table.tobytes()


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return the number of tokens before each sequence."""
    return np.cumsum(lengths, dtype=np.int64) - lengths


LONGEST_DOCUMENT = 2**31 - 1

_CODES = {layout.code: name for name, layout in DTYPES.items()}
_OTHER_CODES = {1: "uint8", 2: "int8", 3: "int16", 5: "int64", 6: "float64", 7: "float32"}


class Index(NamedTuple):
    """A Megatron index. `table` holds the first sequence of each document, then the number of sequences."""

    dtype: str
    lengths: np.ndarray
    pointers: np.ndarray
    table: np.ndarray

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].numpy.itemsize

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


def read_index(path: Path) -> Index:
    """Open and check an index. Its tables are memory-mapped, so the cost does not depend on their size."""
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "put the .idx beside its .bin") from None
    except (ValueError, OSError) as error:
        raise _not_an_index(path, str(error)) from None
    if len(raw) < IDX_HEADER.size:
        raise _not_an_index(path, f"it has {len(raw)} bytes, its header alone needs {IDX_HEADER.size}")
    magic, version, code, sequences, rows = IDX_HEADER.unpack(raw[: IDX_HEADER.size].tobytes())
    if magic != IDX_MAGIC or version != IDX_VERSION:
        raise _not_an_index(path, "it does not begin with MMIDIDX and version 1")
    if code not in _CODES:
        name = _OTHER_CODES.get(code, f"type code {code}")
        raise UserError(f"{path} declares {name} tokens", "Arriero reads uint16 and int32 tokens")
    sizes = (4 * sequences, 8 * sequences, 8 * rows)
    if len(raw) < IDX_HEADER.size + sum(sizes):
        raise UserError(
            f"{path} is cut off: {len(raw)} bytes, {sequences} sequences need {IDX_HEADER.size + sum(sizes)}",
            "copy it again from where it was made",
        )
    begins = np.cumsum((IDX_HEADER.size, *sizes))
    lengths, pointers, table = (
        raw[begin:end].view(dtype)
        for (begin, end), dtype in zip(pairwise(begins), ("<i4", "<i8", "<i8"), strict=True)
    )
    return Index(_CODES[code], lengths, pointers, table)


def index_problems(index: Index) -> list[str]:
    """List what would make a reader return wrong tokens."""
    problems = []
    if (bad := np.flatnonzero(index.lengths < 0)).size:
        problems.append(f"sequence {bad[0]} has length {index.lengths[bad[0]]}")
    expected = _starts(index.lengths) * index.itemsize
    if (bad := np.flatnonzero(index.pointers != expected)).size:
        k = bad[0]
        problems.append(
            f"sequence {k} begins at byte {index.pointers[k]}, the sequences before it end at {expected[k]}"
        )
    table = index.table
    if not len(table) or table[0] != 0 or table[-1] != len(index.lengths) or (np.diff(table) < 0).any():
        problems.append(f"its document table does not lead from sequence 0 to {len(index.lengths)}")
    return problems


def document_lengths(index: Index) -> np.ndarray:
    """Return the tokens per document; a document may have several sequences."""
    ends = np.zeros(len(index.lengths) + 1, dtype=np.int64)
    np.cumsum(index.lengths, dtype=np.int64, out=ends[1:])
    return np.diff(ends[index.table])


def _not_an_index(path: Path, why: str) -> UserError:
    return UserError(f"{path} is not a Megatron v1 index: {why}", "give the .bin/.idx pair of a dataset")


class TokenFile:
    """An open token file. It is closed with its last reference, never while another thread reads it."""

    def __init__(self, path: Path, tokens: int, itemsize: int) -> None:
        self._path, self._itemsize = path, itemsize
        self._fd = _open_sized(path, tokens * itemsize)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # at interpreter exit the module's names may be gone
        if (fd := getattr(self, "_fd", None)) is not None:
            close(fd)

    def read_into(self, first: int, out: np.ndarray) -> None:
        view = out.view(np.uint8).data
        offset = first * self._itemsize
        while len(view):
            got = os.preadv(self._fd, [view], offset)
            if not got:
                raise UserError(f"{self._path} ends before byte {offset + len(view)}", REMAKE)
            view, offset = view[got:], offset + got


class DocumentIndex:
    """The index of a shard of a dataset, whose size and header are checked: where its documents begin."""

    def __init__(self, path: Path, documents: int, itemsize: int) -> None:
        self._path, self._documents, self._itemsize = path, documents, itemsize
        self._content = self._read()

    def __len__(self) -> int:
        return len(self._content)

    def document_starts(self, first: int, count: int) -> np.ndarray:
        starts = self._starts_from(self._search(first), first + count)
        return starts if (starts[1:] > starts[:-1]).all() else np.unique(starts)

    def starts(self, document: int, end: int) -> np.ndarray:
        """Return where documents [document, end) begin."""
        offset = IDX_HEADER.size + 4 * self._documents + 8 * document
        return np.frombuffer(self._content, "<i8", end - document, offset) // self._itemsize

    def touching(self, first: int, count: int) -> tuple[int, np.ndarray]:
        lo = self._search(first + 1) - 1
        return lo, self._starts_from(lo, first + count)

    def document_span(self, document: int) -> tuple[int, int]:
        (length,) = LENGTH.unpack_from(self._content, IDX_HEADER.size + 4 * document)
        return self.starts(document, document + 1)[0].item(), length

    def _starts_from(self, document: int, end: int) -> np.ndarray:
        """Return where this document and its successors before token `end` begin."""
        some = 32
        while True:
            some = min(some, self._documents - document)
            starts = self.starts(document, document + some)
            if document + some == self._documents or starts[-1] >= end:
                return starts[: starts.searchsorted(end)]
            some *= 8

    def _search(self, token: int) -> int:
        """Return the first document that begins at `token` or later."""
        base = IDX_HEADER.size + 4 * self._documents
        return bisect.bisect_left(
            range(self._documents),
            token * self._itemsize,
            key=lambda document: POINTER.unpack_from(self._content, base + 8 * document)[0],
        )

    def _read(self) -> bytes | mmap.mmap:
        n = self._documents
        size = index_size(n)
        fd = _open_sized(self._path, size)
        try:
            content = (
                mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if size > SMALL_INDEX else os.pread(fd, size, 0)
            )
        finally:
            os.close(fd)
        magic, version, code, *counts = IDX_HEADER.unpack_from(content)
        codes = {layout.code for layout in DTYPES.values() if layout.numpy.itemsize == self._itemsize}
        if (magic, version, *counts) != (IDX_MAGIC, IDX_VERSION, n, n + 1) or code not in codes:
            raise UserError(f"{self._path} is not the index of this dataset", REMAKE)
        if size <= SMALL_INDEX:
            # a large one is not read as a whole
            lengths = np.frombuffer(content, "<i4", n, IDX_HEADER.size)
            pointers = np.frombuffer(content, "<i8", n, IDX_HEADER.size + lengths.nbytes)
            ends = np.cumsum(lengths, dtype=np.int64) * self._itemsize
            if pointers[:1].any() or (pointers[1:] != ends[:-1]).any():
                raise UserError(f"{self._path} is damaged: its documents do not follow each other", REMAKE)
        return content


def index_size(documents: int) -> int:
    return IDX_HEADER.size + (4 + 8) * documents + 8 * (documents + 1)


def _open_sized(path: Path, size: int) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UserError(f"{path} is missing", REMAKE) from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise UserError(f"{path} cannot be read ({error.strerror})", "make it readable") from None
    if (found := os.fstat(fd).st_size) != size:
        os.close(fd)
        raise UserError(f"{path} has {found} bytes, the manifest says {size}", REMAKE)
    return fd
