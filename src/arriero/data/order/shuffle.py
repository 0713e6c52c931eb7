"""The pure functions behind the data order: keyed permutations, mixture shares and held-out documents."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import gcd, isfinite, isqrt, lcm
from typing import Any

import numpy as np

from arriero.data.store.store import TokenStore
from arriero.errors import UserError
from arriero.files import sha256_of, sha256_of_json

ROUNDS = 8


def key_of(*parts: Any) -> int:
    return int.from_bytes(bytes.fromhex(sha256_of_json(parts))[:8], "little")


def block_keys(key: int, numbers: np.ndarray) -> np.ndarray:
    """Derive one key per number (an epoch or a block) from `key`."""
    return _mix(_mix(numbers.astype(np.uint64)) ^ np.uint64(key))


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Apply a keyed permutation of [0, n): a Feistel network on a grid just above n, with cycle walking.

    `keys` has one key, or one per index.
    """
    rows = isqrt(n - 1) + 1
    columns = -(-n // rows)
    image = np.array(index, dtype=np.uint64, ndmin=1)
    keys = np.broadcast_to(keys, image.shape)
    outside = np.arange(len(image))
    while len(outside):
        image[outside] = _feistel(image[outside], rows, columns, keys[outside])
        outside = outside[image[outside] >= n]
    return image.astype(np.int64)


def _feistel(cell: np.ndarray, rows: int, columns: int, keys: np.ndarray) -> np.ndarray:
    sides = (np.uint64(rows), np.uint64(columns))
    row, column = np.divmod(cell, sides[1])
    for number in range(ROUNDS):
        keys = _mix(keys)
        if number % 2:
            column = (column + _mix(row ^ keys) % sides[1]) % sides[1]
        else:
            row = (row + _mix(column ^ keys) % sides[0]) % sides[0]
    return row * sides[1] + column


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the splitmix64 step, in which every output bit depends on every input bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Shuffle:
    """A keyed order of [0, n): chunks in random order, and all indices of a group of chunks in random order.

    Chunks stay unread until their group is reached, so the sequence length can change inside an epoch, and
    only the files of one group are read at a time. A single group is a plain permutation.
    """

    n: int
    chunk: int
    group: int

    @property
    def _groups(self) -> int:
        return max(1, self.n // self.chunk // self.group)

    def at(self, place: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return the index at each place of the order. `keys` has one key, or one per place."""
        size, chunks = self.group * self.chunk, self.n // self.chunk
        if self._groups == 1:
            return permute(place, self.n, keys)
        keys = np.broadcast_to(keys, place.shape)
        number = np.minimum(place // size, self._groups - 1)
        first = number * size
        within = block_keys(0, number) ^ keys
        index = np.empty_like(place)
        last = number == self._groups - 1
        # the last group also holds what does not fill a group or a chunk
        for here, count in ((~last, size), (last, self.n - (self._groups - 1) * size)):
            index[here] = first[here] + permute(place[here] - first[here], count, within[here])
        chunk, offset = np.divmod(index, self.chunk)
        whole = chunk < chunks
        chunk[whole] = permute(chunk[whole], chunks, keys[whole])
        return chunk * self.chunk + offset

    def rest(self, place: int, key: np.ndarray) -> np.ndarray:
        """Return the indices at `place` and later as ascending intervals (first, end)."""
        size, chunks = self.group * self.chunk, self.n // self.chunk
        number = min(place // size, self._groups - 1)
        end = self.n if number == self._groups - 1 else (number + 1) * size
        single = self.at(np.arange(place, end), key)
        found = [np.stack((single, single + 1), axis=1)]
        if end < self.n:
            later = permute(np.arange(end // self.chunk, chunks), chunks, key) * self.chunk
            found += [
                np.stack((later, later + self.chunk), axis=1),
                np.array([[chunks * self.chunk, self.n]]),
            ]
        return merge_intervals(np.concatenate(found))


def merge_intervals(intervals: np.ndarray) -> np.ndarray:
    """Sort disjoint intervals, merge neighbours and drop empty ones."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    intervals = intervals[np.argsort(intervals[:, 0])]
    if not len(intervals):
        return intervals
    gaps = intervals[1:, 0] != intervals[:-1, 1]
    firsts = intervals[np.concatenate(([True], gaps)), 0]
    return np.stack((firsts, intervals[np.concatenate((gaps, [True])), 1]), axis=1)


BLOCK = 8192


class Shares:
    """The samples of each source per block of a mixture, exact to about one sample at the end of every block.

    Samples are divided along a binary tree. A node with n samples gives round(n * share) to its left child
    and the rest to its right child. Both counts grow with n, so the quotas of a block, the differences
    between its end and its beginning, are never negative and fill the block. The tree is a Huffman tree:
    large sources are near the root, where rounding errors do not add up.

    `weights` are shares of tokens, 0 for an unused source; `tokens` is the mean number of tokens of a sample
    of each source.
    """

    def __init__(self, weights: Sequence[float], tokens: Sequence[Fraction], names: Sequence[str]) -> None:
        _check_weights(weights, names)
        exact = [Fraction(repr(float(w))) for w in weights]
        self.recorded = _smallest_integers(exact)
        by_samples = _smallest_integers([w / t for w, t in zip(exact, tokens, strict=True)])
        self._sources = len(weights)
        self._root = _tree(by_samples)
        total = sum(by_samples)
        self.per_sample = np.array([float(Fraction(w, total)) for w in by_samples])
        self.after = lru_cache(maxsize=16)(self._after)

    @property
    def only(self) -> int | None:
        """The only source with a weight, if there is just one."""
        return None if len(self._root) == 3 else self._root[1]

    def _after(self, blocks: int) -> np.ndarray:
        """Return the samples of each source in the first `blocks` blocks."""
        drawn = np.zeros(self._sources, dtype=np.int64)
        waiting = [(self._root, blocks * BLOCK)]
        while waiting:
            node, samples = waiting.pop()
            if len(node) == 2:
                drawn[node[1]] = samples
                continue
            weight, left, right = node
            to_left = (2 * samples * left[0] + weight) // (2 * weight)
            waiting += [(left, to_left), (right, samples - to_left)]
        return drawn


class FixedQuotas:
    """Order version 1: the same quotas in every block, rounded to 1/8192 by largest remainder."""

    def __init__(self, weights: Sequence[float], tokens: Sequence[Fraction], names: Sequence[str]) -> None:
        _check_weights(weights, names)
        taking_part = [i for i, weight in enumerate(weights) if weight]
        exact = [Fraction(weights[i]) / tokens[i] for i in taking_part]
        shares = [BLOCK * weight / sum(exact) for weight in exact]
        result = [int(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda i: result[i] - shares[i])
        for i in by_remainder[: BLOCK - sum(result)]:
            result[i] += 1
        for i, quota in zip(taking_part, result, strict=True):
            if quota == 0:
                raise UserError(
                    f"{names[i]} has weight {weights[i]}, less than 1 sample in {BLOCK}, and this run began "
                    "with an order that cannot mix less",
                    "raise its weight, or choose another run.name",
                )
        self.recorded = [0] * len(weights)
        for i, quota in zip(taking_part, result, strict=True):
            self.recorded[i] = quota
        self.per_sample = np.array(self.recorded) / BLOCK
        self.only = self.recorded.index(BLOCK) if BLOCK in self.recorded else None

    def after(self, blocks: int) -> np.ndarray:
        return blocks * np.array(self.recorded, dtype=np.int64)


def _check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    for name, weight in zip(names, weights, strict=True):
        if not (isfinite(weight) and weight >= 0):
            raise bad_weight(name, weight)


def bad_weight(name: str, weight: float) -> UserError:
    return UserError(f"{name} has weight {weight}", "give every source a weight above 0, or remove it")


def _smallest_integers(ratios: Sequence[Fraction]) -> list[int]:
    denominator = lcm(*(ratio.denominator for ratio in ratios))
    whole = [int(ratio * denominator) for ratio in ratios]
    common = gcd(*whole)
    return [number // common for number in whole]


def _tree(weights: Sequence[int]) -> tuple:
    """Build a Huffman tree of leaves (weight, source) and nodes (weight, left, right)."""
    heap: list[tuple[int, int, tuple]] = [
        (weight, i, (weight, i)) for i, weight in enumerate(weights) if weight
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        a, b = heapq.heappop(heap), heapq.heappop(heap)
        weight = a[0] + b[0]
        heapq.heappush(heap, (weight, min(a[1], b[1]), (weight, a[2], b[2])))
    return heap[0][2]


HELDOUT_SEED = "heldout_seed"
DRAWN_AT_ONCE = 1024


def move_heldout_last(store: TokenStore, tokens: int) -> TokenStore:
    """Return a view of the dataset with at least `tokens` of randomly chosen documents at its end.

    Datasets made by `data prepare` are shuffled, so their tail is a fair sample and they are returned as they
    are. Imported files keep their order, and their manifest holds a seed: the documents are a pure function
    of it. Datasets imported by earlier versions have no seed and keep their tail.
    """
    seed = store.about.get(HELDOUT_SEED)
    if seed is None or not 0 < tokens < store.tokens:
        return store
    return _HeldoutLast(store, _draw(store, tokens, int(seed)), tokens)


def _draw(store: TokenStore, tokens: int, seed: int) -> np.ndarray:
    """Choose documents; return their (start, length) in order of position."""
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


class _HeldoutLast(TokenStore):
    """A view in which the documents `last` come after all others. Every read uses `shard_ranges`."""

    def __init__(self, store: TokenStore, last: np.ndarray, tokens: int) -> None:
        self.__dict__.update(store.__dict__)
        self._store = store  # keeps its files open
        self.heldout_tokens = tokens
        starts, lengths = last.T
        rest = np.append(0, starts + lengths)
        kept = np.append(starts, store.tokens) - rest
        begins = np.concatenate((rest[kept > 0], starts))
        self._begins = begins
        self._stops = np.cumsum(np.concatenate((kept[kept > 0], lengths)))
        self.fingerprint = sha256_of(store.fingerprint.encode() + last.astype("<i8").tobytes())

    @cached_property
    def _by_begin(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self._begins)
        return order, self._begins[order]

    def _part_at(self, position: int) -> int:
        order, begins = self._by_begin
        return int(order[begins.searchsorted(position, side="right") - 1])

    def place_of(self, position: int) -> int:
        part = self._part_at(position)
        return int(self._stops[part - 1] if part else 0) + position - int(self._begins[part])

    def shard_ranges(self, start: int, n: int) -> list[tuple[int, int, int]]:
        ranges = []
        part = int(self._stops.searchsorted(start, side="right"))
        while n > 0:
            before = int(self._stops[part - 1]) if part else 0
            count = min(n, int(self._stops[part]) - start)
            ranges += super().shard_ranges(int(self._begins[part]) + start - before, count)
            start, n, part = start + count, n - count, part + 1
        return ranges

    def document_edges(self, shard: int, first: int, end: int) -> np.ndarray:
        """Return the edges of documents that are neighbours in this view too."""
        edges = super().document_edges(shard, first, end)
        part = self._part_at(int(edges[0]))
        before = self._stops[part - 1] if part else 0
        return edges - self._begins[part] + before


def split_heldout(store: TokenStore, tokens: int) -> tuple[range, range]:
    """Split a dataset between two documents into the training range and at least `tokens` held-out tokens."""
    if tokens < 0:
        raise ValueError(f"{tokens} held-out tokens")
    total = store.tokens
    cut = store.document_start_before(total - tokens) if 0 < tokens <= total else total - tokens
    if 2 * cut < total:
        raise UserError(
            f"holding out {tokens} tokens of {store.directory}, cut between documents, "
            f"leaves {max(cut, 0)} of {total} for training",
            "hold out less than half of the dataset, or prepare more text",
        )
    return range(cut), range(cut, total)
