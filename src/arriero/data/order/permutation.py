"""A keyed shuffle of [0, n) without a table: a Feistel network on a grid just above n, and cycle walking."""

import hashlib
import json
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np

ROUNDS = 8


def key_of(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()[:8], "little")


def block_keys(key: int, numbers: np.ndarray) -> np.ndarray:
    """One key per number (an epoch, a block), all derived from `key`."""
    return _mix(_mix(numbers.astype(np.uint64)) ^ np.uint64(key))


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Where the permutation of [0, n) sends each index. `keys` has one key, or one per index."""
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
    """The splitmix64 step: every output bit depends on every input bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Shuffle:
    """An order of [0, n), keyed: chunks of neighbours in random order, and in groups of so many chunks every
    index in random order. Where one group holds all, this is one permutation.

    Whole chunks stay unread until their group comes, so that a reader can change to longer samples, and only
    the files of one group are read at a time.
    """

    n: int
    chunk: int
    group: int

    @property
    def _groups(self) -> int:
        return max(1, self.n // self.chunk // self.group)

    def at(self, place: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """The index at each place of the order. `keys` has one key, or one per place."""
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
        """Intervals (first, end) of the indices at `place` and later, ascending."""
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
        return joined(np.concatenate(found))


def joined(intervals: np.ndarray) -> np.ndarray:
    """Disjoint intervals in ascending order, neighbours joined and empty ones left out."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    intervals = intervals[np.argsort(intervals[:, 0])]
    if not len(intervals):
        return intervals
    apart = intervals[1:, 0] != intervals[:-1, 1]
    firsts = intervals[np.concatenate(([True], apart)), 0]
    return np.stack((firsts, intervals[np.concatenate((apart, [True])), 1]), axis=1)
