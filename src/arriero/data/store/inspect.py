"""What is in a prepared dataset, without reading all of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from arriero.data.store.shards import read_index
from arriero.data.store.store import TokenStore
from arriero.data.tokens.tokenizer import Tokenizer
from arriero.errors import UserError

SAMPLED_SHARDS = 24
SAMPLED_DOCUMENTS = 1_000_000


class Bucket(NamedTuple):
    """Documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """`shards` and `documents` are how much was looked at; the dataset may hold more."""

    shards: int
    documents: int
    empty: int
    shortest: int
    median: int
    longest: int
    buckets: list[Bucket]


def measure_lengths(store: TokenStore) -> Lengths:
    """From the indexes of evenly spaced shards, and of those from an evenly spaced part of the documents."""
    shards = _evenly(np.flatnonzero(_documents_by_shard(store)), SAMPLED_SHARDS)
    found = [np.empty(0, dtype=np.int32)]
    for shard in shards.tolist():
        lengths = read_index(store.shard_path(shard, ".idx")).lengths
        step = max(1, -(-len(lengths) * len(shards) // SAMPLED_DOCUMENTS))
        found.append(np.asarray(lengths[::step]))
    lengths = np.concatenate(found)
    return Lengths(
        shards=len(shards),
        documents=len(lengths),
        empty=int((lengths == 0).sum()),
        shortest=int(lengths.min(initial=2**31 - 1)) if len(lengths) else 0,
        median=int(np.median(lengths)) if len(lengths) else 0,
        longest=int(lengths.max(initial=0)),
        buckets=list(_buckets(lengths)),
    )


def _evenly(items: np.ndarray, most: int) -> np.ndarray:
    if len(items) <= most:
        return items
    return items[np.linspace(0, len(items) - 1, most).astype(np.int64)]


def _buckets(lengths: np.ndarray) -> Iterator[Bucket]:
    """Powers of two: 1, 2-3, 4-7, ... from the shortest to the longest; empty documents first, if any."""
    if empty := int((lengths == 0).sum()):
        yield Bucket(0, 0, empty, 0)
    lengths = lengths[lengths > 0].astype(np.int64)
    if not len(lengths):
        return
    power = np.frexp(lengths)[1] - 1
    documents = np.bincount(power)
    tokens = np.bincount(power, weights=lengths)
    for k in range(int(power.min()), len(documents)):
        yield Bucket(2**k, 2 ** (k + 1) - 1, int(documents[k]), int(tokens[k]))


class Sample(NamedTuple):
    number: int
    shard: str
    tokens: int
    text: str


def choose_documents(store: TokenStore, count: int, seed: int) -> list[int]:
    """Different documents, the same for the same seed."""
    generator = np.random.default_rng(seed)
    if store.documents <= 4 * count:
        return sorted(generator.permutation(store.documents)[:count].tolist())
    chosen: set[int] = set()
    while len(chosen) < count:
        chosen.add(int(generator.integers(store.documents)))
    return sorted(chosen)


def read_document(store: TokenStore, tokenizer: Tokenizer, number: int, most_tokens: int | None) -> Sample:
    """Document `number` counted over the whole dataset, decoded up to `most_tokens`."""
    if not 0 <= number < store.documents:
        raise UserError(
            f"{store.directory} has no document {number}",
            f"choose one from 0 to {store.documents - 1}" if store.documents else "it has none at all",
        )
    ends = np.cumsum(_documents_by_shard(store))
    shard = int(np.searchsorted(ends, number, side="right"))
    inside = number - (int(ends[shard]) - store.shard_documents(shard))
    path = store.shard_path(shard, ".idx")
    index = read_index(path)
    if inside >= len(index.lengths):
        raise UserError(
            f"{path} has {len(index.lengths)} documents", f"see `arriero data verify {store.directory}`"
        )
    length = int(index.lengths[inside])
    wanted = length if most_tokens is None else min(length, most_tokens)
    tokens = store.shard_path(shard, ".bin")
    offset = int(index.pointers[inside])
    ids = np.fromfile(tokens, store.dtype, wanted, offset=offset) if tokens.is_file() else ()
    if len(ids) != wanted:
        raise UserError(
            f"{tokens} has no {wanted} tokens from byte {offset} on",
            f"see `arriero data verify {store.directory}`",
        )
    return Sample(number, path.stem, length, tokenizer.decode([int(i) for i in ids]))


def _documents_by_shard(store: TokenStore) -> np.ndarray:
    return np.fromiter((store.shard_documents(k) for k in range(store.shards)), np.int64, store.shards)
