"""The ledger of a run, `ledger.json`: which data it consumed, and the audit that verifies it.

Each process that trains appends one range of samples ("stretch") with a checksum of what its loader returned.
A stretch that begins before the end of the previous one replaces the overlap: those samples were read before
a restart discarded the weights.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator

from arriero.data.order.order import ORDER_VERSION, Located, Stream, trimmed
from arriero.data.order.packing import PlannedRows, Windows
from arriero.data.order.shuffle import block_keys
from arriero.errors import UserError, first_problem
from arriero.files import sha256_of_json

VERSION = 1
LEDGER = "ledger.json"


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
    """A ledger. `stated` is the number of samples that its file states, which the audit compares. `skipped`
    are ranges of samples that were read and not trained on, because their loss was bad."""

    batch_sequences: int
    order: dict[str, Any]
    names: list[str]
    stretches: list[Stretch]
    stated: int | None = None
    skipped: list[tuple[int, int]] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return self.stretches[-1].end if self.stretches else 0

    def with_stretch(self, stretch: Stretch) -> "Ledger":
        return replace(self, stretches=[*self.stretches, stretch], stated=None)


def checksum(samples: np.ndarray, located: Located) -> int:
    """Return a checksum of samples. It is a sum, so ranks and processes can add their own."""
    mixed = samples.astype(np.uint64)
    for column in located:
        mixed = block_keys(0, mixed) ^ column.astype(np.uint64)
    return int(block_keys(0, mixed).sum(dtype=np.uint64)) if len(mixed) else 0


def ledger_bytes(stream: Stream, ledger: Ledger) -> bytes:
    drawn = stream.drawn(ledger.samples)
    content = {
        "version": VERSION,
        "samples": ledger.samples,
        "batch_sequences": ledger.batch_sequences,
        "fingerprint": sha256_of_json(ledger.order),
        "order": ledger.order,
        "sources": [
            {"name": name, **_share(stream, i, int(drawn[i]))} for i, name in enumerate(ledger.names)
        ],
        "stretches": [{**asdict(s), "checksum": f"{s.checksum:016x}"} for s in ledger.stretches],
        **({"skipped": ledger.skipped} if ledger.skipped else {}),
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def _share(stream: Stream, source: int, drawn: int) -> dict[str, Any]:
    order = stream.source_orders[source]
    return {
        "samples": drawn,
        "samples_per_epoch": stream.counts[source],
        "epochs": round(order.epochs(drawn), 6),
        "tokens": round(order.tokens(drawn)),
    }


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Weights = list[Annotated[int, Field(ge=0)]]


class _SavedStretch(BaseModel):
    first: _Count
    end: _Count
    checksum: Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]
    real_tokens: _Count
    slots: _Count


class _SavedDataset(BaseModel):
    dataset: str


class _SavedOrder(BaseModel):
    order: _Count = 1
    weights: _Weights | None = None
    quotas: _Weights | None = None
    sources: list[_SavedDataset]
    later: list[tuple[_Count, _Weights]] = []
    lengths: list[tuple[_Count, _Count]] = []

    @model_validator(mode="after")
    def _mixes_something(self) -> "_SavedOrder":
        if not any(self.weights or self.quotas or []):
            raise ValueError("no source has a weight")
        return self


class _SavedName(BaseModel):
    name: str


class _SavedLedger(BaseModel):
    samples: _Count
    batch_sequences: _Count
    order: _SavedOrder
    sources: list[_SavedName]
    stretches: list[_SavedStretch]
    skipped: list[tuple[_Count, _Count]] = []

    @model_validator(mode="after")
    def _counts_agree(self) -> "_SavedLedger":
        for stretch in self.stretches:
            if not 0 <= stretch.end - stretch.first <= stretch.slots:
                raise ValueError(f"samples {stretch.first} to {stretch.end} in {stretch.slots} token slots")
        return self


def read_ledger(directory: Path) -> Ledger:
    path = directory / LEDGER
    try:
        raw = path.read_bytes()
        saved = _SavedLedger.model_validate_json(raw, strict=True)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist", "give the directory of a run that has trained") from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error})", "check its permissions and the file system"
        ) from None
    except ValidationError as error:
        what = first_problem(error.errors())
        raise UserError(f"{path} is damaged ({what})", "restore it from a copy or a checkpoint") from None
    stretches = [Stretch(**{**dict(s), "checksum": int(s.checksum, 16)}) for s in saved.stretches]
    order: dict[str, Any] = json.loads(raw)["order"]
    names = [source.name for source in saved.sources]
    return Ledger(saved.batch_sequences, order, names, stretches, saved.samples, list(saved.skipped))


def order_version(*directories: Path) -> int:
    """Return the order version in the first of these directories that has a ledger, else the newest."""
    for directory in directories:
        if (directory / LEDGER).exists():
            return read_ledger(directory).order.get("order", 1)
    return ORDER_VERSION


def begin_ledger(
    directory: Path, stream: Stream, batch_sequences: int, checkpoint: Path | None = None
) -> Ledger:
    """Return the ledger of a run directory to append to, or a new one.

    `checkpoint` is where the run resumes. Its ledger is used if the run's own does not reach it.
    """
    names = [source.name for source in stream.sources]
    fresh = Ledger(batch_sequences, stream.identity, names, [])
    saved = read_ledger(checkpoint) if checkpoint else fresh
    if not (directory / LEDGER).exists():
        return replace(fresh, stretches=saved.stretches, skipped=saved.skipped)
    own = read_ledger(directory)
    skipped = sorted({*own.skipped, *saved.skipped})
    stretches = (own if own.samples >= saved.samples else saved).stretches
    return replace(fresh, stretches=stretches, skipped=skipped)


def check_data_unchanged(directory: Path, stream: Stream) -> None:
    """Raise UserError if the data of the samples that a run has read has changed since."""
    if not (directory / LEDGER).exists():
        return
    ledger = read_ledger(directory)
    if problem := difference(ledger.order, ledger.names, stream, ledger.samples):
        raise UserError(problem, "restore the data it began with, or choose another run.name")


def check_same_order(state: dict[str, Any], stream: Stream, what: str) -> None:
    """Raise UserError if a loader's state was saved with another order than this stream."""
    expected = sha256_of_json(stream.identity_until(int(state["sample"])))
    if state["fingerprint"] != expected:
        raise UserError(
            f"{what} was trained on other data or in another order "
            f"(fingerprint {str(state['fingerprint'])[:12]}, now {expected[:12]})",
            "restore its datasets, seed, data.seq_len and mixture",
        )


