"""Measure how fast text becomes shards, beside the bare encoder.

Each speed is MB of input per CPU-second of a separate process, start-up included.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from arriero.data.tokens.encoders import GigatokenEncoder
from arriero.data.tokens.tokenizer import read_definition
from arriero.errors import UserError

BATCH_CHARS = 2**21


class Speed(NamedTuple):
    name: str
    mb: float
    cpu_s: float
    tokens: int

    @property
    def mb_per_cpu_s(self) -> float:
        return self.mb / self.cpu_s


def prepare_speed(files: Sequence[Path], tokenizer: Path, column: str = "text") -> Speed:
    """Run `arriero data prepare` with one worker, from JSONL to finished shards on disk."""
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as folder:
        target = Path(folder) / "set"
        command = [sys.executable, "-m", "arriero", "data", "prepare", *map(str, files), "-o", str(target)]
        seconds = _cpu_seconds([*command, "--tokenizer", str(tokenizer), "--column", column])
        shards = json.loads((target / "manifest.json").read_bytes())["shards"]
        return Speed("arriero data prepare", _megabytes(files), seconds, sum(shards["tokens"]))


def bare_encode_speed(files: Sequence[Path], tokenizer: Path, column: str = "text") -> Speed:
    """Encode parsed texts in memory with gigatoken, batch by batch, without reading or writing."""
    return _in_process("gigatoken, texts in memory", encode_texts_in_memory, files, tokenizer, column)


def bare_file_encode_speed(files: Sequence[Path], tokenizer: Path, column: str = "text") -> Speed:
    """Encode JSONL files to ids in memory with gigatoken and its own reader."""
    return _in_process("gigatoken, encode_files", encode_files_in_memory, files, tokenizer, column)


def encode_texts_in_memory(files: Sequence[str], tokenizer: str, column: str) -> tuple[float, int]:
    backend = GigatokenEncoder(read_definition(Path(tokenizer)))
    seconds, tokens = 0.0, 0
    for file in files:
        with Path(file).open("rb") as lines:
            while block := lines.readlines(BATCH_CHARS):
                texts = [json.loads(line)[column] for line in block]
                before = _own_cpu()
                tokens += len(backend.encode(texts).ids)
                seconds += _own_cpu() - before
    return seconds, tokens


def encode_files_in_memory(files: Sequence[str], tokenizer: str, column: str) -> tuple[float, int]:
    import gigatoken

    encoder = gigatoken.Tokenizer.from_json(read_definition(Path(tokenizer)))
    before, tokens = _own_cpu(), 0
    for file in files:
        source = gigatoken.JsonlFileSource([file], field=column)
        layout: Any = encoder.encode_files(source, parallel=False).layout
        tokens += len(layout.content.data)
    return _own_cpu() - before, tokens


def _in_process(
    name: str, measure: Callable[..., tuple[float, int]], files: Sequence[Path], tokenizer: Path, column: str
) -> Speed:
    """Call `measure` in a new interpreter, which runs this file as a script."""
    arguments = json.dumps([[str(file) for file in files], str(tokenizer), column])
    command = [sys.executable, __file__, measure.__name__, arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{name} cannot be measured ({done.stderr.strip().splitlines()[-1]})")
    seconds, tokens = json.loads(done.stdout)
    return Speed(name, _megabytes(files), seconds, tokens)


def _cpu_seconds(command: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{command[3]} {command[4]} failed: {done.stderr.strip()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _megabytes(files: Sequence[Path]) -> float:
    return sum(Path(file).stat().st_size for file in files) / 1e6


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
