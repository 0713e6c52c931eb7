"""Batches for one rank, read ahead by threads. The whole state is one integer and a fingerprint."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from types import TracebackType

import numpy as np
import torch

from arriero.data.order.ledger import Stretch, checksum
from arriero.data.order.order import EvalStream, Located, Stream, fingerprint_of
from arriero.data.order.rows import IGNORED, Rows

__all__ = ["IGNORED", "Batch", "Loader"]


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
        """Micro-batches of at most `sequences` rows; the counts stay those of the whole batch."""
        for begin in range(0, len(self.tokens_BT), sequences):
            rows = slice(begin, begin + sequences)
            documents = None if self.documents_BT is None else self.documents_BT[rows]
            # plain causal attention is faster where every row is one document
            documents = documents if documents is not None and _several(documents) else None
            yield replace(self._map(lambda tensor, rows=rows: tensor[rows]), documents_BT=documents)

    def to(self, device: torch.device) -> "Batch":
        """Documents stay on the host, which lays out the attention between them."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        return replace(
            self,
            tokens_BT=change(self.tokens_BT),
            labels_BT=change(self.labels_BT),
            positions_BT=None if self.positions_BT is None else change(self.positions_BT),
        )


def _several(documents_BT: torch.Tensor) -> bool:
    """True if a row holds more than one document, or a document and padding."""
    return bool((documents_BT[:, 0] != documents_BT[:, -1]).any())


class Loader:
    """Global batches from `start_sample` on, cut into one consecutive part per rank.

    `batch_sequences` is the size of a batch, or says it for the batch that begins at a sample. All ranks get
    equally many rows: a part that is one sequence shorter than others, and the last batch of a finite stream,
    are filled up with rows whose labels are ignored.
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
        self._pin = pin
        self._first = self._consumed = start_sample
        self._checksum = 0
        self._real_tokens = self._slots = 0
        self._readers = [Rows(stream, documents) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, "rows") if threads > 1 else None
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=max(1, prefetch))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(start_sample,), name="data", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, int | str]:
        """What was handed out, not what was read ahead."""
        until = self._stream.identity_until(self._consumed)
        return {"sample": self._consumed, "fingerprint": fingerprint_of(until)}

    def read(self) -> Stretch:
        """What this loader has handed out since it was made, for the ledger."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Each thread fills a part of the rows."""
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
