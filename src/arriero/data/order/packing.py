"""Cut a source into samples (packing) and order the samples of all its epochs.

`concat`: windows over the token stream. A source of N tokens gives (N - 1) // seq_len windows. Window w takes
seq_len tokens from w * seq_len on, and its labels are the same tokens shifted by one, so neighbours share one
token: the last label of one is the first input of the next. In one epoch every token of the source is
predicted exactly once, except its first and the `unused` ones at its end that do not fill a window.

`bestfit`: rows of whole documents, filled by best fit. `none`: one document per row, padded to the longest of
its batch. In both a document longer than a row is split, truncated or dropped, and the loss is counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor, inf
from pathlib import Path
from typing import Any

import numpy as np

from arriero.data.order.packing_plan import PackingPlan, PackingRequest, check_planning_size, open_plan
from arriero.data.order.shuffle import Shuffle, block_keys, key_of, merge_intervals
from arriero.data.store.store import TokenStore
from arriero.data.workers import ProgressCallback, no_progress
from arriero.errors import UserError


@dataclass(frozen=True)
class TokenSource:
    """Tokens [span.start, span.stop) of a prepared dataset, by default all, and their mixture weight."""

    store: TokenStore
    span: range | None = None
    weight: float = 1.0
    prompt: tuple[int, ...] = ()
    max_epochs: float | None = None

    @property
    def tokens(self) -> range:
        return range(self.store.tokens) if self.span is None else self.span

    @property
    def name(self) -> str:
        return str(self.store.directory)

    @property
    def identity(self) -> dict[str, Any]:
        identity = {"dataset": self.store.fingerprint, "start": self.tokens.start, "stop": self.tokens.stop}
        return {**identity, "prompt": list(self.prompt)} if self.prompt else identity


class Windows:
    """Windows over `runs` of the source: intervals (first, end) of input positions, by default the whole.

    The label of an input is the token after it in the source, also at the end of a run.
    """

    def __init__(self, source: TokenSource, seq_len: int, runs: np.ndarray | None = None) -> None:
        span = source.tokens
        if source.prompt:
            raise UserError(
                f"{source.name} has a prompt, but packing 'concat' cuts documents anywhere",
                "set data.packing to 'bestfit' or 'none'",
            )
        if len(span) < seq_len + 1:
            raise UserError(
                f"{source.name} has {len(span)} tokens, one sequence of {seq_len} needs {seq_len + 1}",
                "use a shorter sequence or more text; for held-out text, hold out more",
            )
        self._source, self._seq_len = source, seq_len
        self._runs = np.array([[span.start, span.stop - 1]]) if runs is None else runs
        self._ends = np.cumsum(self._runs[:, 1] - self._runs[:, 0])
        self.inputs = int(self._ends[-1]) if len(self._ends) else 0
        self.count = self.inputs // seq_len
        self.tokens = self.slots = self.count * seq_len
        self.unused = self.inputs - self.tokens

    def start(self, sample: int) -> int:
        return int(self.positions(np.array([sample * self._seq_len]))[0])

    def positions(self, inputs: np.ndarray) -> np.ndarray:
        """Return the positions in the source of the inputs with these numbers."""
        run = self._ends.searchsorted(inputs, side="right")
        return inputs - self._ends[run] + self._runs[run, 1]

    def parts(self, sample: int) -> list[tuple[int, int]]:
        """Return (position, tokens) of the parts of a sample: one part, unless it spans several runs."""
        begin, end = sample * self._seq_len, (sample + 1) * self._seq_len
        if len(self._runs) == 1:
            return [(int(self._runs[0, 0]) + begin, self._seq_len)]
        parts = []
        run = int(self._ends.searchsorted(begin, side="right"))
        while begin < end:
            stop = min(end, int(self._ends[run]))
            parts.append((int(self._runs[run, 1] - self._ends[run]) + begin, stop - begin))
            begin, run = stop, run + 1
        return parts

    def samples_of(self, first: int, end: int) -> np.ndarray:
        """Return the samples whose inputs include positions of the source in [first, end)."""
        before = self._ends - (self._runs[:, 1] - self._runs[:, 0])
        low, high = np.maximum(self._runs[:, 0], first), np.minimum(self._runs[:, 1], end)
        here = low < high
        inputs = np.stack((low, high - 1))[:, here] - self._runs[here, 0] + before[here]
        ranges = [np.arange(a, b + 1) for a, b in (inputs // self._seq_len).T.tolist()]
        found = np.unique(np.concatenate(ranges)) if ranges else np.empty(0, dtype=np.int64)
        return found[found < self.count]

    def rewindow(self, unread: np.ndarray, seq_len: int) -> "Windows":
        """Cut the inputs of the `unread` samples (intervals) and the unused inputs into another length."""
        tail = np.array([[self.tokens, self.inputs]])
        left = merge_intervals(np.concatenate((unread * self._seq_len, tail)))
        edges = np.unique(np.concatenate((left.ravel(), self._ends)))
        begins, ends = edges[:-1], edges[1:]
        inside = left[:, 0].searchsorted(begins, side="right") - 1
        kept = (inside >= 0) & (begins < left[inside, 1])
        first = self.positions(begins[kept])
        runs = merge_intervals(np.stack((first, first + ends[kept] - begins[kept]), axis=1))
        return Windows(self._source, seq_len, runs)

    @property
    def remarks(self) -> list[str]:
        return []


class PlannedRows:
    """Rows of document segments, listed by a packing plan."""

    def __init__(self, source: TokenSource, seq_len: int, plan: PackingPlan, packing: "Packing") -> None:
        if plan.rows == 0:
            raise UserError(
                f"{source.name} has no sample of at most {seq_len} tokens",
                "use a longer sequence, set data.long_docs = 'split', or remove the source",
            )
        self._plan, self._packing = plan, packing
        self.count = plan.rows
        self.tokens: int = plan.counts["tokens"]
        self.slots = plan.rows * seq_len

    def segments(self, sample: int) -> np.ndarray:
        return self._plan.segments(sample)

    def samples_of(self, first: int, end: int) -> np.ndarray:
        """Return the rows with tokens of the source in [first, end)."""
        return self._plan.rows_of(first, end)

    @property
    def remarks(self) -> list[str]:
        counts = self._plan.counts
        long, lost = counts.get("long_documents", 0), counts.get("lost_tokens", 0)
        if not long:
            return []
        done = {"split": "split", "truncate": "truncated", "drop": "dropped"}[self._packing.long_docs]
        cost = f", {lost:,} tokens not trained on" if lost else ""
        return [f"{long:,} of {counts['documents']:,} documents are longer than a row: {done}{cost}"]


@dataclass(frozen=True)
class Packing:
    """How to cut every source of a stream; packing plans are stored in `cache`."""

    kind: str = "concat"
    long_docs: str = "split"
    cache: Path = Path("data")
    progress: ProgressCallback = field(default=no_progress, compare=False)

    @property
    def identity(self) -> dict[str, Any]:
        """Identify the packing in fingerprints; `concat` is empty, since its fingerprints came first."""
        return {} if self.kind == "concat" else {"packing": self.kind, "long_docs": self.long_docs}

    def cut(self, source: TokenSource, seq_len: int) -> Windows | PlannedRows:
        if self.kind == "concat":
            return Windows(source, seq_len)
        plan = open_plan(self.cache, self.request(source, seq_len), self.progress)
        return PlannedRows(source, seq_len, plan, self)

    def check_planning_size(self, sources: Sequence[TokenSource], seq_len: int) -> None:
        if self.kind != "concat":
            check_planning_size(self.cache, [self.request(source, seq_len) for source in sources])

    def request(self, source: TokenSource, seq_len: int) -> PackingRequest:
        """Return the request for the packing plan of a source."""
        prompt = len(source.prompt)
        if prompt >= seq_len:
            raise UserError(
                f"the prompt of {source.name} has {prompt} tokens, a sequence only {seq_len}",
                "shorten the prompt or lengthen data.seq_len",
            )
        return PackingRequest(source.store, source.tokens, self.kind, self.long_docs, seq_len, prompt)


CONCAT = Packing()


CHUNK_TOKENS = 2**18
GROUP_CHUNKS = 2**10


@dataclass(frozen=True)
class _Leg:
    """The draws from `first` on of one sequence length: the rest of an epoch, then whole epochs."""

    first: int
    seq_len: int
    epoch: int
    whole: Windows | PlannedRows
    rest: Windows | None = None

    @property
    def rest_count(self) -> int:
        return self.rest.count if self.rest else 0


class SourceOrder:
    """The order in which one source is read, its samples numbered from 0 over all phases ("draws").

    An epoch is a shuffle of the source's samples. Where the sequence length changes inside an epoch, its
    unread tokens are cut into samples of the new length first, so that none is lost or repeated.
    """

    def __init__(self, source: TokenSource, seq_len: int, seed: int, packing: Packing, chunked: bool) -> None:
        self._source, self._packing, self._chunked = source, packing, chunked
        self._seed = seed
        self._key = key_of(seed, source.identity)
        self.legs = [_Leg(0, seq_len, 0, packing.cut(source, seq_len))]

    @property
    def whole(self) -> Windows | PlannedRows:
        """An epoch of the first sequence length."""
        return self.legs[0].whole

    def change_length(self, draw: int, seq_len: int) -> None:
        """Change the sequence length from `draw` on."""
        if self._packing.kind != "concat":
            raise UserError(
                f"data.packing '{self._packing.kind}' cannot change the sequence length inside a run: its "
                "rows are planned for one length",
                "set data.packing to 'concat', or start another run from the weights of this one",
            )
        leg = self.legs[-1]
        epoch, place, rest = self._state(leg, draw)
        whole = Windows(self._source, seq_len)
        unread = None
        if place or rest:
            cut = leg.rest if rest else leg.whole
            assert isinstance(cut, Windows)
            rows = self._shuffle(cut, leg.seq_len).rest(place, self._epoch_key(leg, epoch, rest))
            unread = cut.rewindow(rows, seq_len)
            if not unread.count:
                unread, epoch = None, epoch + 1
        self.legs.append(_Leg(draw, seq_len, epoch, whole, unread))

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the epoch and the index of each draw; `cut` returns what the index counts."""
        epoch, index = np.empty_like(draws), np.empty_like(draws)
        number = np.searchsorted([leg.first for leg in self.legs], draws, side="right") - 1
        for k in np.unique(number):
            leg = self.legs[k]
            for rest in (True, False):
                here = (number == k) & ((draws - leg.first < leg.rest_count) == rest)
                if not here.any():
                    continue
                local = draws[here] - leg.first
                cut, before, place = leg.rest, np.zeros_like(local), local
                if not rest:
                    cut = leg.whole
                    before, place = np.divmod(local - leg.rest_count, cut.count)
                    before += leg.rest is not None
                assert cut is not None
                epoch[here] = leg.epoch + before
                keys = self._epoch_key(leg, epoch[here], rest)
                index[here] = self._shuffle(cut, leg.seq_len).at(place, keys)
        return epoch, index

    def cut(self, lengths: int, epoch: int) -> Windows | PlannedRows:
        """Return the samples that an index of this epoch counts, after `lengths` changes of the length."""
        leg = self.legs[lengths]
        return leg.rest if leg.rest is not None and epoch == leg.epoch else leg.whole

    def _legs(self) -> Iterator[tuple[_Leg, Any, Fraction]]:
        """Yield each leg, the draw at which it ends (infinity for the last) and the mean tokens of a draw."""
        ends = [*(leg.first for leg in self.legs[1:]), inf]
        for leg, end in zip(self.legs, ends, strict=True):
            yield leg, end, Fraction(leg.whole.tokens, leg.whole.count)

    def tokens(self, draws: int) -> Fraction:
        """Return the tokens of the first `draws` draws; the mean where samples differ in length."""
        return sum(
            (max(0, min(end, draws) - leg.first) * mean for leg, end, mean in self._legs()), Fraction(0)
        )

    def epochs(self, draws: int) -> float:
        return float(self.tokens(draws) / self.whole.tokens)

    def tokens_of_epoch(self, epoch: int) -> int:
        """Return the tokens that a finished epoch has read, in windows of one or several lengths."""
        total = 0
        for leg, end, _ in self._legs():
            whole_epochs = epoch - leg.epoch - (leg.rest is not None)
            if whole_epochs < 0:
                first, count = leg.first, leg.rest_count if epoch == leg.epoch else 0
            else:
                first, count = leg.first + leg.rest_count + whole_epochs * leg.whole.count, leg.whole.count
            total += max(0, min(first + count, end) - first) * leg.seq_len
        return total

    def epochs_before(self, draw: int) -> tuple[int, bool]:
        """Return the whole epochs read before a draw, and whether another has begun."""
        leg = [leg for leg in self.legs if leg.first <= draw][-1]
        epoch, place, rest = self._state(leg, draw)
        return epoch, bool(place) or rest

    def draws_within(self, epochs: float) -> int:
        """Return the largest number of draws that read at most `epochs` epochs."""
        left = floor(Fraction(epochs) * self.whole.count) * Fraction(self.whole.tokens, self.whole.count)
        for leg, end, mean in self._legs():
            draws = leg.first + floor(left / mean)
            if draws < end:
                return draws
            left -= (end - leg.first) * mean
        raise AssertionError

    @property
    def first_repeat(self) -> int:
        """The first draw of the second epoch."""
        for leg, after in zip(self.legs, [*self.legs[1:], None], strict=True):
            ended = leg.first if leg.epoch else leg.first + (leg.rest_count or leg.whole.count)
            if after is None or ended < after.first or after.epoch:
                return min(ended, after.first if after else ended)
        raise AssertionError

    def _state(self, leg: _Leg, draw: int) -> tuple[int, int, bool]:
        """Return the epoch of a draw, its place in the order, and whether it is in the rest of an epoch."""
        local = draw - leg.first
        if local < leg.rest_count:
            return leg.epoch, local, True
        before, place = divmod(local - leg.rest_count, leg.whole.count)
        return leg.epoch + before + (leg.rest is not None), place, False

    def _epoch_key(self, leg: _Leg, epoch: int | np.ndarray, rest: bool) -> np.ndarray:
        key = self._key
        if rest:
            key = key_of(self._seed, self._source.identity, "rest", leg.first, leg.seq_len)
        return block_keys(key, np.atleast_1d(np.asarray(epoch)))

    def _shuffle(self, cut: Windows | PlannedRows, seq_len: int) -> Shuffle:
        chunk = max(1, CHUNK_TOKENS // seq_len)
        return Shuffle(cut.count, chunk, GROUP_CHUNKS if self._chunked else cut.count + 1)
