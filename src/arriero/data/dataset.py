"""A prepared dataset as a Python object: its documents, and batches in the order of training."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from arriero.data.store.shards import read_index
from arriero.data.store.store import TokenStore
from arriero.data.tokens.tokenizer import Tokenizer, tokenizer_of
from arriero.errors import UserError

if TYPE_CHECKING:
    from arriero.data.order.loader import Loader

SAMPLED_SHARDS = 24
SAMPLED_DOCUMENTS = 1_000_000


class Document(NamedTuple):
    """One decoded document; `tokens` is its length, also where only its beginning was decoded."""

    number: int
    shard: str
    tokens: int
    text: str


class Dataset:
    """A sequence of documents, each an array of token ids.

    `dataset[7]` is the eighth document, `dataset.text(7)` its text, `len(dataset)` the number of documents.
    """

    def __init__(self, directory: str | Path) -> None:
        self.store = TokenStore.open(Path(directory))

    def __repr__(self) -> str:
        return f"Dataset({str(self.store.directory)!r}: {len(self):,} documents, {self.tokens:,} tokens)"

    @property
    def tokens(self) -> int:
        return self.store.tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.store)

    def __len__(self) -> int:
        return self.store.documents

    def __getitem__(self, number: int) -> np.ndarray:
        if not -len(self) <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        return self._read(number % len(self))

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self._read(number) for number in range(len(self)))

    def text(self, number: int) -> str:
        return self.tokenizer.decode(self[number].tolist())

    def document(self, number: int, max_tokens: int | None = None) -> Document:
        """Decode a document up to `max_tokens`; raise UserError if the number is out of range."""
        if not 0 <= number < len(self):
            raise UserError(
                f"{self.store.directory} has no document {number}",
                f"choose one from 0 to {len(self) - 1}" if len(self) else "the dataset is empty",
            )
        shard, _, length = self.store.locate_document(number)
        text = self.tokenizer.decode(self._read(number, max_tokens).tolist())
        return Document(number, self.store.shard_path(shard).name, length, text)

    def batches(
        self,
        batch: int,
        seq_len: int,
        world_size: int = 1,
        rank: int = 0,
        seed: int = 1,
        start: int = 0,
        *,
        packing: str = "concat",
        document_mask: bool = False,
        heldout_tokens: int = 0,
        cache: Path = Path("data"),
    ) -> "Loader":
        """Iterate without end over the batches that rank `rank` of `world_size` trains on.

        `batch` is the global batch size in sequences and `start` the number of the first sample, so a run
        with this dataset as its only source reads sample `step * batch` at the beginning of a step.
        `heldout_tokens` are left out as a run with `eval.heldout` does. The loader is a context manager;
        `cache` keeps the packing plan of 'bestfit' and 'none'.
        """
        from arriero.data.order.loader import Loader
        from arriero.data.order.order import Stream
        from arriero.data.order.packing import Packing, TokenSource
        from arriero.data.order.shuffle import move_heldout_last, split_heldout

        store = move_heldout_last(self.store, heldout_tokens)
        source = TokenSource(store, split_heldout(store, heldout_tokens)[0])
        stream = Stream([source], seq_len, seed, Packing(packing, cache=cache))
        return Loader(stream, batch, start, rank, world_size, documents=document_mask)

    def _read(self, number: int, max_tokens: int | None = None) -> np.ndarray:
        """Read a document directly, so that a damaged shard can still be inspected up to the damage."""
        shard, first, length = self.store.locate_document(number)
        wanted = length if max_tokens is None else min(length, max_tokens)
        path, offset = self.store.shard_path(shard, ".bin"), first * self.store.dtype.itemsize
        is_possible = path.is_file() and min(wanted, offset) >= 0
        ids = np.fromfile(path, self.store.dtype, wanted, offset=offset) if is_possible else ()
        if len(ids) != wanted:
            raise UserError(
                f"{path} has no {wanted} tokens from byte {offset} on",
                f"see `arriero data verify {self.store.directory}`",
            )
        return np.asarray(ids)


class Bucket(NamedTuple):
    """Documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """Statistics of document lengths over `documents` sampled documents of `shards` sampled shards."""

    shards: int
    documents: int
    empty: int
    shortest: int
    median: int
    longest: int
    buckets: list[Bucket]


def measure_lengths(store: TokenStore) -> Lengths:
    """Measure document lengths from the indexes of evenly spaced shards and documents."""
    shards = np.flatnonzero([store.shard_documents(shard) for shard in range(store.shards)])
    if len(shards) > SAMPLED_SHARDS:
        shards = shards[np.linspace(0, len(shards) - 1, SAMPLED_SHARDS).astype(np.int64)]
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
        shortest=int(lengths.min()) if len(lengths) else 0,
        median=int(np.median(lengths)) if len(lengths) else 0,
        longest=int(lengths.max(initial=0)),
        buckets=list(_buckets(lengths)),
    )


def _buckets(lengths: np.ndarray) -> Iterator[Bucket]:
    """Count documents by powers of two: 0, 1, 2-3, 4-7, ..."""
    if empty := int((lengths == 0).sum()):
        yield Bucket(0, 0, empty, 0)
    lengths = lengths[lengths > 0].astype(np.int64)
    if len(lengths):
        power = np.frexp(lengths)[1] - 1
        documents, tokens = np.bincount(power), np.bincount(power, weights=lengths)
        for k in range(int(power.min()), len(documents)):
            yield Bucket(2**k, 2 ** (k + 1) - 1, int(documents[k]), int(tokens[k]))


def choose_documents(store: TokenStore, count: int, seed: int) -> list[int]:
    """Choose different document numbers, the same ones for the same seed."""
    generator = np.random.default_rng(seed)
    if store.documents <= 4 * count:
        return sorted(generator.permutation(store.documents)[:count].tolist())
    chosen: set[int] = set()
    while len(chosen) < count:
        chosen.add(int(generator.integers(store.documents)))
    return sorted(chosen)
