"""What data a run has consumed, in `ledger.json`, and the proof that it is what the order prescribes.

Each process that trains appends one stretch of samples with a checksum over what its loader really handed
out. A stretch that begins before the one before it ended took back what lay beyond: those samples were read
by weights that a restart threw away.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arriero.data.order import Located, Stream, fingerprint_of
from arriero.data.permutation import block_keys
from arriero.data.shards import write_durably
from arriero.errors import UserError

VERSION = 1
LEDGER = "ledger.json"
CHUNK = 2**16


@dataclass(frozen=True)
class Stretch:
    """Samples [first, end) as one process read them. The checksum does not depend on their order."""

    first: int
    end: int
    checksum: int
    real_tokens: int
    slots: int


@dataclass(frozen=True)
class Ledger:
    batch_sequences: int
    order: dict[str, Any]
    names: list[str]
    stretches: list[Stretch]

    @property
    def samples(self) -> int:
        return self.stretches[-1].end if self.stretches else 0


def checksum(samples: np.ndarray, located: Located) -> int:
    """Sums over samples add up, so ranks and processes may each sum their own."""
    mixed = samples.astype(np.uint64)
    for column in located:
        mixed = block_keys(0, mixed) ^ column.astype(np.uint64)
    return int(block_keys(0, mixed).sum(dtype=np.uint64)) if len(mixed) else 0


def write_ledger(directory: Path, stream: Stream, ledger: Ledger) -> None:
    drawn = stream.drawn(ledger.samples)
    content = {
        "version": VERSION,
        "samples": ledger.samples,
        "batch_sequences": ledger.batch_sequences,
        "fingerprint": fingerprint_of(ledger.order),
        "order": ledger.order,
        "sources": [
            {"name": name, **_share(stream, i, int(drawn[i]))} for i, name in enumerate(ledger.names)
        ],
        "stretches": [{**asdict(s), "checksum": f"{s.checksum:016x}"} for s in ledger.stretches],
    }
    write_durably(directory / LEDGER, (json.dumps(content, indent=1) + "\n").encode())


def _share(stream: Stream, source: int, drawn: int) -> dict[str, Any]:
    cut = stream.cuts[source]
    return {
        "samples": drawn,
        "samples_per_epoch": cut.count,
        "epochs": round(drawn / cut.count, 6),
        "tokens": round(drawn * cut.tokens / cut.count),
    }


def read_ledger(directory: Path) -> Ledger:
    path = directory / LEDGER
    try:
        content = json.loads(path.read_bytes())
        stretches = [Stretch(**{**s, "checksum": int(s["checksum"], 16)}) for s in content["stretches"]]
        names = [source["name"] for source in content["sources"]]
        return Ledger(content["batch_sequences"], content["order"], names, stretches)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", "give the directory of a run that has trained") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error})", "restore it") from None


def begin_ledger(directory: Path, stream: Stream, batch_sequences: int) -> Ledger:
    """The ledger of this run directory, to be continued; a new one where there is none."""
    names = [source.name for source in stream.sources]
    fresh = Ledger(batch_sequences, stream.identity, names, [])
    if not (directory / LEDGER).exists():
        return fresh
    return replace(fresh, stretches=read_ledger(directory).stretches)


def refuse_changed(saved: dict[str, Any], names: list[str], stream: Stream, samples: int) -> None:
    """A run goes on only with the data it began with; what comes after `samples` may be new."""
    if problem := difference(saved, names, stream, samples):
        raise UserError(problem, "restore the data it began with, or start a run with another name")


def difference(saved: dict[str, Any], names: list[str], stream: Stream, samples: int) -> str | None:
    """What no longer gives the first `samples` samples, in words."""
    now = stream.identity_until(samples)
    kept = _until(saved, samples)
    if kept == now:
        return None
    for name, old, new in zip(names, kept["sources"], now["sources"], strict=False):
        if old["dataset"] != new["dataset"]:
            return f"{name} has changed since the run began (fingerprint {old['dataset'][:12]}, now {new['dataset'][:12]})"
        if old != new:
            return f"the part of {name} that is trained on has changed since the run began"
    changed = [key for key in now.keys() | kept.keys() if now.get(key) != kept.get(key)]
    return f"the order of samples has changed since the run began ({', '.join(sorted(changed))})"


def _until(identity: dict[str, Any], samples: int) -> dict[str, Any]:
    """An identity without the phases that begin at `samples` or later, and without their sources."""
    later = [phase for phase in identity.get("later", []) if phase[0] < max(samples, 1)]
    mixtures = [identity["quotas"], *(quotas for _, quotas in later)]
    used = 1 + max(i for quotas in mixtures for i, quota in enumerate(quotas) if quota)
    kept = {**identity, "quotas": identity["quotas"][:used], "sources": identity["sources"][:used]}
    kept.pop("later", None)
    return {**kept, "later": [[g, quotas[:used]] for g, quotas in later]} if later else kept


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
        marks = sorted({0, furthest, *range(0, furthest, CHUNK), *(g for s in stretches for g in (s.first, s.end))})
        for begin, end in zip(marks, marks[1:], strict=False):
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
                return f"{name}: epoch {epoch + 1} began when {self._count[source]:,} of {n:,} samples were seen"
            self._epoch[source], self._count[source] = epoch, 0
            self._seen[source] = np.zeros(-(-n // 8), dtype=np.uint8)
        bits = self._seen[source]
        byte, bit = index >> 3, np.left_shift(1, index & 7).astype(np.uint8)
        if len(np.unique(index)) < len(index) or (bits[byte] & bit).any():
            return f"{name}: a sample came twice within epoch {epoch + 1}"
        np.bitwise_or.at(bits, byte, bit)
        self._count[source] += len(index)
        return None
