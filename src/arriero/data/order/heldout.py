"""Documents held out by a keyed shuffle, for datasets whose documents were not shuffled when they were made.

Elsewhere the tail of a dataset is a fair sample. Imported files keep the order of the system that wrote them,
so some documents, a pure function of the seed in the manifest and their numbers, are moved to the end of the
view that training reads; the files stay as they are. Datasets imported by earlier versions have no seed and
keep their tail.
"""

import hashlib

import numpy as np

from arriero.data.order.permutation import block_keys, key_of, permute
from arriero.data.store.store import TokenStore

HELDOUT_SEED = "heldout_seed"
DRAWN_AT_ONCE = 1024


def heldout_last(store: TokenStore, tokens: int) -> TokenStore:
    """The dataset with at least `tokens` of chosen documents at its end, if its manifest asks for it."""
    seed = store.about.get(HELDOUT_SEED)
    if seed is None or not 0 < tokens < store.tokens:
        return store
    return _Moved(store, _draw(store, tokens, int(seed)), tokens)


def _draw(store: TokenStore, tokens: int, seed: int) -> np.ndarray:
    """(start, length) of the chosen documents, in order of position."""
    keys = block_keys(key_of("heldout", seed), np.array([0]))
    chosen: list[tuple[int, int]] = []
    drawn = 0
    for begin in range(0, store.documents, DRAWN_AT_ONCE):
        draws = np.arange(begin, min(begin + DRAWN_AT_ONCE, store.documents))
        for number in permute(draws, store.documents, keys).tolist():
            start, length = store.document_span(number)
            if length:
                chosen.append((start, length))
                drawn += length
            if drawn >= tokens:
                return np.array(sorted(chosen))
    return np.array(sorted(chosen))


class _Moved(TokenStore):
    """A dataset whose documents `last` come after all others. Every read goes through `pieces`."""

    def __init__(self, store: TokenStore, last: np.ndarray, tokens: int) -> None:
        self.__dict__.update(store.__dict__)
        self._store = store  # its files are closed with it
        self.heldout_tokens = tokens
        starts, lengths = last.T
        rest = np.append(0, starts + lengths)
        kept = np.append(starts, store.tokens) - rest
        begins = np.concatenate((rest[kept > 0], starts))
        self._begins = begins
        self._stops = np.cumsum(np.concatenate((kept[kept > 0], lengths)))
        self.fingerprint = hashlib.sha256(
            store.fingerprint.encode() + last.astype("<i8").tobytes()
        ).hexdigest()

    def pieces(self, start: int, n: int) -> list[tuple[int, int, int]]:
        pieces = []
        part = int(self._stops.searchsorted(start, side="right"))
        while n > 0:
            before = int(self._stops[part - 1]) if part else 0
            count = min(n, int(self._stops[part]) - start)
            pieces += super().pieces(int(self._begins[part]) + start - before, count)
            start, n, part = start + count, n - count, part + 1
        return pieces

    def document_edges(self, shard: int, first: int, end: int) -> np.ndarray:
        """Of documents that are neighbours here, too."""
        edges = super().document_edges(shard, first, end)
        order = np.argsort(self._begins)
        part = order[self._begins[order].searchsorted(edges[0], side="right") - 1]
        before = self._stops[part - 1] if part else 0
        return edges - self._begins[part] + before


def heldout_tokens_of(store: TokenStore) -> int:
    """With which `heldout_last` makes this dataset again."""
    return store.heldout_tokens if isinstance(store, _Moved) else 0
