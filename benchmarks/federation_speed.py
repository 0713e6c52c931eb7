"""Throughput and peak memory of the aggregation against a plain copy of the same bytes on the same disk.

`python -m benchmarks.federation_speed --layers 2 --members 4` prints a row for docs/federation.md.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from arriero.checkpoint.formats.model_reader import ModelReader
from arriero.federate.aggregation import Contribution, aggregate
from arriero.federate.members import publish_first_model, write_member
from arriero.federate.outer import OuterOptimizer
from arriero.files import sync_tree
from arriero.model.name_maps import own_tensors
from arriero.model.presets import load_preset

DILOCO = OuterOptimizer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama3.1-8b")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--aggregate", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.aggregate:
        measure(given)
        return
    with tempfile.TemporaryDirectory(dir=given.work) as name:
        folder = Path(name)
        largest = make(given, folder)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.federation_speed", *sys.argv[1:], "--aggregate", name],
            check=True,
            capture_output=True,
            text=True,
        )
        seconds, peak, read = map(float, done.stdout.split())
        drop(folder)
        started = time.monotonic()
        shutil.copytree(folder / "inputs", folder / "copy")
        sync_tree(folder / "copy")
        copied = time.monotonic() - started
    size, speed, plain = f"{read / 2**30:.1f} GiB", read / seconds / 1e9, read / copied / 1e9
    print("| inputs | members | codec | aggregation | plain copy | ratio | peak memory | largest tensor |")
    print(
        f"| {size} | {given.members} | {given.codec} | {speed:.2f} GB/s | {plain:.2f} GB/s | "
        f"{copied / seconds:.0%} | {peak / 2**30:.2f} GiB | {largest / 2**30:.2f} GiB |"
    )


def make(given: argparse.Namespace, folder: Path) -> int:
    """Write a global model with outer state and members; return the bytes of the largest tensor."""
    spec = replace(load_preset(given.preset), layers=given.layers)
    tensors = own_tensors(spec)

    def load(name: str, shift: float = 0.0):
        return torch.full(tensors[name].shape, 0.01 + shift)

    inputs = folder / "inputs"
    inputs.mkdir()
    source = ModelReader("memory", "constants", spec, tensors, load)
    publish_first_model(source, folder / "first", DILOCO)
    for i in range(given.members):
        about = {"site": f"s{i}", "round": 0, "tokens": 1000, "first_step": 0, "step": 10}
        local = ModelReader(
            "memory", "constants", spec, tensors, lambda name, i=i: load(name, 1e-3 * (i + 1))
        )
        write_member(folder / "first", local, inputs / f"s{i}", given.codec, **about)
    # one round first, so that there is outer state to read
    aggregate(folder / "first", contributions(given, inputs, folder / "first"), DILOCO, inputs / "global")
    shutil.rmtree(folder / "first")
    return max(tensor.numel() * 4 for tensor in tensors.values())


def contributions(given: argparse.Namespace, inputs: Path, base: Path) -> list[Contribution]:
    return [
        Contribution(inputs / f"s{i}", f"s{i}", 0, given.codec, 1000, 1000, base)
        for i in range(given.members)
    ]


def measure(given: argparse.Namespace) -> None:
    """Aggregate in this process; print seconds, peak memory above the start, and bytes read."""
    folder = Path(given.aggregate[0])
    inputs = folder / "inputs"
    parts = contributions(given, inputs, inputs / "global")
    drop(folder)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    started = time.monotonic()
    aggregate(inputs / "global", parts, DILOCO, folder / "out")
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(seconds, peak, sum(path.stat().st_size for path in inputs.rglob("*") if path.is_file()))


def drop(folder: Path) -> None:
    """Write everything back and drop it from the page cache, so that both sides read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    main()
