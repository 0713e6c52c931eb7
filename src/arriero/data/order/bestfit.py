"""The plan of a packing that keeps documents whole: which pieces of which documents make up each row.

A plan is built once and kept as one file, memory-mapped: the pieces (record: position of the first token,
slots taken, flags), then for each row the number of its first piece, then what was counted, as JSON.
"""

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from arriero.data.progress import Progress
from arriero.data.store.store import TokenStore
from arriero.errors import UserError

PLAN_VERSION = 1
GROUP = 2**18
PIECE = np.dtype([("start", "<i8"), ("slots", "<i4"), ("flags", "<i4")])
BEGINS, GOES_ON = 1, 2
_TAIL = struct.Struct("<Q8s")
_MAGIC = b"arrpack1"


class Plan:
    """A plan file, open. Row i is pieces[offsets[i]:offsets[i + 1]]."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(size - _TAIL.size)
            length, magic = _TAIL.unpack(file.read(_TAIL.size))
            if magic != _MAGIC:
                raise ValueError("not a plan")
            file.seek(size - _TAIL.size - length)
            self.counts: dict[str, Any] = json.loads(file.read(length))
        rows, pieces = self.counts["rows"], self.counts["pieces"]
        if size != pieces * PIECE.itemsize + 8 * (rows + 1) + length + _TAIL.size:
            raise ValueError("of another size than it says")
        self.rows: int = rows
        content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        end = pieces * PIECE.itemsize
        self.pieces = content[:end].view(PIECE)
        self.offsets = content[end : end + 8 * (rows + 1)].view("<i8")


def open_plan(
    cache: Path, store: TokenStore, span: range, request: dict[str, Any], progress: Progress
) -> Plan:
    """`request` says how to pack; a plan for the same tokens and request is used again."""
    identity = {
        "plan": PLAN_VERSION,
        "dataset": store.fingerprint,
        "span": [span.start, span.stop],
        **request,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    path = cache / "plans" / f"{key}.plan"
    try:
        return Plan(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (ValueError, KeyError, OSError, struct.error):
        path.unlink(missing_ok=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _build(path, store, span, request, progress)
    except PermissionError as error:
        raise UserError(
            f"the packing plan cannot be kept in {path.parent} ({error.strerror})",
            "set data.cache to a directory you may write",
        ) from None
    return Plan(path)


def _build(path: Path, store: TokenStore, span: range, request: dict[str, Any], progress: Progress) -> None:
    seq_len, prompt = request["seq_len"], request["prompt"]
    counts: dict[str, Any] = defaultdict(int)
    fd, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    making = Path(name)
    try:
        with os.fdopen(fd, "wb") as out, tempfile.TemporaryFile(dir=path.parent) as offsets:
            for pieces in _grouped(store, span, prompt, seq_len, request["long_docs"], counts, progress):
                row = _rows(pieces["slots"], seq_len, request["packing"])
                order = np.argsort(row, kind="stable")
                out.write(pieces[order].tobytes())
                per_row = np.bincount(row)
                ends = counts["pieces"] + np.cumsum(per_row)
                offsets.write((ends - per_row).astype("<i8").tobytes())
                counts["pieces"] += len(pieces)
                counts["rows"] += len(per_row)
                counts["tokens"] += int(pieces["slots"].sum())
            offsets.write(struct.pack("<q", counts["pieces"]))
            offsets.seek(0)
            shutil.copyfileobj(offsets, out)
            footer = json.dumps({"rows": 0, "pieces": 0, "tokens": 0, **counts}).encode()
            out.write(footer + _TAIL.pack(len(footer), _MAGIC))
            out.flush()
            os.fsync(out.fileno())
        making.replace(path)
    finally:
        making.unlink(missing_ok=True)


def _rows(slots: np.ndarray, seq_len: int, packing: str) -> np.ndarray:
    return best_fit_decreasing(slots, seq_len) if packing == "bestfit" else np.arange(len(slots))


def _grouped(
    store: TokenStore,
    span: range,
    prompt: int,
    seq_len: int,
    long_docs: str,
    counts: dict[str, Any],
    progress: Progress,
) -> Iterator[np.ndarray]:
    """The pieces of all documents, in groups of equal size that bound the memory a plan needs."""
    held: list[np.ndarray] = []
    for starts, lengths in store.document_spans(span):
        progress("packing", int(starts[0]) - span.start, len(span))
        for begin in range(0, len(starts), GROUP):
            part = slice(begin, begin + GROUP)
            held.append(_pieces(starts[part], lengths[part], prompt, seq_len, long_docs, counts))
            while sum(map(len, held)) >= GROUP:
                together = np.concatenate(held)
                yield together[:GROUP]
                held = [together[GROUP:]]
    progress("packing", len(span), len(span))
    if held and sum(map(len, held)):
        yield np.concatenate(held)


def _pieces(
    starts: np.ndarray, lengths: np.ndarray, prompt: int, seq_len: int, long_docs: str, counts: dict[str, Any]
) -> np.ndarray:
    """A document with its prompt before it, cut where it is longer than a row."""
    whole = lengths + prompt
    long = whole > seq_len
    counts["documents"] += len(starts)
    counts["long_documents"] += int(long.sum())
    if long_docs == "drop":
        counts["lost_tokens"] += int(lengths[long].sum())
        starts, whole = starts[~long], whole[~long]
    if long_docs == "truncate":
        counts["lost_tokens"] += int((whole[long] - seq_len).sum())
        whole = np.minimum(whole, seq_len)
    parts = -(-whole // seq_len)
    document = np.repeat(np.arange(len(starts)), parts)
    part = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    pieces = np.empty(len(document), PIECE)
    pieces["start"] = starts[document] + np.where(part > 0, part * seq_len - prompt, 0)
    pieces["slots"] = np.minimum(whole[document] - part * seq_len, seq_len)
    pieces["flags"] = np.where(part == 0, BEGINS, 0) | np.where(part < parts[document] - 1, GOES_ON, 0)
    return pieces


def best_fit_decreasing(slots: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece: longest first, each into the fullest row that still takes it.

    Pieces of one length, and rows with the same room, are dealt with together.
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
