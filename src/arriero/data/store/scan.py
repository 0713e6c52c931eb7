"""One pass over a file of raw tokens: its checksum, ids beyond the vocabulary, and how documents end."""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arriero.data.store.shards import DTYPES

CHUNK_BYTES = 2**22

Advance = Callable[[int], None]


def unseen(_: int) -> None:
    """Progress nobody watches."""


@dataclass(frozen=True)
class Scan:
    """`beyond` and `doubled` say where the first such token lies; a doubled EOS lies within one document."""

    sha256: str
    tokens: int
    documents: int
    beyond: tuple[int, int] | None
    doubled: int | None
    empty: int
    only_eos: int
    without_eos: int
    inner_eos: int

    @property
    def mostly_eos(self) -> bool:
        """As if each document were followed by one that holds nothing but the separator."""
        return self.documents >= 4 and 2 * self.only_eos >= self.documents


def scan_tokens(
    path: Path, dtype: str, lengths: np.ndarray, vocab_size: int, eos_id: int, advance: Advance = unseen
) -> Scan:
    """`lengths` are the documents' and add up to the file's tokens."""
    layout = np.dtype(DTYPES[dtype].numpy)
    ends = np.cumsum(lengths, dtype=np.int64)
    pass_ = _Pass(ends[lengths > 0] - 1, ends[lengths == 1] - 1, vocab_size, eos_id)
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while (got := _fill(file, buffer)) >= layout.itemsize:
            view = memoryview(buffer)[:got]
            digest.update(view)
            pass_.take(np.frombuffer(view, dtype=layout, count=got // layout.itemsize))
            advance(got)
    return Scan(
        sha256=digest.hexdigest(),
        tokens=pass_.position,
        documents=len(lengths),
        beyond=pass_.beyond,
        doubled=pass_.doubled,
        empty=int((lengths == 0).sum()),
        only_eos=pass_.only_eos,
        without_eos=len(pass_.last) - pass_.with_eos,
        inner_eos=pass_.eos - pass_.with_eos,
    )


class _Pass:
    def __init__(self, last: np.ndarray, single: np.ndarray, vocab_size: int, eos_id: int) -> None:
        self.last, self.single = last, single
        self.vocab_size, self.eos_id = vocab_size, eos_id
        self.position = self.eos = self.with_eos = self.only_eos = 0
        self.beyond: tuple[int, int] | None = None
        self.doubled: int | None = None
        self._eos_before = False

    def take(self, ids: np.ndarray) -> None:
        if self.beyond is None and (ids.max() >= self.vocab_size or ids.min() < 0):
            where = int(np.flatnonzero((ids >= self.vocab_size) | (ids < 0))[0])
            self.beyond = self.position + where, int(ids[where]) % 2**32
        is_eos = ids == self.eos_id
        self.eos += int(is_eos.sum())
        self.with_eos += int(is_eos[self._here(self.last, len(ids))].sum())
        self.only_eos += int(is_eos[self._here(self.single, len(ids))].sum())
        if self.doubled is None:
            self._find_doubled(is_eos)
        self._eos_before = bool(is_eos[-1])
        self.position += len(ids)

    def _here(self, positions: np.ndarray, n: int) -> np.ndarray:
        lo, hi = np.searchsorted(positions, (self.position, self.position + n))
        return positions[lo:hi] - self.position

    def _find_doubled(self, is_eos: np.ndarray) -> None:
        second = is_eos.copy()
        second[1:] &= is_eos[:-1]
        second[0] &= self._eos_before
        where = np.flatnonzero(second) + self.position
        found = np.searchsorted(self.last, where - 1)
        inside = where[self.last[found] != where - 1]
        if len(inside):
            self.doubled = int(inside[0])


def _fill(file: io.RawIOBase, buffer: bytearray) -> int:
    view, filled = memoryview(buffer), 0
    while filled < len(buffer) and (got := file.readinto(view[filled:])):
        filled += got
    return filled
