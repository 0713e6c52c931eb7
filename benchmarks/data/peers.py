"""Measure other systems on the same tokens or text, per CPU-second.

A system that is not installed here is searched for in the interpreter that ARRIERO_PEERS_PYTHON names. This
file runs there as a script, so it imports only the standard library at the top.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from arriero.data.store.store import TokenStore

PEERS_PYTHON = "ARRIERO_PEERS_PYTHON"
FMS_CHUNK = 1024
HF_BATCH = 1000


class Measured(NamedTuple):
    """`amount` in `unit` processed in `cpu_s` seconds of user and system time, children included."""

    peer: str
    amount: float
    unit: str
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.amount / self.cpu_s


class PeerAbsent(Exception):
    """The peer cannot be imported here nor in the interpreter of ARRIERO_PEERS_PYTHON."""


def read_hf_datasets(store: "TokenStore", seq_len: int = 8192, rows: int = 512) -> Measured:
    """Read rows of `seq_len` from a memory-mapped Arrow file through `datasets` with format torch."""
    _need("datasets")
    import datasets
    import numpy as np
    import pyarrow as pa

    rows = min(rows, store.tokens // seq_len)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.arrow")
        schema = pa.schema([pa.field("input_ids", pa.list_(pa.int32()))])
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for first in range(0, rows, HF_BATCH):
                count = min(HF_BATCH, rows - first)
                ids = store.read(first * seq_len, count * seq_len).astype(np.int32)
                column = pa.array(list(ids.reshape(count, seq_len)), pa.list_(pa.int32()))
                writer.write_batch(pa.record_batch([column], schema=schema))
        table = datasets.Dataset.from_file(str(path)).with_format("torch")
        with _cpu() as spent:
            tokens = sum(len(table[row]["input_ids"]) for row in range(rows))
    return Measured("datasets, format torch", tokens / 1e6, "Mtok", spent())


def read_fms_path(store: "TokenStore", seq_len: int = 8192, rows: int = 512) -> Measured:
    """Read like fms-fsdp: a batch per document, chunks through `to_pylist`, a list as buffer."""
    import torch

    from arriero.data.exchange import export_dataset

    with tempfile.TemporaryDirectory() as folder:
        export_dataset(store, "fms-arrow", Path(folder, "arrow"))
        files = sorted(Path(folder, "arrow").rglob("*.arrow"))
        buffer: list[int] = []
        made = 0
        with _cpu() as spent:
            for chunk in _fms_chunks(files, store.eos_id):
                buffer += chunk
                while len(buffer) > seq_len and made < rows:
                    row, buffer = buffer[: seq_len + 1], buffer[seq_len:]
                    ids = torch.tensor(row, dtype=torch.int32)
                    _ = ids[:-1], ids[1:].long()
                    made += 1
                if made == rows:
                    break
    return Measured("fms-fsdp (reimplemented)", made * seq_len / 1e6, "Mtok", spent())


def _fms_chunks(files: list[Path], eos_id: int) -> Iterator[list[int]]:
    import pyarrow as pa

    for reader in (pa.ipc.open_file(pa.memory_map(str(path))) for path in files):
        for number in range(reader.num_record_batches):
            document = reader.get_batch(number)["tokens"]
            for begin in range(0, len(document), FMS_CHUNK):
                yield document.slice(begin, FMS_CHUNK).to_pylist()
            yield [eos_id]


def tokenize_datasets_map(jsonl: Path, tokenizer: Path) -> Measured:
    """Run `datasets.map`, batched, with a fast tokenizer of `transformers`, from JSONL to Arrow."""
    _need("datasets", "transformers")
    import datasets
    import transformers

    datasets.disable_progress_bars()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        with _cpu() as spent:
            text = datasets.Dataset.from_json(str(jsonl), cache_dir=folder)
            text.map(
                lambda rows: {"input_ids": fast(rows["text"], add_special_tokens=False)["input_ids"]},
                batched=True,
                remove_columns=text.column_names,
                cache_file_name=str(Path(folder, "mapped.arrow")),
            )
        return Measured("datasets.map", text_megabytes(jsonl), "MB", spent())


def tokenize_datatrove(jsonl: Path, tokenizer: Path) -> Measured:
    """Run datatrove's DocumentTokenizer, one task, from JSONL to `.ds`."""
    if not find_spec("datatrove"):
        return _elsewhere("datatrove", "tokenize_datatrove", jsonl, tokenizer)
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    with tempfile.TemporaryDirectory() as folder:
        steps = [
            JsonlReader(str(jsonl.parent), glob_pattern=jsonl.name),
            DocumentTokenizer(folder, tokenizer_name_or_path=str(tokenizer), shuffle_documents=False),
        ]
        with _cpu() as spent:
            LocalPipelineExecutor(steps, tasks=1, logging_dir=str(Path(folder, "logs"))).run()
        return Measured("datatrove", text_megabytes(jsonl), "MB", spent())


def text_megabytes(jsonl: Path) -> float:
    """Return the size of the texts in UTF-8, without the JSON around them."""
    with jsonl.open("rb") as lines:
        return sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6


READING: dict[str, Callable[..., Measured]] = {
    "datasets": read_hf_datasets,
    "fms-fsdp": read_fms_path,
}
TOKENIZING: dict[str, Callable[..., Measured]] = {
    "datasets.map": tokenize_datasets_map,
    "datatrove": tokenize_datatrove,
}


def _need(*modules: str) -> None:
    if missing := [name for name in modules if not find_spec(name)]:
        raise PeerAbsent(f"{', '.join(missing)} not installed")


def _elsewhere(peer: str, function: str, *paths: Path) -> Measured:
    python = os.environ.get(PEERS_PYTHON)
    if not python:
        raise PeerAbsent(f"{peer} is not installed; name an interpreter that has it in {PEERS_PYTHON}")
    command = [python, "-P", __file__, function, *(str(path.resolve()) for path in paths)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop(PEERS_PYTHON)
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise PeerAbsent(f"{peer} failed in {python}: {last[0]}")
    return Measured(*json.loads(result.stdout.splitlines()[-1]))


@contextmanager
def _cpu():
    """Yield a function that returns the CPU-seconds of the block, finished children included."""

    def now() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    began = now()
    ended: list[float] = []
    yield lambda: ended[0] - began
    ended.append(now())


def _main(function: str, *paths: str) -> None:
    measured: Any = globals()[function](*map(Path, paths))
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
