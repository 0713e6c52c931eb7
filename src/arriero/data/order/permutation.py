"""A keyed shuffle of [0, n) without a table: a Feistel network on a grid just above n, and cycle walking."""

import hashlib
import json
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
