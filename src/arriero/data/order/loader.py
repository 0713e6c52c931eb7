"""Batches for one rank, prefetched by threads. The whole state is one integer and a fingerprint.

A label is the next token of the same document. Where a document ends, the label is the first token of the
next document in the row, or ignored if documents are masked. Labels that the loss mask excludes are ignored
too. With a document mask, positions count from the beginning of a document, or of its part in the row.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from arriero.data.order.ledger import Stretch, checksum
from arriero.data.order.order import EvalStream, Located, Stream
from arriero.data.order.packing import PlannedRows, Windows
from arriero.data.order.packing_plan import BEGINS, CONTINUES
from arriero.data.store.loss_mask import LossMask
from arriero.files import sha256_of_json

IGNORED = -100


class Rows:
    """Fills arrays with samples. Each thread has its own instance, because the buffers are reused."""

    def __init__(self, stream: Stream | EvalStream, document_mask: bool) -> None:
        self._stream = stream
        self._mask = document_mask
        longest = stream.longest_sequence
        self._row = {s.store.dtype: np.empty(longest + 1, s.store.dtype) for s in stream.sources}
        self._loss_masks = [LossMask(s.store) if s.store.labels else None for s in stream.sources]
        self._count = np.arange(longest, dtype=np.int32)
        self.padding_id = stream.sources[0].store.eos_id

    @property
    def marks_documents(self) -> bool:
        """Whether batches carry document ids; rows of one document do not need them."""
        return self._mask and self._stream.packing.kind != "none"

    def width(self, first_sample: int, located: Located) -> int:
        """Return the slots of a row: the sequence length, or the longest sample if rows are padded."""
        if self._stream.packing.kind != "none":
            return self._stream.seq_len_at(first_sample)
        rows = zip(*(column.tolist() for column in located), strict=True)
        return max((int(self._segments(s, i)["slots"][0]) for s, _, i in rows), default=1)

    def fill(
        self, first_sample: int, located: Located, tokens_BT: np.ndarray, labels_BT: np.ndarray
    ) -> tuple[int, list]:
        """Fill rows; return the number of real tokens, and where documents and padding begin in each row."""
        begins, real = [], 0
        numbers = zip(*(column.tolist() for column in located), strict=True)
        for (source, epoch, index), tokens_T, labels_T in zip(numbers, tokens_BT, labels_BT, strict=False):
            cut = self._stream.cut_of(first_sample, source, epoch)
            if isinstance(cut, Windows):
                marks, filled = self._fill_window(source, cut.parts(index), tokens_T, labels_T)
            else:
                marks, filled = self._fill_segments(source, cut.segments(index), tokens_T, labels_T)
            begins.append(marks)
            real += filled
        rows = len(located.source)
        tokens_BT[rows:] = self.padding_id
        labels_BT[rows:] = IGNORED
        return real, begins

    def mark(self, begins: list, positions_BT: np.ndarray, documents_BT: np.ndarray) -> None:
        """Fill in the positions and the document ids."""
        width = positions_BT.shape[1]
        positions_BT[len(begins) :] = self._count[:width]
        documents_BT[len(begins) :] = 0
        for positions_T, documents_T, places in zip(positions_BT, documents_BT, begins, strict=False):
            edges = [0, *places.tolist(), width]
            for document, (begin, end) in enumerate(pairwise(edges)):
                documents_T[begin:end] = document
                positions_T[begin:end] = self._count[: end - begin]

    def _segments(self, source: int, index: int) -> np.ndarray:
        cut = self._stream.cuts[source]
        assert isinstance(cut, PlannedRows)
        return cut.segments(index)

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
        if mask := self._loss_masks[source]:
            labels_T[~mask.read(start + 1, len(labels_T))] = IGNORED
        if not self._mask:
            return _NOWHERE
        begins = store.document_starts(start + 1, len(labels_T)) - start
        labels_T[begins - 1] = IGNORED
        return begins[:-1] if len(begins) and begins[-1] == len(labels_T) else begins

    def _fill_segments(
        self, number: int, segments: np.ndarray, tokens_T: np.ndarray, labels_T: np.ndarray
    ) -> tuple[np.ndarray, int]:
        source = self._stream.sources[number]
        row = self._row[source.store.dtype]
        prompt = len(source.prompt)
        begin = 0
        for start, slots, flags in segments.tolist():
            first = begin
            if prompt and flags & BEGINS:
                first += prompt
                row[begin:first] = source.prompt
            begin += slots
            # a segment that continues fills its row, so its last label fits behind it
            source.store.read_into(start, row[first : begin + bool(flags & CONTINUES)])
        continues = bool(flags & CONTINUES)
        tokens_T[:begin] = row[:begin]
        tokens_T[begin:] = self.padding_id
        labels_T[: begin - 1 + continues] = row[1 : begin + continues]
        labels_T[begin - 1 + continues :] = IGNORED
        ends = segments["slots"].cumsum()
        self._ignore_labels(number, segments, ends, labels_T)
        return (ends if begin < len(tokens_T) else ends[:-1]), begin

    def _ignore_labels(
        self, number: int, segments: np.ndarray, ends: np.ndarray, labels_T: np.ndarray
    ) -> None:
        """Ignore labels across document boundaries, inside prompts, and where the loss mask excludes them."""
        prompt = len(self._stream.sources[number].prompt)
        begins_here = (segments["flags"] & BEGINS).astype(bool)
        edges = ends[:-1] if self._mask or prompt else ends[:-1][~begins_here[1:]]
        labels_T[edges - 1] = IGNORED
        first = ends - segments["slots"] + prompt * begins_here
        if prompt:
            for end in first[begins_here].tolist():
                labels_T[end - prompt : end - 1] = IGNORED
        if mask := self._loss_masks[number]:
            counts = ends - first + (segments["flags"] & CONTINUES > 0)
            for start, at, count in zip(
                segments["start"].tolist(), first.tolist(), counts.tolist(), strict=True
            ):
                skipped = np.flatnonzero(~mask.read(int(start), int(count))) + at - 1
                labels_T[skipped[skipped >= 0]] = IGNORED


_NOWHERE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Batch:
    """One rank's sequences of a global batch. Positions count from a document's first token in the row."""

    first_sample: int
    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor | None = None
    documents_BT: torch.Tensor | None = None
    real_tokens: int = 0
    slots: int = 0
    checksum: int = 0

    def split(self, sequences: int) -> "Iterator[Batch]":
        """Yield micro-batches of at most `sequences` rows; the counts stay those of the whole batch."""
        for begin in range(0, len(self.tokens_BT), sequences):
            rows = slice(begin, begin + sequences)
            documents = None if self.documents_BT is None else self.documents_BT[rows]
            # plain causal attention is faster if every row is one document
            documents = documents if documents is not None and _several(documents) else None
            yield replace(self._map(lambda tensor, rows=rows: tensor[rows]), documents_BT=documents)

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device; document ids stay on the CPU, where the attention layout is computed."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        return replace(
            self,
            tokens_BT=change(self.tokens_BT),
            labels_BT=change(self.labels_BT),
            positions_BT=None if self.positions_BT is None else change(self.positions_BT),
        )


def _several(documents_BT: torch.Tensor) -> bool:
    """Return whether a row holds more than one document, or a document and padding."""
    return bool((documents_BT[:, 0] != documents_BT[:, -1]).any())


class Loader:
    """Iterates over one rank's consecutive part of each global batch, from `start_sample` on.

    `batch_sequences` is the global batch size, or a function that returns it for the batch that begins at a
    sample. All ranks get the same number of rows: a shorter part, and the last batch of a finite stream, are
    padded with rows whose labels are ignored.
    """

    def __init__(
        self,
        stream: Stream | EvalStream,
        batch_sequences: int | Callable[[int], int],
        start_sample: int = 0,
        rank: int = 0,
        ranks: int = 1,
        prefetch: int = 2,
        pin: bool = False,
        documents: bool = False,
        threads: int = 1,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        self._stream = stream
        self._sequences = batch_sequences if callable(batch_sequences) else lambda _: batch_sequences
        self._rank, self._ranks = rank, ranks
        self._pin, self._prefetch = pin, max(1, prefetch)
        self._readers = [Rows(stream, documents) for _ in range(threads)]
        self._begin(start_sample)

    def _begin(self, sample: int) -> None:
        self._first = self._consumed = sample
        self._checksum = 0
        self._real_tokens = self._slots = 0
        threads = len(self._readers)
        self._pool = ThreadPoolExecutor(threads, "rows") if threads > 1 else None
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=self._prefetch)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(sample,), name="data", daemon=True)
        self._thread.start()

    def seek(self, sample: int) -> None:
        """Continue at another sample; `read` starts a new range there."""
        self.close()
        self._begin(sample)

    def state(self) -> dict[str, int | str]:
        """Return the position after the last batch returned, without prefetched ones."""
        until = self._stream.identity_until(self._consumed)
        return {"sample": self._consumed, "fingerprint": sha256_of_json(until)}

    def read(self) -> Stretch:
        """Return the range of samples this loader has returned, for the ledger."""
        return Stretch(self._first, self._consumed, self._checksum, self._real_tokens, self._slots)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, Batch):
            self._consumed = item.first_sample + self._sequences(item.first_sample)
            self._checksum = (self._checksum + item.checksum) % 2**64
            self._real_tokens += item.real_tokens
            self._slots += item.slots
            return item
        self.close()
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        self._stop.set()
        while not self._ready.empty():
            self._ready.get_nowait()
        self._thread.join()
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self, sample: int) -> None:
        try:
            while not self._stop.is_set():
                if self._stream.samples is not None and sample >= self._stream.samples:
                    self._ready.put(None)
                    return
                self._ready.put(self._make(sample))
                sample += self._sequences(sample)
        except BaseException as error:
            self._ready.put(error)

    def _make(self, first_sample: int) -> Batch:
        sequences = self._sequences(first_sample)
        begin, end = (first_sample + n * sequences // self._ranks for n in (self._rank, self._rank + 1))
        if self._stream.samples is not None:
            end = max(begin, min(end, self._stream.samples))
        samples = np.arange(begin, end)
        located = self._stream.locate(samples)
        rows = self._readers[0]
        width = rows.width(first_sample, located)
        shape = (-(-sequences // self._ranks), width)
        tokens_BT, labels_BT = self._empty(shape), self._empty(shape)
        real, begins = self._fill(first_sample, located, tokens_BT.numpy(), labels_BT.numpy())
        marks = ()
        if rows.marks_documents and any(len(places) for places in begins):
            marks = self._empty(shape, torch.int32), self._empty(shape, torch.int32)
            rows.mark(begins, *(tensor.numpy() for tensor in marks))
        return Batch(
            first_sample,
            tokens_BT,
            labels_BT,
            *marks,
            real_tokens=real,
            slots=len(samples) * width,
            checksum=checksum(samples, located),
        )

    def _fill(
        self, first_sample: int, located: Located, tokens_BT: np.ndarray, labels_BT: np.ndarray
    ) -> tuple[int, list]:
        """Fill rows; with several threads, each fills a part."""
        if self._pool is None:
            return self._readers[0].fill(first_sample, located, tokens_BT, labels_BT)
        edges = [len(tokens_BT) * n // len(self._readers) for n in range(len(self._readers) + 1)]
        parts = []
        for reader, (begin, end) in zip(self._readers, pairwise(edges), strict=True):
            rows = slice(begin, end)
            mine = Located(*(column[rows] for column in located))
            parts.append(self._pool.submit(reader.fill, first_sample, mine, tokens_BT[rows], labels_BT[rows]))
        filled = [part.result() for part in parts]
        return sum(real for real, _ in filled), [mark for _, marks in filled for mark in marks]

    def _empty(self, shape: tuple[int, int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pin)
