"""Measure opening and reading a dataset: start-up, resident memory and tokens per CPU-second."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import arriero
from arriero.data.order.packing import CONCAT, Packing, TokenSource
from arriero.data.store.manifest import write_manifest
from arriero.data.store.shards import Shard, ShardWriter, dtype_for
from arriero.data.store.store import TokenStore


class Opening(NamedTuple):
    """Cost of a fresh process that imports numpy and opens a dataset."""

    cpu_seconds: float
    resident_bytes: int
    peak_bytes: int


class Reading(NamedTuple):
    tokens: int
    cpu_seconds: float
    state_bytes: int

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.tokens / self.cpu_seconds


_OPEN = """
import json, sys, time
from pathlib import Path
from arriero.data.store.store import TokenStore
begin = time.process_time()
store = TokenStore.open(Path(sys.argv[1]))
spent = time.process_time() - begin
status = Path("/proc/self/status").read_text()
resident, peak = (int(status.split(name)[1].split()[0]) * 1024 for name in ("VmRSS:", "VmHWM:"))
print(json.dumps([spent, resident, peak]))
"""


def write_empty_shards(directory: Path, shards: int) -> None:
    """Write the manifest of a dataset without the shards that it names."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text("{}")
    table = [Shard(f"{i:07d}", 10**9, 10**6, 4 * 10**9, "0" * 64, "1" * 64) for i in range(shards)]
    write_manifest(
        directory, table, tokenizer="tokenizer.json", vocab_size=9, eos_id=0, dtype="uint16", about={}
    )


def write_random_documents(
    directory: Path, tokens: int, mean_length: int = 1000, seed: int = 1
) -> TokenStore:
    """Write documents of random tokens below 32,000 with log-normal lengths."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text("{}")
    generator = np.random.default_rng(seed)
    with ShardWriter(directory, "00000", 32_000) as writer:
        while writer.tokens < tokens:
            length = max(1, int(generator.lognormal(np.log(mean_length) - 0.5, 1.0)))
            writer.add(generator.integers(1, 32_000, length))
        shard = writer.close()
    dtype = dtype_for(32_000)
    write_manifest(
        directory, [shard], tokenizer="tokenizer.json", vocab_size=32_000, eos_id=0, dtype=dtype, about={}
    )
    return TokenStore.open(directory)


def measure_opening(directory: Path) -> Opening:
    command = [sys.executable, "-c", _OPEN, str(directory)]
    paths = [str(Path(arriero.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return Opening(*json.loads(result.stdout))


def measure_reading(
    store: TokenStore,
    seq_len: int = 8192,
    batch_sequences: int = 32,
    tokens: int = 50_000_000,
    document_mask: bool = True,
    packing: Packing = CONCAT,
) -> Reading:
    """Measure the CPU time of all threads of this process while a loader returns `tokens` real tokens."""
    from arriero.data.order.loader import Loader
    from arriero.data.order.order import Stream

    stream = Stream([TokenSource(store)], seq_len, seed=1, packing=packing)
    with Loader(stream, batch_sequences, documents=document_mask) as loader:
        next(loader)
        begin, read = time.process_time(), 0
        while read < tokens:
            read += next(loader).real_tokens
        spent = time.process_time() - begin
        return Reading(read, spent, len(json.dumps(loader.state())))
