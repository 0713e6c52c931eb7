"""Reading a Megatron v1 `.idx`, ours or another's, without trusting it."""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arriero.data.store.shards import DTYPES, IDX_HEADER, IDX_MAGIC, IDX_VERSION
from arriero.errors import UserError

LONGEST_DOCUMENT = 2**31 - 1

_CODES = {layout.code: name for name, layout in DTYPES.items()}
_OTHER_CODES = {1: "uint8", 2: "int8", 3: "int16", 5: "int64", 6: "float64", 7: "float32"}


class Index(NamedTuple):
    """`table` holds the number of the first sequence of each document, and of the one after the last."""

    dtype: str
    lengths: np.ndarray
    pointers: np.ndarray
    table: np.ndarray

    @property
    def itemsize(self) -> int:
        return np.dtype(DTYPES[self.dtype].numpy).itemsize

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


def read_index(path: Path) -> Index:
    """The tables are mapped, not read: opening costs the same for any number of documents."""
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
        raise UserError(f"{path} says the tokens are {name}", "Arriero reads uint16 and int32 tokens")
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
    """What would make a reader fetch the wrong tokens."""
    problems = []
    if (bad := np.flatnonzero(index.lengths < 0)).size:
        problems.append(f"sequence {bad[0]} has length {index.lengths[bad[0]]}")
    expected = np.zeros(len(index.lengths), dtype=np.int64)
    np.cumsum(index.lengths[:-1], dtype=np.int64, out=expected[1:])
    expected *= index.itemsize
    if (bad := np.flatnonzero(index.pointers != expected)).size:
        k = bad[0]
        problems.append(
            f"sequence {k} begins at byte {index.pointers[k]}, by the lengths before it at {expected[k]}"
        )
    table = index.table
    if not len(table) or table[0] != 0 or table[-1] != len(index.lengths) or (np.diff(table) < 0).any():
        problems.append(f"its document table does not lead from sequence 0 to {len(index.lengths)}")
    return problems


def document_lengths(index: Index) -> np.ndarray:
    """Tokens per document; a document may be several sequences."""
    ends = np.zeros(len(index.lengths) + 1, dtype=np.int64)
    np.cumsum(index.lengths, dtype=np.int64, out=ends[1:])
    return np.diff(ends[index.table])


def _not_an_index(path: Path, why: str) -> UserError:
    return UserError(f"{path} is not a Megatron v1 index: {why}", "give the .bin/.idx pair of a dataset")
