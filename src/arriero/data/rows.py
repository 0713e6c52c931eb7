"""From located samples to the numbers a model reads: tokens, labels, positions and documents.

A label is the next token of the same document. Where a document ends, the label is the first token of the
next one in the row, or ignored when documents are masked, like all labels that are not to be learnt. With
documents masked, positions count from the beginning of a document, or of the part of it that is in the row.
"""

from functools import lru_cache

import numpy as np

from arriero.data.bestfit import BEGINS, GOES_ON
from arriero.data.labels import Learnt
from arriero.data.order import EvalStream, Located, Stream
from arriero.data.pack import PlannedRows, Source, Windows

IGNORED = -100


class Rows:
    """Writes samples into arrays; a worker of one thread, because its buffers are used again."""

    def __init__(self, stream: Stream | EvalStream, document_mask: bool) -> None:
        self._stream = stream
        self._mask = document_mask
        self._row = {s.store.dtype: np.empty(stream.seq_len + 1, s.store.dtype) for s in stream.sources}
        self._learnt = lru_cache(maxsize=None)(lambda source: _learnt(stream.sources[source]))
        self.padding_id = stream.sources[0].store.eos_id

    @property
    def marks_documents(self) -> bool:
        """A row that holds one document needs no marks: attention looks back only, padding is behind it."""
        return self._mask and self._stream.packing.kind != "none"

    def width(self, located: Located) -> int:
        """Slots of a row: the sequence length, or the longest sample where rows are padded."""
        if self._stream.packing.kind != "none":
            return self._stream.seq_len
        rows = zip(located.source.tolist(), located.index.tolist(), strict=True)
        return max((int(self._pieces(s, i)["slots"][0]) for s, i in rows), default=1)

    def fill(self, located: Located, tokens_BT: np.ndarray, labels_BT: np.ndarray) -> tuple[int, list]:
        """Returns the real tokens, and for each row where in it a document, or the padding, begins."""
        begins, real = [], 0
        for b, (source, index) in enumerate(zip(located.source.tolist(), located.index.tolist(), strict=True)):
            cut = self._stream.cuts[source]
            if isinstance(cut, Windows):
                begins.append(self._fill_window(source, cut.start(index), tokens_BT[b], labels_BT[b]))
                real += tokens_BT.shape[1]
            else:
                marks, filled = self._fill_pieces(source, self._pieces(source, index), tokens_BT[b], labels_BT[b])
                begins.append(marks)
                real += filled
        rows = len(located.source)
        tokens_BT[rows:] = self.padding_id
        labels_BT[rows:] = IGNORED
        return real, begins

    def mark(self, begins: list, positions_BT: np.ndarray, documents_BT: np.ndarray) -> None:
        """Positions and numbers of documents, from where they begin."""
        documents_BT[:] = 0
        positions_BT[:] = 1
        positions_BT[:, 0] = 0
        for b, places in enumerate(begins):
            documents_BT[b, places] = 1
            positions_BT[b, places] -= np.diff(places, prepend=0)
        np.cumsum(documents_BT, axis=1, out=documents_BT)
        np.cumsum(positions_BT, axis=1, out=positions_BT)

    def _pieces(self, source: int, index: int) -> np.ndarray:
        cut = self._stream.cuts[source]
        assert isinstance(cut, PlannedRows)
        return cut.pieces(index)

    def _fill_window(self, source: int, start: int, tokens_T: np.ndarray, labels_T: np.ndarray) -> np.ndarray:
        store = self._stream.sources[source].store
        row = self._row[store.dtype]
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
        learnt, prompt = self._learnt(number), len(source.prompt)
        ends = np.cumsum(pieces["slots"])
        filled = int(ends[-1])
        labels_T[filled - 1 :] = IGNORED
        tokens_T[filled:] = self.padding_id
        begin = 0
        for start, slots, flags in pieces.tolist():
            here = prompt if flags & BEGINS else 0
            count = slots - here + (flags & GOES_ON == GOES_ON)
            part = row[:count]
            source.store.read_into(start, part)
            end = begin + slots
            tokens_T[begin : begin + here] = source.prompt[:here]
            tokens_T[begin + here : end] = part[: slots - here]
            self._label(labels_T, begin, here, flags, part)
            if learnt:
                skipped = np.flatnonzero(~learnt.read(start, count)) + begin + here - 1
                labels_T[skipped[skipped >= 0]] = IGNORED
            begin = end
        return (ends if filled < len(tokens_T) else ends[:-1]), filled

    def _label(self, labels_T: np.ndarray, begin: int, prompt: int, flags: int, part: np.ndarray) -> None:
        """Labels that predict this piece's tokens; the one before it belongs to the document before."""
        first = begin + prompt
        labels_T[begin : max(first - 1, begin)] = IGNORED
        labels_T[first : first + len(part) - 1] = part[1:]
        if begin:
            crosses = flags & BEGINS and not self._mask and not prompt
            labels_T[begin - 1] = part[0] if crosses else IGNORED
        if prompt:
            labels_T[first - 1] = part[0]


_NOWHERE = np.empty(0, dtype=np.int64)


def _learnt(source: Source) -> Learnt | None:
    return Learnt(source.store) if source.store.labels else None