def difference(saved: dict[str, Any], names: list[str], stream: Stream, samples: int) -> str | None:
    """Describe the first difference that changes the first `samples` samples; None if there is none."""
    now = stream.identity_until(samples)
    kept = trimmed(saved, samples)
    if kept == now:
        return None
    for name, old, new in zip(names, kept["sources"], now["sources"], strict=False):
        if old["dataset"] != new["dataset"]:
            prints = f"fingerprint {old['dataset'][:12]}, now {new['dataset'][:12]}"
            return f"{name} has changed since the run began ({prints})"
        if old != new:
            return f"the part of {name} that is trained on has changed since the run began"
    changed = [key for key in now.keys() | kept.keys() if now.get(key) != kept.get(key)]
    return f"the order of samples has changed since the run began ({', '.join(sorted(changed))})"


CHUNK = 2**16


class Audit:
    """Replays a run's order and compares it with its ledger, with one bit of memory per sample.

    The tokens are not read, so it runs on any machine.
    """

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
    """One bit per sample of each source's current epoch.

    If the sequence length changes, a bit stands for the greatest common divisor of all lengths in tokens.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._seen = [np.zeros(0, dtype=np.uint8) for _ in stream.sources]
        self._epoch = [-1] * len(stream.sources)
        self._count = [0] * len(stream.sources)
        self._unit = gcd(stream.seq_len, *(length for _, length in stream.lengths))

    def see(self, first_sample: int, located: Located) -> str | None:
        """Mark samples of one sequence length, from `first_sample` on; return a problem, if there is one."""
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
        """Return the units of a whole epoch: the source without the tokens that fill no sample."""
        if not self._stream.lengths:
            return self._stream.counts[source]
        read = self._stream.source_orders[source].tokens_of_epoch(epoch)
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
