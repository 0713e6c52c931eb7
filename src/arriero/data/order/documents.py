"""Name the documents that samples are made of, and the samples that a document was read in."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from arriero.data.order.order import Stream
from arriero.data.order.packing import Windows
from arriero.data.order.packing_plan import BEGINS

_LISTED = 1000
_CHUNK = 2**16


class Reading(NamedTuple):
    """Tokens [first, end) of a document, read at `offset` of a sample, in an epoch (from 0) of its source."""

    sample: int
    epoch: int
    first: int
    end: int
    offset: int


def documents_of(stream: Stream, samples: range) -> list[dict[str, Any]]:
    """Return per source its path, how many documents these samples hold, and the numbers of the first 1,000.

    A document's number counts over the whole dataset. All samples belong to one global batch.
    """
    located = stream.locate(np.arange(samples.start, samples.stop))
    found: dict[int, list[np.ndarray]] = {}
    for source, epoch, index in zip(*(column.tolist() for column in located), strict=True):
        store = stream.sources[source].store
        found.setdefault(source, []).extend(
            store.documents_of(start, min(count, store.tokens - start))
            for start, count, _ in _parts(stream, samples.start, source, epoch, index)
        )
    named = []
    for source, numbers in sorted(found.items()):
        every = np.unique(np.concatenate(numbers))
        about = {"source": stream.sources[source].name, "count": len(every)}
        named.append(about | {"documents": every[:_LISTED].tolist()})
    return named


def readings_of(
    stream: Stream,
    source: int,
    document: int,
    samples: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Reading]:
    """Return where a document of a source is among the first `samples` samples, in their order.

    The order is replayed; neither tokens nor the run's record are read.
    """
    store = stream.sources[source].store
    stored, length = store.document_span(document)
    begin = store.place_of(stored) if length else 0
    span = stream.sources[source].tokens
    if not length or begin not in span:
        return []
    changes = (first for first, _ in stream.lengths if first < samples)
    found = []
    for first, end in pairwise(sorted({samples, *range(0, samples, _CHUNK), *changes})):
        located = stream.locate(np.arange(first, end))
        mine = np.flatnonzero(located.source == source)
        for epoch in np.unique(located.epoch[mine]).tolist():
            here = mine[located.epoch[mine] == epoch]
            wanted = stream.cut_of(first, source, epoch).samples_of(begin, begin + length)
            for place in here[np.isin(located.index[here], wanted)].tolist():
                parts = _parts(stream, first, source, epoch, int(located.index[place]))
                for start, count, offset in parts:
                    low, high = max(start, begin), min(start + count, begin + length)
                    if low < high:
                        at = (low - begin, high - begin, offset + low - start)
                        found.append(Reading(first + place, epoch, *at))
        progress(end, samples)
    return found


def _parts(
    stream: Stream, sample: int, source: int, epoch: int, index: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (position in the source, tokens, place in the sequence) of the parts of a located sample."""
    cut, offset = stream.cut_of(sample, source, epoch), 0
    if isinstance(cut, Windows):
        for start, count in cut.parts(index):
            yield start, count, offset
            offset += count
        return
    prompt = len(stream.sources[source].prompt)
    for start, slots, flags in cut.segments(index).tolist():
        before = prompt if flags & BEGINS else 0
        yield start, slots - before, offset + before
        offset += slots
