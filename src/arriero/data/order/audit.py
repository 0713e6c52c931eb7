"""The proof of a run's ledger, by replaying its order: works on a laptop, without the tokens being read."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from arriero.data.order.ledger import Ledger, checksum, difference
from arriero.data.order.order import Located, Stream

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
        marks = sorted({furthest, *range(0, furthest, CHUNK), *edges})
        for begin, end in pairwise(marks):
            samples = np.arange(begin, end)
            located = self.stream.locate(samples)
            part = checksum(samples, located)
            for i, stretch in enumerate(stretches):
                if stretch.first <= begin < stretch.end:
                    sums[i] = (sums[i] + part) % 2**64
            if end <= self.ledger.samples and (problem := epochs.see(located)):
                self.problems.append(problem)
            progress(end, furthest)
        return sums


class _Epochs:
    """One bit per sample of each source's current epoch."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._seen = [np.zeros(0, dtype=np.uint8) for _ in stream.sources]
        self._epoch = [-1] * len(stream.sources)
        self._count = [0] * len(stream.sources)

    def see(self, located: Located) -> str | None:
        for source in np.unique(located.source):
            mine = located.source == source
            for epoch in np.unique(located.epoch[mine]):
                index = located.index[mine & (located.epoch == epoch)]
                if problem := self._see(int(source), int(epoch), index):
                    return problem
        return None

    def _see(self, source: int, epoch: int, index: np.ndarray) -> str | None:
        name, n = self._stream.sources[source].name, self._stream.counts[source]
        if epoch != self._epoch[source]:
            if epoch != self._epoch[source] + 1 or self._count[source] != (n if epoch else 0):
                seen = f"{self._count[source]:,} of {n:,} samples were seen"
                return f"{name}: epoch {epoch + 1} began when {seen}"
            self._epoch[source], self._count[source] = epoch, 0
            self._seen[source] = np.zeros(-(-n // 8), dtype=np.uint8)
        bits = self._seen[source]
        byte, bit = index >> 3, np.left_shift(1, index & 7).astype(np.uint8)
        if len(np.unique(index)) < len(index) or (bits[byte] & bit).any():
            return f"{name}: a sample came twice within epoch {epoch + 1}"
        np.bitwise_or.at(bits, byte, bit)
        self._count[source] += len(index)
        return None
