"""Name the documents that samples are made of."""

from typing import Any

import numpy as np

from arriero.data.order.order import Stream
from arriero.data.order.packing import Windows

_LISTED = 1000


def documents_of(stream: Stream, samples: range) -> list[dict[str, Any]]:
    """Return per source its path, how many documents these samples hold, and the numbers of the first 1,000.

    A document's number counts over the whole dataset. All samples belong to one global batch.
    """
    located = stream.locate(np.arange(samples.start, samples.stop))
    found: dict[int, list[np.ndarray]] = {}
    for source, epoch, index in zip(*(column.tolist() for column in located), strict=True):
        cut = stream.cut_of(samples.start, source, epoch)
        if isinstance(cut, Windows):
            parts = cut.parts(index)
        else:
            parts = [(int(start), int(slots)) for start, slots, _ in cut.segments(index).tolist()]
        store = stream.sources[source].store
        found.setdefault(source, []).extend(
            store.documents_of(start, min(count, store.tokens - start)) for start, count in parts
        )
    named = []
    for source, numbers in sorted(found.items()):
        every = np.unique(np.concatenate(numbers))
        about = {"source": stream.sources[source].name, "count": len(every)}
        named.append(about | {"documents": every[:_LISTED].tolist()})
    return named
