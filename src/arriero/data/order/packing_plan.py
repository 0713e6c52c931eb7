"""Packing plans: which segments of which documents make up each row of 'bestfit' and 'none'.

A plan is built once and stored as one file, which is memory-mapped: the segments (position of the first
token, slots, flags), for each row the number of its first segment, a checksum of every block of these bytes,
then the counts as JSON. Segments are packed in groups of equal size, each group by itself, so that any number
of processes can share the work, it can be resumed, and memory stays bounded.
"""

import io
import json
import os
import shutil
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arriero.data.order.shuffle import move_heldout_last
from arriero.data.store.store import TokenStore
from arriero.data.workers import ProgressCallback, worker_pool
from arriero.errors import UserError
from arriero.files import locked, publish_file, sha256_of_json

PLANS = "plans"
PLAN_VERSION = 1
GROUP = 2**18
GROUPS_AT_ONCE = 16
UNIT = 2**16
UNITS_AT_ONCE = 16
BLOCK_BYTES = 2**20
MOST_PLANNED = 50_000_000
SEGMENT = np.dtype([("start", "<i8"), ("slots", "<i4"), ("flags", "<i4")])
BEGINS, CONTINUES = 1, 2  # flags: the segment begins its document; the document continues in another row
_TAIL = struct.Struct("<Q8s")
_MAGIC = b"arrpack1"
_COUNTED = ("documents", "long_documents", "lost_tokens")


