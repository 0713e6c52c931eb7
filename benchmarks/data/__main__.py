"""Measure data preparation and reading on this machine, beside other systems that are installed.

python -m benchmarks.data --size 1GB
"""

import json
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from arriero.config.options import read_size
from arriero.data.tokens.tokenizer import train_tokenizer
from arriero.errors import UserError
from benchmarks.data.peers import (
    PeerAbsent,
    read_fms_path,
    read_hf_datasets,
    tokenize_datasets_map,
    tokenize_datatrove,
)
from benchmarks.data.preparing import bare_encode_speed, bare_file_encode_speed, prepare_speed
from benchmarks.data.reading import (
    measure_opening,
    measure_reading,
    write_empty_shards,
    write_random_documents,
)
from benchmarks.script import run_script

VOCABULARY = 8192
SLOW_PEER_BYTES = 4_000_000
LOADER_TOKENS = 30_000_000


class Row(NamedTuple):
    """One measurement; `value` is None if the system is not installed, and `remark` says so."""

    what: str
    name: str
    value: float | None
    unit: str
    remark: str = ""


def write_python_text(path: Path, size: int) -> int:
    """Write the Python files of this interpreter as JSONL and return the number of bytes."""
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


def measure(folder: Path, size: int, text: Path | None, report: Callable[[str], None]) -> list[Row]:
    """Run all measurements in turn; `report` receives the name of the current one."""
    report("gathering text")
    jsonl = text or folder / "text.jsonl"
    if text is None and write_python_text(jsonl, size) < size / 2:
        raise UserError("this Python has too little text of its own", "give a JSONL file with --text")
    slow = folder / "slow.jsonl"
    _copy_lines(jsonl, slow, SLOW_PEER_BYTES)
    report("training a tokenizer")
    tokenizer = folder / "tokenizer.json"
    train_tokenizer([json.loads(line)["text"] for line in slow.open("rb")], VOCABULARY, tokenizer)
    return [
        *_preparing(jsonl, slow, tokenizer, report),
        *_reading(folder, report),
        *_opening(folder, report),
    ]


def _preparing(jsonl: Path, slow: Path, tokenizer: Path, report: Callable[[str], None]) -> Iterator[Row]:
    what = f"prepare, {jsonl.stat().st_size / 1e6:.0f} MB of JSONL"
    for function in (prepare_speed, bare_file_encode_speed, bare_encode_speed):
        report(f"{what}: {function.__name__.replace('_', ' ')}")
        speed = function([jsonl], tokenizer)
        yield Row(what, speed.name, speed.mb_per_cpu_s, "MB/CPU-s")
    for name, function in (("datatrove", tokenize_datatrove), ("datasets.map", tokenize_datasets_map)):
        report(f"prepare: {name}")
        remark = f"on the first {slow.stat().st_size / 1e6:.0f} MB"
        yield _peer(what, name, "MB/CPU-s", lambda function=function: function(slow, tokenizer).rate, remark)


def _reading(folder: Path, report: Callable[[str], None]) -> Iterator[Row]:
    what = "read 8K windows, labels, document boundaries, positions"
    report("reading: arriero")
    store = write_random_documents(folder / "random", LOADER_TOKENS)
    reading = measure_reading(store)
    yield Row(what, "arriero", reading.tokens_per_cpu_second / 1e6, "Mtok/CPU-s")
    for name, function in (("fms-fsdp's path", read_fms_path), ("HF datasets", read_hf_datasets)):
        report(f"reading: {name}")
        yield _peer(what, name, "Mtok/CPU-s", lambda function=function: function(store).rate)
    yield Row("loader state", "arriero", reading.state_bytes, "bytes")


def _opening(folder: Path, report: Callable[[str], None]) -> Iterator[Row]:
    what = "open 1,000,000 shards"
    report(what)
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
        while out.report() < size and (line := lines.readline()):
            out.write(line)


def main(
    size: Annotated[str, typer.Option(help="Amount of text to prepare, from Python's own files.")] = "100MB",
    text: Annotated[Path | None, typer.Option(help="Use this JSONL file with a text column instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure data preparation and reading on this machine, beside other systems that are installed.

    datatrove is also searched for in the interpreter that ARRIERO_PEERS_PYTHON names.
    """
    wanted = read_size("--size", size)
    if text is not None and not text.is_file():
        raise UserError(f"there is no file {text}", "give a JSONL file")
    console = Console(highlight=False, stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as folder, console.status("") as status:
        rows = measure(Path(folder), wanted, text, status.update)
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return
    table = Table("what", "system", "result", "", "", box=None, header_style="bold")
    for row in rows:
        value = "-" if row.value is None else f"{row.value:,.3g}" if row.value < 100 else f"{row.value:,.0f}"
        table.add_row(row.what, row.name, value, row.unit, row.remark)
    console.print(table)


if __name__ == "__main__":
    run_script(main)
