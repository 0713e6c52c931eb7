"""The proof of a run's ledger, by replaying its order: works on a laptop, without the tokens being read."""

from collections.abc import Callable
from itertools import pairwise
from math import gcd

import numpy as np

from arriero.data.order.ledger import Ledger, checksum, difference
from arriero.data.order.order import Located, Stream
from arriero.data.order.pack import PlannedRows, Windows

CHUNK = 2**16


class Audit:
    """Replays a run's order and compares it with its ledger, in memory bounded by one bit per sample."""

    def __init__(self, ledger: Ledger, stream: Stream) -> None:
        self.ledger, self.stream = ledger, stream
        self.problems: list[str] = []
        self.discarded = 0

    def run(self, progress: Callable[[int, int], None]) -> None:
        ledger = self.ledger
        if problem := difference(ledger.order, ledger.names, self.stream, ledger.samples):
            self.problems.append(problem)
            return
        self._check_stretches()
        sums = self._replay(progress)
        for stretch, expected in zip(ledger.stretches, sums, strict=True):
            if stretch.checksum != expected:
                self.problems.append(
                    f"samples {stretch.first:,} to {stretch.end:,} were not the ones the order prescribes "
                    f"(checksum {stretch.checksum:016x}, replayed {expected:016x})"
                )
        if ledger.stated not in (None, ledger.samples):
            self.problems.append(
                f"the ledger states {ledger.stated:,} samples, and its stretches end at {ledger.samples:,}"
            )

    def _check_stretches(self) -> None:
        reached = 0
        for stretch in self.ledger.stretches:
            if stretch.first > reached:
                self.problems.append(f"samples {reached:,} to {stretch.first:,} were skipped")
            self.discarded += max(0, reached - stretch.first)
            reached = stretch.end

    def _replay(self, progress: Callable[[int, int], None]) -> list[int]:
        stretches = self.ledger.stretches
        furthest = max((s.end for s in stretches), default=0)
        sums = [0] * len(stretches)
        epochs = _Epochs(self.stream)
        edges = (g for s in stretches for g in (s.first, s.end))
        changes = (first for first, _ in self.stream.lengths if first < furthest)
        marks = sorted({furthest, *range(0, furthest, CHUNK), *edges, *changes})
        for begin, end in pairwise(marks):
            samples = np.arange(begin, end)
            located = self.stream.locate(samples)
            part = checksum(samples, located)
            for i, stretch in enumerate(stretches):
                if stretch.first <= begin < stretch.end:
                    sums[i] = (sums[i] + part) % 2**64
            if end <= self.ledger.samples and (problem := epochs.see(begin, located)):
                self.problems.append(problem)
            progress(end, furthest)
        return sums


class _Epochs:
    """One bit per sample of each source's current epoch. Where the sequence length changes, a bit stands for
    as many tokens as all lengths are multiples of."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._seen = [np.zeros(0, dtype=np.uint8) for _ in stream.sources]
        self._epoch = [-1] * len(stream.sources)
        self._count = [0] * len(stream.sources)
        self._unit = gcd(stream.seq_len, *(length for _, length in stream.lengths))

    def see(self, first_sample: int, located: Located) -> str | None:
        """Samples from `first_sample` on, all of one sequence length."""
        for source in np.unique(located.source):
            mine = located.source == source
            for epoch in np.unique(located.epoch[mine]):
                index = located.index[mine & (located.epoch == epoch)]
                cut = self._stream.cut_of(first_sample, int(source), int(epoch))
                length = self._stream.seq_len_at(first_sample)
                if problem := self._see(
                    int(source), int(epoch), self._units(int(source), cut, index, length)
                ):
                    return problem
        return None

    def _units(self, source: int, cut: Windows | PlannedRows, index: np.ndarray, length: int) -> np.ndarray:
        if isinstance(cut, PlannedRows) or not self._stream.lengths:
            return index
        inputs = (index[:, None] * length + np.arange(0, length, self._unit)).ravel()
        first = self._stream.sources[source].tokens.start
        return (cut.positions(inputs) - first) // self._unit

    def _expected(self, source: int, epoch: int) -> int:
        """Units of a whole epoch: all of the source but for what fills no sample."""
        if not self._stream.lengths:
            return self._stream.counts[source]
        read = self._stream.readings[source].tokens_of_epoch(epoch)
        inputs = len(self._stream.sources[source].tokens) - 1
        return (read if inputs - read < self._stream.longest_sequence else inputs) // self._unit

    def _see(self, source: int, epoch: int, units: np.ndarray) -> str | None:
        name = self._stream.sources[source].name
        if epoch != self._epoch[source]:
            n = self._expected(source, epoch - 1) if epoch else 0
            if epoch != self._epoch[source] + 1 or self._count[source] != n:
                seen = f"{self._count[source]:,} of {n:,} samples were seen"
                return f"{name}: epoch {epoch + 1} began when {seen}"
            self._epoch[source], self._count[source] = epoch, 0
            span = self._stream.sources[source].tokens
            n = len(span) // self._unit + 1 if self._stream.lengths else self._stream.counts[source]
            self._seen[source] = np.zeros(-(-n // 8), dtype=np.uint8)
        bits = self._seen[source]
        byte, bit = units >> 3, np.left_shift(1, units & 7).astype(np.uint8)
        if len(np.unique(units)) < len(units) or (bits[byte] & bit).any():
            return f"{name}: a sample came twice within epoch {epoch + 1}"
        np.bitwise_or.at(bits, byte, bit)
        self._count[source] += len(units)
        return None
