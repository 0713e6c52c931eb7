"""From located samples to the numbers a model reads: tokens, labels, positions and documents.

A label is the next token of the same document. Where a document ends, the label is the first token of the
next one in the row, or ignored when documents are masked, like all labels that are not to be learnt. With
documents masked, positions count from the beginning of a document, or of the part of it that is in the row.
"""

from functools import lru_cache
from itertools import pairwise

import numpy as np

from arriero.data.order.bestfit import BEGINS, GOES_ON
from arriero.data.order.order import EvalStream, Located, Stream
from arriero.data.order.pack import PlannedRows, Source, Windows
from arriero.data.store.labels import Learnt

IGNORED = -100


class Rows:
    """Writes samples into arrays; a worker of one thread, because its buffers are used again."""

    def __init__(self, stream: Stream | EvalStream, document_mask: bool) -> None:
        self._stream = stream
        self._mask = document_mask
        longest = stream.longest_sequence
        self._row = {s.store.dtype: np.empty(longest + 1, s.store.dtype) for s in stream.sources}
        self._learnt = lru_cache(maxsize=None)(lambda source: _learnt(stream.sources[source]))
        self._count = np.arange(longest, dtype=np.int32)
        self.padding_id = stream.sources[0].store.eos_id

    @property
    def marks_documents(self) -> bool:
        """A row that holds one document needs no marks: attention looks back only, padding is behind it."""
        return self._mask and self._stream.packing.kind != "none"

    def width(self, first_sample: int, located: Located) -> int:
        """Slots of a row: the sequence length, or the longest sample where rows are padded."""
        if self._stream.packing.kind != "none":
            return self._stream.seq_len_at(first_sample)
        rows = zip(*(column.tolist() for column in located), strict=True)
        return max((int(self._pieces(s, i)["slots"][0]) for s, _, i in rows), default=1)

    def fill(
        self, first_sample: int, located: Located, tokens_BT: np.ndarray, labels_BT: np.ndarray
    ) -> tuple[int, list]:
        """Returns the real tokens, and for each row where in it a document, or the padding, begins."""
        begins, real = [], 0
        numbers = zip(*(column.tolist() for column in located), strict=True)
        for (source, epoch, index), tokens_T, labels_T in zip(numbers, tokens_BT, labels_BT, strict=False):
            cut = self._stream.cut_of(first_sample, source, epoch)
            if isinstance(cut, Windows):
                marks, filled = self._fill_window(source, cut.parts(index), tokens_T, labels_T)
            else:
                marks, filled = self._fill_pieces(source, cut.pieces(index), tokens_T, labels_T)
            begins.append(marks)
            real += filled
        rows = len(located.source)
        tokens_BT[rows:] = self.padding_id
        labels_BT[rows:] = IGNORED
        return real, begins

    def mark(self, begins: list, positions_BT: np.ndarray, documents_BT: np.ndarray) -> None:
        """Positions and numbers of documents, from where they begin."""
        width = positions_BT.shape[1]
        positions_BT[len(begins) :] = self._count[:width]
        documents_BT[len(begins) :] = 0
        for positions_T, documents_T, places in zip(positions_BT, documents_BT, begins, strict=False):
            edges = [0, *places.tolist(), width]
            for document, (begin, end) in enumerate(pairwise(edges)):
                documents_T[begin:end] = document
                positions_T[begin:end] = self._count[: end - begin]

    def _pieces(self, source: int, index: int) -> np.ndarray:
        cut = self._stream.cuts[source]
        assert isinstance(cut, PlannedRows)
        return cut.pieces(index)

    def _fill_window(
        self, source: int, parts: list[tuple[int, int]], tokens_T: np.ndarray, labels_T: np.ndarray
    ) -> tuple[np.ndarray, int]:
        begins, filled = [], 0
        for start, count in parts:
            here = slice(filled, filled + count)
            begins.append(self._fill_part(source, start, tokens_T[here], labels_T[here]) + filled)
            filled += count
            if self._mask and filled < len(tokens_T):
                begins.append(np.array([filled]))
        return (begins[0] if len(begins) == 1 else np.unique(np.concatenate(begins))), filled

    def _fill_part(self, source: int, start: int, tokens_T: np.ndarray, labels_T: np.ndarray) -> np.ndarray:
        store = self._stream.sources[source].store
        row = self._row[store.dtype][: len(tokens_T) + 1]
        store.read_into(start, row)
        tokens_T[:] = row[:-1]
        labels_T[:] = row[1:]
        if learnt := self._learnt(source):
            labels_T[~learnt.read(start + 1, len(labels_T))] = IGNORED
        if not self._mask:
            return _NOWHERE
        begins = store.document_starts(start + 1, len(labels_T)) - start
        labels_T[begins - 1] = IGNORED
        return begins[:-1] if len(begins) and begins[-1] == len(labels_T) else begins

    def _fill_pieces(
        self, number: int, pieces: np.ndarray, tokens_T: np.ndarray, labels_T: np.ndarray
    ) -> tuple[np.ndarray, int]:
        source = self._stream.sources[number]
        row = self._row[source.store.dtype]
        prompt = len(source.prompt)
        begin = 0
        for start, slots, flags in pieces.tolist():
            first = begin
            if prompt and flags & BEGINS:
                first += prompt
                row[begin:first] = source.prompt
            begin += slots
            # a piece that goes on fills its row, so its last label has room behind it
            source.store.read_into(start, row[first : begin + bool(flags & GOES_ON)])
        goes_on = bool(flags & GOES_ON)
        tokens_T[:begin] = row[:begin]
        tokens_T[begin:] = self.padding_id
        labels_T[: begin - 1 + goes_on] = row[1 : begin + goes_on]
        labels_T[begin - 1 + goes_on :] = IGNORED
        ends = pieces["slots"].cumsum()
        self._ignore_labels(number, pieces, ends, labels_T)
        return (ends if begin < len(tokens_T) else ends[:-1]), begin

    def _ignore_labels(self, number: int, pieces: np.ndarray, ends: np.ndarray, labels_T: np.ndarray) -> None:
        """Across the edge of a document, inside prompts, and where the dataset says so."""
        prompt = len(self._stream.sources[number].prompt)
        begins_here = (pieces["flags"] & BEGINS).astype(bool)
        edges = ends[:-1] if self._mask or prompt else ends[:-1][~begins_here[1:]]
        labels_T[edges - 1] = IGNORED
        first = ends - pieces["slots"] + prompt * begins_here
        if prompt:
            for end in first[begins_here].tolist():
                labels_T[end - prompt : end - 1] = IGNORED
        if learnt := self._learnt(number):
            counts = ends - first + (pieces["flags"] & GOES_ON > 0)
            for start, at, count in zip(
                pieces["start"].tolist(), first.tolist(), counts.tolist(), strict=True
            ):
                skipped = np.flatnonzero(~learnt.read(int(start), int(count))) + at - 1
                labels_T[skipped[skipped >= 0]] = IGNORED


_NOWHERE = np.empty(0, dtype=np.int64)


def _learnt(source: Source) -> Learnt | None:
    return Learnt(source.store) if source.store.labels else None
