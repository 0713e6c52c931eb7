"""Measure packing plans and reading of datasets with many documents or many shards.

python benchmarks/data_scale.py pack FOLDER --documents 20000000 --workers 2
python benchmarks/data_scale.py read FOLDER --shards 40000 --samples 20000
"""

import argparse
import os
import resource
import time
from pathlib import Path

import numpy as np

from arriero.data.order.loader import Loader
from arriero.data.order.order import Stream
from arriero.data.order.packing import TokenSource
from arriero.data.order.packing_plan import PackingRequest, make_plan
from arriero.data.store.manifest import write_manifest
from arriero.data.store.shards import IDX_HEADER, IDX_MAGIC, IDX_VERSION, Shard
from arriero.data.store.store import TokenStore
from arriero.data.workers import no_progress


def hollow_dataset(folder: Path, shards: int, documents: int, mean: float, seed: int = 1) -> TokenStore:
    """Shards with documents of log-normal lengths, whose tokens are holes in the file: all zero."""
    if (folder / "manifest.json").exists():
        return TokenStore.open(folder)
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    random, written = np.random.default_rng(seed), []
    for number in range(shards):
        n = documents // shards
        lengths = np.maximum(1, random.lognormal(np.log(mean) - 0.72, 1.2, n)).astype("<i4")
        pointers = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))) * 2
        header = IDX_HEADER.pack(IDX_MAGIC, IDX_VERSION, 8, n, n + 1)
        table = np.arange(n + 1, dtype="<i8")
        name = f"{number:05d}"
        content = header + lengths.tobytes() + pointers.astype("<i8").tobytes() + table.tobytes()
        (folder / f"{name}.idx").write_bytes(content)
        tokens = int(lengths.sum())
        with (folder / f"{name}.bin").open("wb") as file:
            file.truncate(2 * tokens)
        written.append(Shard(name, tokens, n, 0, "0" * 64, "0" * 64))
    about = {"vocab_size": 1000, "eos_id": 0, "dtype": "uint16", "about": {}}
    write_manifest(folder, written, tokenizer="tokenizer.json", **about)
    return TokenStore.open(folder)


def pack(arguments: argparse.Namespace) -> None:
    store = hollow_dataset(arguments.folder / "documents", 16, arguments.documents, 600)
    request = PackingRequest(store, range(store.tokens), "bestfit", "split", arguments.seq_len, 0)
    folder = arguments.folder / "plans"
    (folder / request.name).unlink(missing_ok=True)
    begin = time.perf_counter()
    plan = make_plan(folder, request, arguments.workers, no_progress)
    seconds = time.perf_counter() - begin
    filled = plan.counts["tokens"] / (plan.rows * arguments.seq_len)
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu = sum(used.ru_utime + used.ru_stime for used in (own, children))
    print(f"{store.documents:,} documents, {arguments.workers} processes: {seconds:.1f} s, {cpu:.1f} CPU-s")
    print(f"{store.documents / seconds:,.0f} documents/s, {store.documents / cpu:,.0f} per CPU-s")
    print(f"{filled:.3%} of the slots filled; peak {max(own.ru_maxrss, children.ru_maxrss) / 1024:.0f} MiB")


def read(arguments: argparse.Namespace) -> None:
    store = hollow_dataset(arguments.folder / "shards", arguments.shards, 64 * arguments.shards, 600)
    stream = Stream([TokenSource(store)], arguments.seq_len, 1, version=arguments.order)
    opened, original = [0], os.open

    def counting(*more, **options):
        opened[0] += 1
        return original(*more, **options)

    os.open = counting
    batches = arguments.samples // 64
    begin, used = time.perf_counter(), time.process_time()
    with Loader(stream, 64, documents=arguments.mask, threads=arguments.threads) as loader:
        for _ in range(batches):
            next(loader)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - used
    samples = 64 * batches
    print(f"{arguments.shards:,} shards, order {arguments.order}: {samples:,} samples of {arguments.seq_len}")
    print(f"{opened[0] / samples:.3f} opens per sample, {opened[0] / seconds:,.0f} opens/s")
    print(f"{samples / seconds:,.0f} samples/s, {samples / cpu:,.0f} per CPU-s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["pack", "read"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=40_000)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--order", type=int, default=2)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--mask", action="store_true", help="read document boundaries too")
    arguments = parser.parse_args()
    {"pack": pack, "read": read}[arguments.what](arguments)


if __name__ == "__main__":
    main()