class PackingPlan:
    """An open plan file. A block of it is compared with its checksum when it is first read.

    Plans of earlier versions have no checksums and are read without them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        if size < _TAIL.size:
            raise ValueError("not a plan")
        with path.open("rb") as file:
            file.seek(size - _TAIL.size)
            length, magic = _TAIL.unpack(file.read(_TAIL.size))
            if magic != _MAGIC or length > size - _TAIL.size:
                raise ValueError("not a plan")
            file.seek(size - _TAIL.size - length)
            self.counts: dict[str, Any] = json.loads(file.read(length))
        checksum = self.counts.pop("crc32", None)
        if checksum not in (None, zlib.crc32(_dumped(self.counts))) or (
            checksum is None and "blocks_crc32" in self.counts
        ):
            raise ValueError("its counts differ from their checksum")
        self.rows: int = self.counts["rows"]
        end = self.counts["pieces"] * SEGMENT.itemsize
        self._bytes = end + 8 * (self.rows + 1)
        self._block_bytes = self.counts["block_bytes"] if checksum is not None else self._bytes
        blocks = -(-self._bytes // self._block_bytes) if checksum is not None else 0
        if size != self._bytes + 4 * blocks + length + _TAIL.size:
            raise ValueError("its size differs from its counts")
        self._content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self._checksums = self._content[self._bytes : self._bytes + 4 * blocks].view("<u4")
        if blocks and zlib.crc32(self._checksums.data) != self.counts["blocks_crc32"]:
            raise ValueError("its checksums are damaged")
        self._unread = set(range(blocks))
        self._segments = self._content[:end].view(SEGMENT)
        self._offsets = self._content[end : self._bytes].view("<i8")

    def segments(self, row: int) -> np.ndarray:
        """Return the segments of a row; raise UserError if they are damaged."""
        if self._unread:
            first = self._segments.nbytes + 8 * row
            self._verify(first, first + 16)
        begin, end = self._offsets[row : row + 2].tolist()
        if self._unread:
            self._verify(begin * SEGMENT.itemsize, end * SEGMENT.itemsize)
        return self._segments[begin:end]

    def rows_of(self, first: int, end: int) -> np.ndarray:
        """Return the rows whose segments overlap tokens [first, end)."""
        if self._unread:
            self._verify(0, self._bytes)
        starts = self._segments["start"]
        hit = np.flatnonzero((starts < end) & (starts + self._segments["slots"] > first))
        return np.unique(self._offsets.searchsorted(hit, side="right") - 1)

    def problems(self) -> list[str]:
        """Read the whole plan; return what differs from its checksums."""
        return [
            f"bytes from {block * self._block_bytes} on differ from their checksum: the file was changed"
            for block in range(len(self._checksums))
            if not self._is_valid(block)
        ]

    def _verify(self, begin: int, end: int) -> None:
        for block in range(begin // self._block_bytes, (end - 1) // self._block_bytes + 1):
            if block in self._unread:
                if not self._is_valid(block):
                    raise UserError(
                        f"{self.path} is damaged (block {block} differs from its checksum)",
                        "remove it and repeat the command, which makes it again",
                    )
                self._unread.discard(block)

    def _is_valid(self, block: int) -> bool:
        begin = block * self._block_bytes
        content = self._content[begin : min(begin + self._block_bytes, self._bytes)]
        return zlib.crc32(content.data) == self._checksums[block]


def _dumped(counts: dict[str, Any]) -> bytes:
    return json.dumps(counts).encode()


class PackingRequest(NamedTuple):
    """How to pack the tokens of a span: everything a plan depends on."""

    store: TokenStore
    span: range
    packing: str
    long_docs: str
    seq_len: int
    prompt: int

    @property
    def name(self) -> str:
        identity = {
            "plan": PLAN_VERSION,
            "dataset": self.store.fingerprint,
            "span": [self.span.start, self.span.stop],
            "packing": self.packing,
            "long_docs": self.long_docs,
            "seq_len": self.seq_len,
            "prompt": self.prompt,
        }
        return sha256_of_json(identity)[:32] + ".plan"

    def command(self) -> str:
        """Return the command that makes the plan before a run."""
        words = [f"arriero data pack {self.store.directory} --seq-len {self.seq_len}"]
        if self.packing != "bestfit":
            words.append(f"--packing {self.packing}")
        if self.long_docs != "split":
            words.append(f"--long-docs {self.long_docs}")
        if self.prompt:
            words.append("--prompt '...'")
        heldout = self.store.tokens - (self.span.start or self.span.stop)
        return " ".join([*words, *([f"--heldout '{heldout} tok'"] if heldout else [])])


def open_plan(cache: Path, request: PackingRequest, progress: ProgressCallback) -> PackingPlan:
    """Open the plan beside the dataset or in the cache; if there is none, make it in the cache."""
    return existing_plan(cache, request) or make_plan(cache / PLANS, request, 1, progress)


def existing_plan(cache: Path, request: PackingRequest) -> PackingPlan | None:
    return find_plan(request.store.directory / PLANS, request) or find_plan(cache / PLANS, request)


def check_planning_size(cache: Path, requests: Sequence[PackingRequest]) -> None:
    """Raise UserError if a run would have to plan too many documents while its other ranks wait."""
    missing = [request for request in requests if existing_plan(cache, request) is None]
    documents = sum(r.store.documents * len(r.span) // max(1, r.store.tokens) for r in missing)
    if documents > MOST_PLANNED:
        names = ", ".join(str(request.store.directory) for request in missing)
        raise UserError(
            f"about {documents:,} documents of {names} are not packed yet, too many to plan while the ranks "
            "of a run wait",
            f"plan them ahead: {'; '.join(request.command() for request in missing)}",
        )


def find_plan(folder: Path, request: PackingRequest) -> PackingPlan | None:
    """Open the plan of a request; return None if there is none or its structure is damaged."""
    path = folder / request.name
    try:
        return PackingPlan(path)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, struct.error):
        return None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror})", "make it readable, or remove it"
        ) from None


def plan_problems(folder: Path) -> Iterator[tuple[str, str]]:
    """Read every plan in a folder; yield (file name, what is wrong)."""
    for path in sorted(folder.glob("*.plan")):
        try:
            yield from ((path.name, problem) for problem in PackingPlan(path).problems())
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            yield path.name, f"is not a packing plan ({error})"


def make_plan(folder: Path, request: PackingRequest, workers: int, progress: ProgressCallback) -> PackingPlan:
    """Make a plan in `folder` with `workers` processes, or resume an interrupted one."""
    path = folder / request.name
    work = folder / f".{request.name}.work"
    todo = "free some space, or set data.cache (or --cache) to a directory you may write"
    with locked(folder / f".{request.name}.lock", path, unwritable=todo, wait_s=None):
        found = find_plan(folder, request)
        if found is None or found.problems():
            try:
                work.mkdir(parents=True, exist_ok=True)
                _build(path, work, request, workers, progress)
            except OSError as error:
                raise UserError(
                    f"the packing plan cannot be stored in {folder} ({error.strerror})", todo
                ) from None
        shutil.rmtree(work, ignore_errors=True)
    return PackingPlan(path)


def _build(path: Path, work: Path, request: PackingRequest, workers: int, progress: ProgressCallback) -> None:
    """Count the segments of every unit of documents, which fixes the segments of each group; pack the groups;
    then write where rows begin."""
    units = np.array(list(_units(request.store, request.span)), np.int64).reshape(-1, 3)
    np.save(work / "units.npy", units)
    counts = np.zeros((len(units), 1 + len(_COUNTED)), np.int64)
    numbers = range(0, len(units), UNITS_AT_ONCE)
    for begin, counted in _by_processes(workers, _count_units, request, work, numbers):
        counts[begin : begin + len(counted)] = counted
        progress("counting", min(begin + UNITS_AT_ONCE, len(units)), len(units))
    np.save(work / "ends.npy", np.cumsum(counts[:, 0]))
    total, *others = counts.sum(axis=0).tolist()
    if not (work / "pieces").exists():
        for record in work.glob("[0-9]*.npy"):
            record.unlink()  # of a plan that was published: its segments were moved with it
    with (work / "pieces").open("ab") as file:
        file.truncate(total * SEGMENT.itemsize)
    parts = range(0, total, GROUP * GROUPS_AT_ONCE)
    left = [first for first in parts if not (work / f"{first}.npy").exists()]
    done = len(parts) - len(left)
    for _ in _by_processes(workers, pack_part, request, work, left):
        done += 1
        progress("packing", done, len(parts))
    _write_rows(work, parts, total, dict(zip(_COUNTED, others, strict=True)))
    (work / "pieces").replace(path)


def _by_processes(
    workers: int, do: Callable[..., Any], request: PackingRequest, work: Path, numbers: Sequence[int]
) -> Iterator[tuple[int, Any]]:
    """Yield each number with the result of `do` for it, in the order in which they are finished."""
    if workers == 1 or len(numbers) < 2:
        yield from ((number, do(request, work, number)) for number in numbers)
        return
    sent = (request.store.directory, request.store.heldout_tokens), request[1:], work
    with worker_pool(min(workers, len(numbers))) as pool:
        todo = {pool.submit(_in_worker, do, *sent, number): number for number in numbers}
        for each in as_completed(todo):
            yield todo[each], each.result()


def _in_worker(
    do: Callable[..., Any], dataset: tuple[Path, int], request: tuple, work: Path, number: int
) -> Any:
    return do(PackingRequest(_opened(*dataset), *request), work, number)


@lru_cache(maxsize=1)
def _opened(directory: Path, heldout: int) -> TokenStore:
    return move_heldout_last(TokenStore.open(directory), heldout)


def _units(store: TokenStore, span: range) -> Iterator[tuple[int, int, int]]:
    """Yield (shard, first document, end) of at most UNIT documents each that hold all tokens of the span."""
    for shard, first, count in store.shard_ranges(span.start, len(span)):
        begin = max(0, store.documents_touching(shard, first, 1)[0])
        end = store.documents_touching(shard, first + count - 1, 1)[0] + 1
        yield from ((shard, lo, min(lo + UNIT, end)) for lo in range(begin, end, UNIT))


def _count_units(request: PackingRequest, work: Path, begin: int) -> np.ndarray:
    units = np.load(work / "units.npy", mmap_mode="r")[begin : begin + UNITS_AT_ONCE]
    found = (_segments(request, unit) for unit in units)
    return np.array([[len(segments), *counts] for segments, counts in found])


def pack_part(request: PackingRequest, work: Path, first: int) -> None:
    """Pack some groups of segments, from segment number `first` on.

    A file with the number of segments of each row marks the part as done; its first number counts the tokens.
    """
    ends = np.load(work / "ends.npy", mmap_mode="r")
    units = np.load(work / "units.npy", mmap_mode="r")
    last = min(first + GROUP * GROUPS_AT_ONCE, int(ends[-1]))
    at = int(np.searchsorted(ends, first, side="right"))
    held, begin = np.empty(0, SEGMENT), first
    per_row, tokens = [], 0
    with (work / "pieces").open("r+b") as out:
        out.seek(first * SEGMENT.itemsize)
        while begin < last:
            size = min(GROUP, last - begin)
            while len(held) < size:
                segments, _ = _segments(request, units[at])
                skipped = max(0, first - (int(ends[at]) - len(segments)))
                held, at = np.concatenate((held, segments[skipped:])), at + 1
            group, held = held[:size], held[size:]
            row = np.arange(size)
            if request.packing == "bestfit":
                row = best_fit_decreasing(group["slots"], request.seq_len)
            out.write(group[np.argsort(row, kind="stable")].tobytes())
            per_row.append(np.bincount(row))
            tokens += int(group["slots"].sum())
            begin += size
        out.flush()
        os.fsync(out.fileno())
    rows = io.BytesIO()
    np.save(rows, np.concatenate(([tokens], *per_row)))
    publish_file(work / f"{first}.npy", rows.getvalue())


def _write_rows(work: Path, parts: Sequence[int], total: int, counted: dict[str, int]) -> None:
    """Append the row offsets, the checksums and the counts to the segments."""
    rows = tokens = 0
    with (work / "pieces").open("r+b") as out:
        out.seek(total * SEGMENT.itemsize)
        for first in parts:
            part = np.load(work / f"{first}.npy")
            per_row = part[1:]
            out.write((first + np.cumsum(per_row) - per_row).astype("<i8").tobytes())
            rows, tokens = rows + len(per_row), tokens + int(part[0])
        out.write(struct.pack("<q", total))
        out.truncate()
        out.seek(0)
        blocks = [zlib.crc32(block) for block in iter(lambda: out.read(BLOCK_BYTES), b"")]
        checksums = np.array(blocks, "<u4").tobytes()
        counts = {"rows": rows, "pieces": total, "tokens": tokens, **counted}
        counts |= {"block_bytes": BLOCK_BYTES, "blocks_crc32": zlib.crc32(checksums)}
        footer = _dumped({**counts, "crc32": zlib.crc32(_dumped(counts))})
        out.write(checksums + footer + _TAIL.pack(len(footer), _MAGIC))
        out.flush()
        os.fsync(out.fileno())


def _segments(request: PackingRequest, unit: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return the segments of the documents of a unit, each with a prompt before it and cut where it is longer
    than a row, and the counts that `_COUNTED` names."""
    shard, lo, hi = unit.tolist()
    edges = request.store.document_edges(shard, lo, hi).clip(request.span.start, request.span.stop)
    lengths = np.diff(edges)
    starts, lengths = edges[:-1][lengths > 0], lengths[lengths > 0]
    prompt, seq_len = request.prompt, request.seq_len
    documents, whole, lost = len(starts), lengths + prompt, 0
    long = whole > seq_len
    if request.long_docs == "drop":
        lost = int(lengths[long].sum())
        starts, whole = starts[~long], whole[~long]
    if request.long_docs == "truncate":
        lost = int((whole[long] - seq_len).sum())
        whole = np.minimum(whole, seq_len)
    parts = -(-whole // seq_len)
    document = np.repeat(np.arange(len(starts)), parts)
    part = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    segments = np.empty(len(document), SEGMENT)
    segments["start"] = starts[document] + np.where(part > 0, part * seq_len - prompt, 0)
    segments["slots"] = np.minimum(whole[document] - part * seq_len, seq_len)
    segments["flags"] = np.where(part == 0, BEGINS, 0) | np.where(part < parts[document] - 1, CONTINUES, 0)
    return segments, (documents, int(long.sum()), lost)


def best_fit_decreasing(slots: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each segment: longest first, each into the row with the least space that suffices.

    Segments of one length, and rows with the same free space, are handled together.
    """
    row_of = np.empty(len(slots), dtype=np.int64)
    order = np.argsort(-slots, kind="stable")
    values, firsts = np.unique(-slots[order], return_index=True)
    with_room: dict[int, list[np.ndarray]] = defaultdict(list)
    rooms = 0
    rows = 0
    for value, begin, end in zip((-values).tolist(), firsts, [*firsts[1:], len(slots)], strict=True):
        waiting = order[begin:end]
        while len(waiting):
            if fitting := rooms >> value:
                room = value + (fitting & -fitting).bit_length() - 1
                open_rows = with_room[room].pop()
            else:
                room = capacity
                open_rows = np.arange(rows, rows - (-len(waiting) // (capacity // value)))
                rows += len(open_rows)
            each = room // value
            used = min(len(open_rows), -(-len(waiting) // each))
            placed = min(len(waiting), used * each)
            row_of[waiting[:placed]] = np.repeat(open_rows[:used], each)[:placed]
            waiting = waiting[placed:]
            in_last = placed - (used - 1) * each
            for left, filled in (
                (room, open_rows[used:]),
                (room - each * value, open_rows[: used - 1]),
                (room - in_last * value, open_rows[used - 1 : used]),
            ):
                if left and len(filled):
                    with_room[left].append(filled)
                    rooms |= 1 << left
            if not with_room[room]:
                rooms &= ~(1 << room)
    return row_of
