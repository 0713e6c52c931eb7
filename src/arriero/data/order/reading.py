"""The order in which one source is read: its samples numbered from 0 over all phases ("draws").

An epoch is a shuffle of the source's samples. Where the sequence length changes inside an epoch, the tokens
that the epoch has not read yet are cut into samples of the new length first, so that none is lost or
repeated; the epochs after it are cut whole.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np

from arriero.data.order.pack import Packing, PlannedRows, Source, Windows
from arriero.data.order.permutation import Shuffle, block_keys, key_of
from arriero.errors import UserError

CHUNK_TOKENS = 2**18
GROUP_CHUNKS = 2**10


@dataclass(frozen=True)
class _Leg:
    """Draws from `first` on, with one sequence length: first the rest of an epoch, then whole epochs."""

    first: int
    seq_len: int
    epoch: int
    whole: Windows | PlannedRows
    rest: Windows | None = None

    @property
    def rest_count(self) -> int:
        return self.rest.count if self.rest else 0


class Reading:
    def __init__(self, source: Source, seq_len: int, seed: int, packing: Packing, chunked: bool) -> None:
        self._source, self._packing, self._chunked = source, packing, chunked
        self._seed = seed
        self._key = key_of(seed, source.identity)
        self.legs = [_Leg(0, seq_len, 0, packing.cut(source, seq_len))]

    @property
    def whole(self) -> Windows | PlannedRows:
        """An epoch of the first sequence length."""
        return self.legs[0].whole

    def change_length(self, draw: int, seq_len: int) -> None:
        """From `draw` on samples have another length."""
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
            unread = cut.without(rows, seq_len)
            if not unread.count:
                unread, epoch = None, epoch + 1
        self.legs.append(_Leg(draw, seq_len, epoch, whole, unread))

    def locate(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and index of each draw; which cut the index belongs to, `cut` says."""
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
        """What an index of this epoch counts, after so many changes of the sequence length."""
        leg = self.legs[lengths]
        return leg.rest if leg.rest is not None and epoch == leg.epoch else leg.whole

    def tokens(self, draws: int) -> Fraction:
        """Tokens of the first `draws` draws; for packings with samples of several lengths, on average."""
        ends = [*(leg.first for leg in self.legs[1:]), draws]
        total = Fraction(0)
        for leg, end in zip(self.legs, ends, strict=True):
            count = max(0, min(end, draws) - leg.first)
            total += count * Fraction(leg.whole.tokens, leg.whole.count)
        return total

    def epochs(self, draws: int) -> float:
        return float(self.tokens(draws) / self.whole.tokens)

    def tokens_of_epoch(self, epoch: int) -> int:
        """What a finished epoch has read, in windows of one or several lengths; a multiple of all of them is
        left unread only where it fills no sample."""
        total = 0
        for leg, after in zip(self.legs, [*self.legs[1:], None], strict=True):
            whole_epochs = epoch - leg.epoch - (leg.rest is not None)
            if whole_epochs < 0:
                first, count = leg.first, leg.rest_count if epoch == leg.epoch else 0
            else:
                first, count = leg.first + leg.rest_count + whole_epochs * leg.whole.count, leg.whole.count
            end = first + count if after is None else min(first + count, after.first)
            total += max(0, end - first) * leg.seq_len
        return total

    def epochs_before(self, draw: int) -> tuple[int, bool]:
        """Whole epochs that were read before a draw, and whether another has begun."""
        leg = self._leg(draw)
        epoch, place, rest = self._state(leg, draw)
        return epoch, bool(place) or rest

    def _leg(self, draw: int) -> _Leg:
        return [leg for leg in self.legs if leg.first <= draw][-1]

    def draws_within(self, epochs: float) -> int:
        """The most draws that read at most so many epochs."""
        left = floor(Fraction(epochs) * self.whole.count) * Fraction(self.whole.tokens, self.whole.count)
        for leg, after in zip(self.legs, [*self.legs[1:], None], strict=True):
            mean = Fraction(leg.whole.tokens, leg.whole.count)
            count = floor(left / mean)
            if after is None or count < after.first - leg.first:
                return leg.first + count
            left -= (after.first - leg.first) * mean
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
        """Epoch, place in its order, and whether that is the rest of an epoch, before draw number `draw`."""
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
