"""Which sample of which source is sample g of a run: a pure function of (seed, sources, weights, packing).

`pack.py` cuts each source into the samples of one epoch. Sources are mixed in blocks of 8,192 samples
that hold a fixed quota of each. Weights are shares of tokens: where samples differ in length, a source's
quota is its weight divided by the mean tokens of its samples, so that its share of tokens is right over its
epochs. A source is drawn in its own order, so that it finishes one epoch before it begins the next. A later
phase with other sources or weights begins at its first sample with a fresh block; the past stays as it was,
and a source that goes on continues where it stood. A change that moves a sample needs a new ORDER_VERSION.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import floor
from typing import Any, NamedTuple

import numpy as np

from arriero.data.order.mixture import BLOCK, quotas
from arriero.data.order.pack import CONCAT, Packing, PlannedRows, Source, Windows
from arriero.data.order.permutation import block_keys, key_of, permute
from arriero.data.store.store import TokenStore
from arriero.errors import UserError

ORDER_VERSION = 1


class Located(NamedTuple):
    """Per sample: which source, its epoch of that source, and which sample of that epoch."""

    source: np.ndarray
    epoch: np.ndarray
    index: np.ndarray


class Change(NamedTuple):
    """From `first_sample` on the mixture is this one."""

    first_sample: int
    sources: Sequence[Source]


@dataclass(frozen=True)
class _Phase:
    first_sample: int
    quotas: tuple[int, ...]
    key: int
    drawn_before: np.ndarray

    @property
    def only(self) -> int | None:
        """The source, where there is but one."""
        return self.quotas.index(BLOCK) if BLOCK in self.quotas else None


class _Cut:
    """Sources, checked and cut into samples."""

    def __init__(self, sources: Sequence[Source], seq_len: int, packing: Packing) -> None:
        if seq_len < 1:
            raise UserError(f"the sequence length is {seq_len}", "give at least 1 token")
        if not sources:
            raise UserError("there is no data source", "name at least one prepared dataset")
        self.sources = tuple(sources)
        self.seq_len = seq_len
        self.packing = packing
        for source in self.sources:
            _check(source, self.sources[0])
        _check_overlap(self.sources)
        self.cuts: tuple[Windows | PlannedRows, ...] = tuple(packing.cut(s, seq_len) for s in self.sources)
        self.counts = tuple(cut.count for cut in self.cuts)
        self.samples_per_epoch = sum(self.counts)

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.identity)

    @property
    def identity(self) -> dict[str, Any]:
        raise NotImplementedError


class Stream(_Cut):
    """The endless, shuffled order of training samples."""

    samples: int | None = None

    def __init__(
        self,
        sources: Sequence[Source],
        seq_len: int,
        seed: int,
        packing: Packing = CONCAT,
        changes: Sequence[Change] = (),
    ) -> None:
        mixtures = [Change(0, sources), *changes]
        if any(b.first_sample <= a.first_sample for a, b in pairwise(mixtures)):
            raise UserError("the phases of the mixture are out of order", "let each begin after another")
        known = {key_of(source.identity): source for change in mixtures for source in change.sources}
        super().__init__(tuple(known.values()), seq_len, packing)
        self.seed = seed
        self._keys = [key_of(seed, source.identity) for source in self.sources]
        self._block = lru_cache(maxsize=8)(self._lay_out_block)
        self.phases: list[_Phase] = []
        for change in mixtures:
            self._add_phase(change, {key: i for i, key in enumerate(known)})
        self._first_samples = np.array([phase.first_sample for phase in self.phases])
        self._limits = [
            None if s.max_epochs is None else floor(Fraction(s.max_epochs) * n)
            for s, n in zip(self.sources, self.counts, strict=True)
        ]

    @property
    def quotas(self) -> tuple[int, ...]:
        """Of the first phase."""
        return self.phases[0].quotas

    @property
    def identity(self) -> dict[str, Any]:
        return self.identity_until(None)

    def identity_until(self, sample: int | None) -> dict[str, Any]:
        """What decides the samples before `sample`: phases and sources that come later do not."""
        phases = [p for p in self.phases if sample is None or p.first_sample < max(sample, 1)]
        used = 1 + max(i for phase in phases for i, quota in enumerate(phase.quotas) if quota)
        identity = {
            "order": ORDER_VERSION,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "quotas": list(phases[0].quotas[:used]),
            "sources": [source.identity for source in self.sources[:used]],
            **self.packing.identity,
        }
        if len(phases) > 1:
            identity["later"] = [[p.first_sample, list(p.quotas[:used])] for p in phases[1:]]
        return identity

    def locate(self, samples: np.ndarray) -> Located:
        samples = _indices(samples)
        source, local = self._draw(samples)
        epoch, index = np.empty_like(local), np.empty_like(local)
        for i, (key, n) in enumerate(zip(self._keys, self.counts, strict=True)):
            mine = source == i
            if not mine.any():
                continue
            self._refuse_beyond_cap(i, local[mine])
            epoch[mine], place = np.divmod(local[mine], n)
            index[mine] = permute(place, n, block_keys(key, epoch[mine]))
        return Located(source, epoch, index)

    def drawn(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples come from each source."""
        phase = self.phases[int(np.searchsorted(self._first_samples, samples, side="right")) - 1]
        return phase.drawn_before + self._drawn_in(phase, samples - phase.first_sample)

    def sample_of_draw(self, source: int, draw: int, end: int) -> int | None:
        """The sample that is the source's draw number `draw` (from 0), if it comes before `end`."""
        if self.drawn(end)[source] <= draw:
            return None
        return bisect_left(range(end + 1), draw + 1, key=lambda g: int(self.drawn(g)[source])) - 1

    def first_beyond_cap(self, end: int) -> tuple[int, int] | None:
        """(sample, source) of the first sample before `end` that a source's cap on repetition forbids."""
        capped = [(i, limit) for i, limit in enumerate(self._limits) if limit is not None]
        found = [(self.sample_of_draw(i, limit, end), i) for i, limit in capped]
        return min(((g, i) for g, i in found if g is not None), default=None)

    def _refuse_beyond_cap(self, source: int, local: np.ndarray) -> None:
        limit = self._limits[source]
        if limit is not None and local.max() >= limit:
            raise UserError(
                f"{self.sources[source].name} has been read {self.sources[source].max_epochs:g} times, "
                "its max_epochs",
                "raise its max_epochs, lower its weight, or end the run earlier",
            )

    def _add_phase(self, change: Change, number_of: dict[int, int]) -> None:
        if not change.sources:
            raise UserError("there is no data source", "name at least one prepared dataset")
        numbers = [number_of[key_of(source.identity)] for source in change.sources]
        if len(set(numbers)) < len(numbers):
            twice = next(s for s, n in zip(change.sources, numbers, strict=True) if numbers.count(n) > 1)
            raise _same_tokens(twice.name, twice.name)
        means = [Fraction(self.cuts[i].tokens, self.cuts[i].count) for i in numbers]
        weights = [source.weight for source in change.sources]
        shares = quotas(weights, means, [source.name for source in change.sources])
        whole = [0] * len(self.sources)
        for number, quota in zip(numbers, shares, strict=True):
            whole[number] = quota
        named = ("mixture",) if change.first_sample == 0 else ("mixture", change.first_sample)
        before = np.zeros(len(self.sources), dtype=np.int64)
        if self.phases:
            last = self.phases[-1]
            before = last.drawn_before + self._drawn_in(last, change.first_sample - last.first_sample)
        self.phases.append(_Phase(change.first_sample, tuple(whole), key_of(self.seed, *named), before))

    def _drawn_in(self, phase: _Phase, samples: int) -> np.ndarray:
        block, rest = divmod(samples, BLOCK)
        drawn = block * np.array(phase.quotas, dtype=np.int64)
        if phase.only is not None:
            drawn[phase.only] += rest
        elif rest:
            layout, _ = self._block(phase.quotas, phase.key, block)
            drawn += np.bincount(layout[:rest], minlength=len(drawn))
        return drawn

    def _draw(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        number = np.searchsorted(self._first_samples, samples, side="right") - 1
        source, local = np.empty_like(samples), np.empty_like(samples)
        for p in np.unique(number):
            here = number == p
            source[here], local[here] = self._draw_in(self.phases[p], samples[here])
        return source, local

    def _draw_in(self, phase: _Phase, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        samples = samples - phase.first_sample
        if phase.only is not None:
            return np.full_like(samples, phase.only), samples + phase.drawn_before[phase.only]
        block, offset = np.divmod(samples, BLOCK)
        source, local = np.empty_like(samples), np.empty_like(samples)
        for b in np.unique(block):
            here = block == b
            drawn, rank = self._block(phase.quotas, phase.key, int(b))
            source[here] = drawn[offset[here]]
            local[here] = rank[offset[here]]
        return source, local + block * np.array(phase.quotas)[source] + phase.drawn_before[source]

    def _lay_out_block(self, shares: tuple[int, ...], key: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Per offset in the block: the source drawn, and how many of that source the block drew before."""
        ticket = permute(np.arange(BLOCK), BLOCK, block_keys(key, np.array([block])))
        drawn = np.searchsorted(np.cumsum(shares), ticket, side="right")
        rank = np.empty(BLOCK, dtype=np.int64)
        for i, quota in enumerate(shares):
            rank[drawn == i] = np.arange(quota)
        return drawn, rank


class EvalStream(_Cut):
    """Every sample of the sources once, in plain order."""

    def __init__(self, sources: Sequence[Source], seq_len: int, packing: Packing = CONCAT) -> None:
        super().__init__(sources, seq_len, packing)
        self.samples: int = self.samples_per_epoch

    @property
    def identity(self) -> dict[str, Any]:
        sources = [source.identity for source in self.sources]
        plain = {"order": ORDER_VERSION, "plain": True, "seq_len": self.seq_len, "sources": sources}
        return {**plain, **self.packing.identity}

    def identity_until(self, sample: int | None) -> dict[str, Any]:
        return self.identity

    def locate(self, samples: np.ndarray) -> Located:
        samples = _indices(samples)
        ends = np.cumsum(self.counts)
        source = np.searchsorted(ends, samples, side="right")
        return Located(source, np.zeros_like(samples), samples - (ends - self.counts)[source])


def fingerprint_of(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


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
    spans = sorted((s.store.fingerprint, s.tokens.start, s.tokens.stop, s.name) for s in sources)
    for a, b in pairwise(spans):
        if a[0] == b[0] and b[1] < a[2]:
            raise _same_tokens(a[3], b[3])


def _same_tokens(one: str, other: str) -> UserError:
    return UserError(
        f"{one} and {other} hold the same tokens, and both are data sources",
        "name each dataset once, with the sum of the weights",
    )


def _check(source: Source, first: Source) -> None:
    span = source.tokens
    if span.step != 1 or span.start < 0 or span.stop > source.store.tokens:
        raise ValueError(f"{span} is not a range of the {source.store.tokens} tokens of {source.name}")
    if source.store.tokenizer_sha256 != first.store.tokenizer_sha256:
        raise UserError(
            f"{source.name} and {first.name} were prepared with different tokenizers",
            "prepare both with the same tokenizer",
        )
