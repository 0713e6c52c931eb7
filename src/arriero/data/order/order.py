"""The order of a run's samples: a pure function of (seed, sources, weights, packing).

`packing.py` cuts each source into the samples of one epoch and orders them: a source finishes one epoch
before it begins the next. Sources are mixed in blocks of 8,192 samples (`shuffle.py`). Weights are shares of
tokens: where samples differ in length, a source's share of samples is its weight divided by the mean tokens
of its samples. A phase with other sources or weights begins a new block at its first sample; earlier samples
do not change, and a source that is used again continues where it stopped. A change that moves a sample needs
a new ORDER_VERSION; a run keeps the version it began with.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from arriero.data.order.packing import CONCAT, Packing, PlannedRows, SourceOrder, TokenSource, Windows
from arriero.data.order.shuffle import BLOCK, FixedQuotas, Shares, bad_weight, block_keys, key_of, permute
from arriero.errors import UserError
from arriero.files import sha256_of_json

ORDER_VERSION = 2
_MIXTURES = {1: FixedQuotas, 2: Shares}


class Located(NamedTuple):
    """Per sample: the source, the epoch of that source, and the number of the sample in the epoch."""

    source: np.ndarray
    epoch: np.ndarray
    index: np.ndarray


class Change(NamedTuple):
    """A new mixture, sequence length or both from `first_sample` on; None keeps the old value."""

    first_sample: int
    sources: Sequence[TokenSource] | None = None
    seq_len: int | None = None


@dataclass(frozen=True, eq=False)
class _Phase:
    """One mixture."""

    first_sample: int
    shares: Shares | FixedQuotas
    key: int
    drawn_before: np.ndarray


class _SampleSource:
    """Checked sources that are cut into samples; the base of both streams."""

    def __init__(self, sources: Sequence[TokenSource], seq_len: int, packing: Packing) -> None:
        if seq_len < 1:
            raise UserError(f"the sequence length is {seq_len}", "give at least 1 token")
        if not sources:
            raise UserError("there is no data source", "name at least one prepared dataset")
        self.sources = tuple(sources)
        self.seq_len = self.longest_sequence = seq_len
        self.packing = packing
        for source in self.sources:
            _check(source, self.sources[0])
        _check_overlap(self.sources)
        packing.check_planning_size(self.sources, seq_len)

    def _set_cuts(self, cuts: Sequence[Windows | PlannedRows]) -> None:
        self.cuts = tuple(cuts)
        self.counts = tuple(cut.count for cut in cuts)
        self.samples_per_epoch = sum(self.counts)

    def seq_len_at(self, sample: int) -> int:
        return self.seq_len

    def cut_of(self, sample: int, source: int, epoch: int) -> Windows | PlannedRows:
        """Return the samples that the index of a located sample counts."""
        return self.cuts[source]

    @property
    def fingerprint(self) -> str:
        return sha256_of_json(self.identity)

    @property
    def identity(self) -> dict[str, Any]:
        raise NotImplementedError


class Stream(_SampleSource):
    """The endless, shuffled order of training samples. `cuts` are epochs of the first sequence length."""

    samples: int | None = None

    def __init__(
        self,
        sources: Sequence[TokenSource],
        seq_len: int,
        seed: int,
        packing: Packing = CONCAT,
        changes: Sequence[Change] = (),
        version: int = ORDER_VERSION,
    ) -> None:
        if version not in _MIXTURES:
            raise UserError(
                f"the run was ordered by version {version}, this Arriero knows those up to {ORDER_VERSION}",
                "use the Arriero that began it",
            )
        if any(b.first_sample <= a.first_sample for a, b in pairwise([Change(0), *changes])):
            raise UserError("the phases of the mixture are out of order", "let each begin after another")
        mixtures = [(0, sources), *((c.first_sample, c.sources) for c in changes if c.sources is not None)]
        known = {key_of(source.identity): source for _, named in mixtures for source in named}
        super().__init__(tuple(known.values()), seq_len, packing)
        self.seed, self.version = seed, version
        self.source_orders = [SourceOrder(s, seq_len, seed, packing, version > 1) for s in self.sources]
        self._set_cuts([order.whole for order in self.source_orders])
        self._block = lru_cache(maxsize=8)(self._lay_out_block)
        self.phases: list[_Phase] = []
        for first_sample, named in mixtures:
            self._add_phase(first_sample, named, {key: i for i, key in enumerate(known)})
        self._first_samples = np.array([phase.first_sample for phase in self.phases])
        self.lengths = [(c.first_sample, c.seq_len) for c in changes if c.seq_len is not None]
        for first_sample, length in self.lengths:
            for order, draws in zip(self.source_orders, self.drawn(first_sample).tolist(), strict=True):
                order.change_length(draws, length)
        self.longest_sequence = max(seq_len, *(length for _, length in self.lengths), 0)
        self._limits = [
            None if s.max_epochs is None else order.draws_within(s.max_epochs)
            for s, order in zip(self.sources, self.source_orders, strict=True)
        ]

    @property
    def identity(self) -> dict[str, Any]:
        return self.identity_until(None)

    def identity_until(self, sample: int | None) -> dict[str, Any]:
        """Return what decides the samples before `sample`, without later phases and their sources."""
        recorded = [[phase.first_sample, list(phase.shares.recorded)] for phase in self.phases]
        shares = "weights" if self.version > 1 else "quotas"
        identity = {
            "order": self.version,
            "seed": self.seed,
            "seq_len": self.seq_len,
            shares: recorded[0][1],
            "sources": [source.identity for source in self.sources],
            **self.packing.identity,
            "later": recorded[1:],
            "lengths": [list(change) for change in self.lengths],
        }
        return trimmed(identity, sample)

    def seq_len_at(self, sample: int) -> int:
        changes = self._lengths_until(sample)
        return self.lengths[changes - 1][1] if changes else self.seq_len

    def cut_of(self, sample: int, source: int, epoch: int) -> Windows | PlannedRows:
        return self.source_orders[source].cut(self._lengths_until(sample), epoch)

    def _lengths_until(self, sample: int) -> int:
        return sum(first <= sample for first, _ in self.lengths)

    def locate(self, samples: np.ndarray) -> Located:
        samples = _indices(samples)
        source, local = self._draw(samples)
        epoch, index = np.empty_like(local), np.empty_like(local)
        for i in np.unique(source):
            mine = source == i
            self._check_cap(i, local[mine])
            epoch[mine], index[mine] = self.source_orders[i].locate(local[mine])
        return Located(source, epoch, index)

    def drawn(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` samples come from each source."""
        phase = self.phases[int(np.searchsorted(self._first_samples, samples, side="right")) - 1]
        return phase.drawn_before + self._drawn_in(phase, samples - phase.first_sample)

    def sample_of_draw(self, source: int, draw: int, end: int) -> int | None:
        """Return the sample that is draw number `draw` of a source, or None if it is not before `end`."""
        if self.drawn(end)[source] <= draw:
            return None
        return bisect_left(range(end + 1), draw + 1, key=lambda g: int(self.drawn(g)[source])) - 1

    def first_beyond_cap(self, end: int) -> tuple[int, int] | None:
        """Return (sample, source) of the first sample before `end` that exceeds a source's max_epochs."""
        capped = [(i, limit) for i, limit in enumerate(self._limits) if limit is not None]
        found = [(self.sample_of_draw(i, limit, end), i) for i, limit in capped]
        return min(((g, i) for g, i in found if g is not None), default=None)

    def _check_cap(self, source: int, local: np.ndarray) -> None:
        limit = self._limits[source]
        if limit is not None and local.max() >= limit:
            raise UserError(
                f"{self.sources[source].name} has been read {self.sources[source].max_epochs:g} times, "
                "its max_epochs",
                "raise its max_epochs, lower its weight, or end the run earlier",
            )

    def _add_phase(
        self, first_sample: int, sources: Sequence[TokenSource], number_of: dict[int, int]
    ) -> None:
        if not sources:
            raise UserError("there is no data source", "name at least one prepared dataset")
        weights = [0.0] * len(self.sources)
        for source in sources:
            number = number_of[key_of(source.identity)]
            if weights[number]:
                raise _named_twice(source.name)
            if not source.weight > 0:
                raise bad_weight(source.name, source.weight)
            weights[number] = source.weight
        means = [Fraction(cut.tokens, cut.count) for cut in self.cuts]
        shares = _MIXTURES[self.version](weights, means, [source.name for source in self.sources])
        named = ("mixture",) if first_sample == 0 else ("mixture", first_sample)
        before = np.zeros(len(self.sources), dtype=np.int64)
        if self.phases:
            last = self.phases[-1]
            before = last.drawn_before + self._drawn_in(last, first_sample - last.first_sample)
        self.phases.append(_Phase(first_sample, shares, key_of(self.seed, *named), before))

    def _drawn_in(self, phase: _Phase, samples: int) -> np.ndarray:
        block, rest = divmod(samples, BLOCK)
        drawn = phase.shares.after(block).copy()
        if phase.shares.only is not None:
            drawn[phase.shares.only] += rest
        elif rest:
            layout, _ = self._block(phase, block)
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
        if (only := phase.shares.only) is not None:
            return np.full_like(samples, only), samples + phase.drawn_before[only]
        block, offset = np.divmod(samples, BLOCK)
        source, local = np.empty_like(samples), np.empty_like(samples)
        for b in np.unique(block):
            here = block == b
            drawn, rank = self._block(phase, int(b))
            source[here] = drawn[offset[here]]
            local[here] = rank[offset[here]] + phase.shares.after(int(b))[source[here]]
        return source, local + phase.drawn_before[source]

    def _lay_out_block(self, phase: _Phase, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return per offset in the block the source, and how often the block drew it before."""
        ticket = permute(np.arange(BLOCK), BLOCK, block_keys(phase.key, np.array([block])))
        quotas = phase.shares.after(block + 1) - phase.shares.after(block)
        drawn = np.searchsorted(np.cumsum(quotas), ticket, side="right")
        rank = np.empty(BLOCK, dtype=np.int64)
        for i in np.flatnonzero(quotas):
            rank[drawn == i] = np.arange(quotas[i])
        return drawn, rank


class EvalStream(_SampleSource):
    """Every sample of the sources once, in the order of the dataset."""

    def __init__(self, sources: Sequence[TokenSource], seq_len: int, packing: Packing = CONCAT) -> None:
        super().__init__(sources, seq_len, packing)
        self._set_cuts([packing.cut(source, seq_len) for source in self.sources])
        self.samples: int = self.samples_per_epoch

    @property
    def identity(self) -> dict[str, Any]:
        sources = [source.identity for source in self.sources]
        plain = {"order": 1, "plain": True, "seq_len": self.seq_len, "sources": sources}
        return {**plain, **self.packing.identity}

    def identity_until(self, sample: int | None) -> dict[str, Any]:
        return self.identity

    def locate(self, samples: np.ndarray) -> Located:
        samples = _indices(samples)
        ends = np.cumsum(self.counts)
        source = np.searchsorted(ends, samples, side="right")
        return Located(source, np.zeros_like(samples), samples - (ends - self.counts)[source])


def trimmed(identity: dict[str, Any], sample: int | None) -> dict[str, Any]:
    """Remove the phases that begin at `sample` or later, and their sources, from a stream's identity."""
    shares = "weights" if "weights" in identity else "quotas"
    kept = dict(identity)
    for key in ("later", "lengths"):
        changes = [c for c in kept.pop(key, []) if sample is None or c[0] < max(sample, 1)]
        if changes:
            kept[key] = changes
    mixtures = [kept[shares], *(weights for _, weights in kept.get("later", []))]
    used = 1 + max(i for weights in mixtures for i, weight in enumerate(weights) if weight)
    kept |= {shares: kept[shares][:used], "sources": kept["sources"][:used]}
    if "later" in kept:
        kept["later"] = [[first, weights[:used]] for first, weights in kept["later"]]
    return kept


def _indices(samples: np.ndarray) -> np.ndarray:
    samples = np.asarray(samples, dtype=np.int64)
    if samples.size and samples.min() < 0:
        raise IndexError(f"sample {samples.min()}")
    return samples


def _check_overlap(sources: Sequence[TokenSource]) -> None:
    spans = sorted((s.store.fingerprint, s.tokens.start, s.tokens.stop, s.name) for s in sources)
    for a, b in pairwise(spans):
        if a[0] == b[0] and b[1] < a[2]:
            raise _named_twice(a[3], b[3])


def _named_twice(*names: str) -> UserError:
    which = " and ".join(dict.fromkeys(names))
    todo = "name each dataset once, with the sum of the weights"
    return UserError(f"two data sources are the same tokens, of {which}", todo)


def _check(source: TokenSource, first: TokenSource) -> None:
    span = source.tokens
    if span.step != 1 or span.start < 0 or span.stop > source.store.tokens:
        raise ValueError(f"{span} is not a range of the {source.store.tokens} tokens of {source.name}")
    if source.store.tokenizer_sha256 != first.store.tokenizer_sha256:
        raise UserError(
            f"{source.name} and {first.name} were prepared with different tokenizers",
            "prepare both with the same tokenizer",
        )
