"""Which tokens sample g of a run holds: a pure function of (seed, sources, weights, sequence length).

A source of N tokens is cut into (N - 1) // seq_len windows. Window w takes seq_len tokens from w * seq_len
on, and its labels are the same tokens one further, so neighbours share one token: the last label of one is
the first input of the next. In one epoch every token of the source is predicted exactly once, except its
first, which nothing precedes, and the `unused_tokens` at its end that do not fill a window.

Sources are mixed in blocks of 8,192 samples that hold a fixed quota of each. A source is drawn in its own
order, so that it finishes one epoch before it begins the next. A change that moves a sample needs a new
ORDER_VERSION.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from arriero.data.permutation import block_keys, key_of, permute
from arriero.data.store import TokenStore
from arriero.errors import UserError

ORDER_VERSION = 1
BLOCK = 8192


@dataclass(frozen=True)
class Source:
    """Tokens [span.start, span.stop) of a prepared dataset; the whole of it unless a span is given."""

    store: TokenStore
    span: range | None = None
    weight: float = 1.0

    @property
    def tokens(self) -> range:
        return range(self.store.tokens) if self.span is None else self.span

    @property
    def identity(self) -> dict[str, Any]:
        return {"dataset": self.store.fingerprint, "start": self.tokens.start, "stop": self.tokens.stop}


class Located(NamedTuple):
    """Per sample: which source, its epoch of that source, and the dataset position of its first token."""

    source: np.ndarray
    epoch: np.ndarray
    start: np.ndarray


class _Windows:
    def __init__(self, sources: Sequence[Source], seq_len: int) -> None:
        if seq_len < 1:
            raise UserError(f"the sequence length is {seq_len}", "give at least 1 token")
        if not sources:
            raise UserError("there is no data source", "name at least one prepared dataset")
        self.sources = tuple(sources)
        self.seq_len = seq_len
        for source in self.sources:
            _check(source, self.sources[0], seq_len)
        _check_overlap(self.sources)
        self.windows = tuple((len(source.tokens) - 1) // seq_len for source in self.sources)
        self.unused_tokens = tuple(
            len(source.tokens) - 1 - n * seq_len for source, n in zip(self.sources, self.windows, strict=True)
        )
        self.samples_per_epoch = sum(self.windows)

    @property
    def identity(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()


class Stream(_Windows):
    """The endless, shuffled order of training samples."""

    samples: int | None = None

    def __init__(self, sources: Sequence[Source], seq_len: int, seed: int) -> None:
        super().__init__(sources, seq_len)
        self.seed = seed
        self.quotas = quotas([source.weight for source in self.sources])
        self._keys = [key_of(seed, source.identity) for source in self.sources]
        self._mixture_key = key_of(seed, "mixture")
        self._block = lru_cache(maxsize=8)(self._lay_out_block)

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "order": ORDER_VERSION,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "quotas": list(self.quotas),
            "sources": [source.identity for source in self.sources],
        }

    def locate(self, samples: np.ndarray) -> Located:
        samples = _indices(samples)
        source, local = self._draw(samples)
        epoch, start = np.empty_like(local), np.empty_like(local)
        for i, (key, n) in enumerate(zip(self._keys, self.windows, strict=True)):
            mine = source == i
            epoch[mine], index = np.divmod(local[mine], n)
            window = permute(index, n, block_keys(key, epoch[mine]))
            start[mine] = self.sources[i].tokens.start + window * self.seq_len
        return Located(source, epoch, start)

    def _draw(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if len(self.sources) == 1:
            return np.zeros_like(samples), samples
        block, offset = np.divmod(samples, BLOCK)
        source, local = np.empty_like(samples), np.empty_like(samples)
        for b in np.unique(block):
            here = block == b
            drawn, rank = self._block(int(b))
            source[here] = drawn[offset[here]]
            local[here] = rank[offset[here]]
        return source, local + block * np.array(self.quotas)[source]

    def _lay_out_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Per offset in the block: the source drawn, and how many of that source the block drew before."""
        key = block_keys(self._mixture_key, np.array([block]))
        ticket = permute(np.arange(BLOCK), BLOCK, key)
        drawn = np.searchsorted(np.cumsum(self.quotas), ticket, side="right")
        rank = np.empty(BLOCK, dtype=np.int64)
        for i, quota in enumerate(self.quotas):
            rank[drawn == i] = np.arange(quota)
        return drawn, rank


class EvalStream(_Windows):
    """Every window of the sources once, in plain order."""

    def __init__(self, sources: Sequence[Source], seq_len: int) -> None:
        super().__init__(sources, seq_len)
        self.samples: int = self.samples_per_epoch

    @property
    def identity(self) -> dict[str, Any]:
        sources = [source.identity for source in self.sources]
        return {"order": ORDER_VERSION, "plain": True, "seq_len": self.seq_len, "sources": sources}

    def locate(self, samples: np.ndarray) -> Located:
        samples = _indices(samples)
        ends = np.cumsum(self.windows)
        source = np.searchsorted(ends, samples, side="right")
        window = samples - (ends - self.windows)[source]
        first = np.array([each.tokens.start for each in self.sources])
        return Located(source, np.zeros_like(samples), first[source] + window * self.seq_len)


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each source in a block, by largest remainder; exact, ties to the earlier source."""
    for i, weight in enumerate(weights):
        if not (isfinite(weight) and weight > 0):
            raise UserError(
                f"source {i} has weight {weight}", "give every source a weight above 0, or remove it"
            )
    exact = [Fraction(weight) for weight in weights]
    shares = [BLOCK * weight / sum(exact) for weight in exact]
    result = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: result[i] - shares[i])
    for i in by_remainder[: BLOCK - sum(result)]:
        result[i] += 1
    for i, quota in enumerate(result):
        if quota == 0:
            raise UserError(
                f"source {i} has weight {weights[i]}, less than 1 sample in {BLOCK}",
                "raise its weight, or merge it with another source when preparing",
            )
    return tuple(result)


def split_heldout(store: TokenStore, tokens: int) -> tuple[range, range]:
    """Cut off at least `tokens` from the end, between two documents: (training range, held-out range)."""
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


def _indices(samples: np.ndarray) -> np.ndarray:
    samples = np.asarray(samples, dtype=np.int64)
    if samples.size and samples.min() < 0:
        raise IndexError(f"sample {samples.min()}")
    return samples


def _check_overlap(sources: Sequence[Source]) -> None:
    spans = sorted((s.store.fingerprint, s.tokens.start, s.tokens.stop, s.store.directory) for s in sources)
    for a, b in pairwise(spans):
        if a[0] == b[0] and b[1] < a[2]:
            raise UserError(
                f"{a[3]} and {b[3]} hold the same tokens, and both are data sources",
                "name each dataset once, with the sum of the weights",
            )


def _check(source: Source, first: Source, seq_len: int) -> None:
    where, span = source.store.directory, source.tokens
    if span.step != 1 or span.start < 0 or span.stop > source.store.tokens:
        raise ValueError(f"{span} is not a range of the {source.store.tokens} tokens of {where}")
    if len(span) < seq_len + 1:
        raise UserError(
            f"{where} gives {len(span)} tokens, one sequence of {seq_len} needs {seq_len + 1}",
            "use a shorter sequence, a smaller held-out part or more text",
        )
    if source.store.tokenizer_sha256 != first.store.tokenizer_sha256:
        raise UserError(
            f"{where} and {first.store.directory} were prepared with different tokenizers",
            "prepare both with the same tokenizer",
        )
