"""Files that grow during training: the event log, metrics; and writing despite a full disk."""

import errno
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

_KEPT_RECORDS = 20_000
_TAIL = 1 << 18

EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
# written when a signal ends a run, removed by the next start: job scripts read it
STOPPED = "stopped.json"
# written by rank 0 while it runs, followed by a supervisor
HEARTBEAT = "heartbeat.json"
# environment variable of a command line: when it started
STARTED = "ARRIERO_STARTED"
START_OVER = "start over"
_LATEST = 1e11
# the types of fields that readers compute with; a measurement may be null
_COUNTS = ("time", "step", "steps", "tokens", "seconds", "lr", "step_s", "startup_s", "to_step")
_MEASURED = (
    *("loss", "eval_loss", "grad_norm", "tokens_per_s", "data_wait", "mfu", "hfu", "eval_s", "save_s"),
    *(
        "peak_mem_gib",
        "reserved_mem_gib",
        "joules",
        "joules_per_token",
        "energy_kwh",
        "waited_s",
        "blocked_s",
        "written_s",
    ),
    *("started", "submitted", "tasks_per_node"),
)
_TYPES: dict[str, Any] = dict.fromkeys(_COUNTS, int | float) | dict.fromkeys(_MEASURED, int | float | None)
_TYPES |= {"event": str, "ranks": int | list, "nodes": list, "eval_losses": dict | None}


def events_since(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events after the last one of a kind, or all."""
    found: list[dict[str, Any]] = []
    for event in read_events(path):
        if event["event"] == kind:
            found.clear()
        else:
            found.append(event)
    return found


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file; records without a kind or a time are ignored."""
    for record in read_records(path):
        if "event" in record and 0 <= (record.get("time") or -1) < _LATEST:
            yield record


def end_of(run_dir: Path) -> dict[str, Any] | None:
    """Return the event with which training has ended; None if it runs, was stopped or has not started.

    A supervisor writes events of its own after it.
    """
    history = events_since(run_dir / EVENTS, START_OVER)
    last = next((event for event in reversed(history) if event["event"] in ("start", "end")), None)
    return last if last is not None and last["event"] == "end" else None


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that count: a step that is taken again replaces it and later ones."""
    kept: list[dict[str, Any]] = []
    for line in read_records(run_dir / METRICS):
        if isinstance(line.get("step"), int):
            while kept and kept[-1]["step"] >= line["step"]:
                kept.pop()
            kept.append(line)
    return kept


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file with one per line. Damaged lines are ignored: see `parse_record`."""
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        yield from filter(None, map(parse_record, file))


def parse_record(line: str | bytes) -> dict[str, Any]:
    """Return a line of events.jsonl, metrics.jsonl or jobs.jsonl; nothing if it is damaged.

    Half a line is left by a kill. Numbers that are not finite become None. The readers rely on `_TYPES`.
    """
    try:
        record = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    known = ((value, _TYPES[key]) for key, value in record.items() if key in _TYPES)
    return record if all(isinstance(value, kind) for value, kind in known) else {}


def last_record(path: Path, name: str) -> dict[str, Any]:
    """Return the newest record that has a value of this name near the end of a file, or {}."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        found = (parse_record(line) for line in reversed(file.read().splitlines()))
        return next((record for record in found if record.get(name) is not None), {})
    return {}


def say(text: str) -> None:
    """Print a line to stderr at once; it may itself be on a full disk."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def warn(text: str) -> None:
    say(f"warning: {text}")


class Output:
    """A text stream on a disk that may be full: what cannot be written stays in the buffer or is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _ignoring_full_disk():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _ignoring_full_disk():
            self._stream.flush()

    def finish(self) -> None:
        """Flush at the end of the process; what cannot be written must not change the exit code."""
        try:
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def _ignoring_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise


class TolerantWriter:
    """Write a file that training can do without: report the first failure and the first success after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failing = False

    def attempt(self, work: Callable[[], object], kept: str) -> bool:
        """Return whether `work` succeeded; `kept` says in the warning what happens to the data."""
        try:
            work()
        except OSError as error:
            if not self._failing:
                warn(f"{self.path} cannot be written ({error.strerror or error}); training continues, {kept}")
            self._failing = True
            return False
        if self._failing:
            warn(f"{self.path} is written again")
        self._failing = False
        return True


class AppendedFile:
    """Append records to a file. The newest 20,000 that cannot be written wait in memory."""

    def __init__(self, path: Path) -> None:
        self._path, self._writer = path, TolerantWriter(path)
        self._waiting: deque[bytes] = deque(maxlen=_KEPT_RECORDS)

    def append(self, record: bytes) -> None:
        self._waiting.append(record)
        self._writer.attempt(self._write, f"and its newest {_KEPT_RECORDS:,} records are kept in memory")

    def close(self) -> None:
        """Try once more to write, and report the records that are lost."""
        if self._waiting and not self._writer.attempt(self._write, ""):
            warn(f"{len(self._waiting):,} records of {self._path} are lost: it could not be written")

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            while self._waiting:
                end, record = os.fstat(descriptor).st_size, self._waiting[0]
                if os.write(descriptor, record) < len(record):
                    # half a record would make the next one unreadable
                    os.ftruncate(descriptor, end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._waiting.popleft()
        finally:
            os.close(descriptor)


def finite(value: Any) -> Any:
    """Return None for numbers that are not finite, also inside of others, because JSON has none."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class LineFile(AppendedFile):
    """A file with one JSON object per line; numbers that are not finite become null."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # a killed process may have left half a line
        with suppress(OSError), path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                self.append(b"\n")

    def line(self, fields: dict[str, Any]) -> None:
        self.append(json.dumps(finite(fields)).encode() + b"\n")


class EventLog(LineFile):
    """events.jsonl: what happened to a run, and when."""

    def write(self, kind: str, **fields: Any) -> None:
        self.line({"time": round(time.time(), 3), "event": kind, **fields})
