"""The table of `arriero data bench`: what preparing and reading cost here, beside the peers, in one run."""

import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from arriero.data.bench.loader import (
    measure_opening,
    measure_reading,
    write_empty_shards,
    write_random_documents,
)
from arriero.data.bench.peers import (
    PeerAbsent,
    read_fms_path,
    read_hf_datasets,
    tokenize_datasets_map,
    tokenize_datatrove,
)
from arriero.data.bench.prepare import bare_encode_speed, bare_file_encode_speed, prepare_speed
from arriero.data.tokens.tokenizer import train_tokenizer
from arriero.errors import UserError

VOCABULARY = 8192
SLOW_PEER_BYTES = 4_000_000
LOADER_TOKENS = 30_000_000


class Row(NamedTuple):
    """`value` is None where the peer is not installed; then `remark` says so."""

    what: str
    name: str
    value: float | None
    unit: str
    remark: str = ""


def write_python_text(path: Path, size: int) -> int:
    """JSONL of this interpreter's own Python files, one a line; the bytes written."""
    written = 0
    with path.open("wb") as out:
        for text in _python_texts():
            written += out.write(json.dumps({"text": text}).encode() + b"\n")
            if written >= size:
                break
    return written


def _python_texts() -> Iterator[str]:
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    for folder in sorted(folders):
        for path in sorted(folder.rglob("*.py")):
            try:
                yield path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue


def measure(folder: Path, size: int, text: Path | None, tell: Callable[[str], None]) -> list[Row]:
    """All measurements, one after the other; `tell` hears which is under way."""
    tell("gathering text")
    jsonl = text or folder / "text.jsonl"
    if text is None and write_python_text(jsonl, size) < size / 2:
        raise UserError("this Python has too little text of its own", "give a JSONL file with --text")
    slow = folder / "slow.jsonl"
    _copy_lines(jsonl, slow, SLOW_PEER_BYTES)
    tell("training a tokenizer")
    tokenizer = folder / "tokenizer.json"
    train_tokenizer([json.loads(line)["text"] for line in slow.open("rb")], VOCABULARY, tokenizer)
    return [
        *_preparing(jsonl, slow, tokenizer, tell),
        *_reading(folder, tell),
        *_opening(folder, tell),
    ]


def _preparing(jsonl: Path, slow: Path, tokenizer: Path, tell: Callable[[str], None]) -> Iterator[Row]:
    what = f"prepare, {jsonl.stat().st_size / 1e6:.0f} MB of JSONL"
    for function in (prepare_speed, bare_file_encode_speed, bare_encode_speed):
        tell(f"{what}: {function.__name__.replace('_', ' ')}")
        speed = function([jsonl], tokenizer)
        yield Row(what, speed.name, speed.mb_per_cpu_s, "MB/CPU-s")
    for name, function in (("datatrove", tokenize_datatrove), ("datasets.map", tokenize_datasets_map)):
        tell(f"prepare: {name}")
        remark = f"on the first {slow.stat().st_size / 1e6:.0f} MB"
        yield _peer(what, name, "MB/CPU-s", lambda function=function: function(slow, tokenizer).rate, remark)


def _reading(folder: Path, tell: Callable[[str], None]) -> Iterator[Row]:
    what = "read 8K windows, labels, document boundaries, positions"
    tell("reading: arriero")
    store = write_random_documents(folder / "random", LOADER_TOKENS)
    reading = measure_reading(store)
    yield Row(what, "arriero", reading.tokens_per_cpu_second / 1e6, "Mtok/CPU-s")
    for name, function in (("fms-fsdp's path", read_fms_path), ("HF datasets", read_hf_datasets)):
        tell(f"reading: {name}")
        yield _peer(what, name, "Mtok/CPU-s", lambda function=function: function(store).rate)
    yield Row("loader state", "arriero", reading.state_bytes, "bytes")


def _opening(folder: Path, tell: Callable[[str], None]) -> Iterator[Row]:
    what = "open 1,000,000 shards"
    tell(what)
    write_empty_shards(folder / "million", 1_000_000)
    opening = measure_opening(folder / "million")
    yield Row(what, "arriero", opening.cpu_seconds, "CPU-s")
    yield Row(what, "arriero", opening.resident_bytes / 1e6, "MB resident", "without torch")


def _peer(what: str, name: str, unit: str, rate: Callable[[], float], remark: str = "") -> Row:
    try:
        return Row(what, name, rate(), unit, remark)
    except PeerAbsent as absent:
        return Row(what, name, None, unit, str(absent))


def _copy_lines(source: Path, target: Path, size: int) -> None:
    with source.open("rb") as lines, target.open("wb") as out:
        while out.tell() < size and (line := lines.readline()):
            out.write(line)
