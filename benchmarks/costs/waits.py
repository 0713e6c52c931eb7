"""Measure the waits before and between steps: start-up and data."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import arriero
from arriero.bench.matrix import main_error
from arriero.data.order.loader import Loader
from arriero.data.order.order import Stream
from arriero.data.order.packing import TokenSource
from arriero.data.store.store import TokenStore
from arriero.errors import UserError
from benchmarks.costs.result import Cost, Row
from benchmarks.costs.sizes import Place
from benchmarks.data.reading import write_random_documents

_BATCH = 32
_SKIPPED = 3
_TIMEOUT_S = 600.0


def start_up(place: Place) -> Cost:
    """Measure start-up; the first start, in an empty folder, prepares the corpus."""
    folder = place.folder / "start-up"
    folder.mkdir(exist_ok=True)
    times = range(place.sizes.starts)
    made = _first_step(folder, place.device, "made")
    rows = [
        _row("`arriero --help`", [_ended(folder, ["-m", "arriero", "--help"]) for _ in times]),
        _row("`import torch` alone", [_ended(folder, ["-c", "import torch"]) for _ in times]),
        _row(
            "`arriero train` to its first step done",
            [_first_step(folder, place.device, f"start-{i}") for i in times],
        ),
        _row("the same in an empty folder", [made]),
    ]
    return Cost(
        name="start-up",
        explanation="From the start of a new process. `arriero train` runs the embedded default: its first "
        "step follows an evaluation of the initial model; in an empty folder it first prepares its corpus "
        f"and tokenizer. Medians of {place.sizes.starts} starts; the last row is one start.",
        settings={},
        rows=tuple(rows),
    )


def _row(what: str, seconds: Sequence[float]) -> Row:
    return Row(what=what, values={"s": statistics.median(seconds)}, samples={"s": tuple(seconds)})


def _environment() -> dict[str, str]:
    paths = [str(Path(arriero.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _ended(folder: Path, arguments: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=_environment(), check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - began


def _first_step(folder: Path, device: str, name: str) -> float:
    """Start a run and stop it when the first line of metrics.jsonl, after its first step, is written."""
    metrics = folder / "runs" / name / "metrics.jsonl"
    keys = ["--set", f"run.name={name}", "--set", f"run.device={device}"]
    began = time.perf_counter()
    with (folder / f"{name}.txt").open("w+", encoding="utf-8") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "arriero", "train", *keys],
            cwd=folder,
            env=_environment(),
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            while not metrics.exists() or not metrics.stat().st_size:
                if process.poll() is not None or time.perf_counter() - began > _TIMEOUT_S:
                    said.seek(0)
                    why = main_error("", said.read()) or "it took no step"
                    raise UserError(f"`arriero train` did not start: {why}", "try it by itself")
                time.sleep(0.005)
            return time.perf_counter() - began
        finally:
            process.kill()
            process.wait()


def data_wait(place: Place) -> Cost:
    sizes = place.sizes
    store = write_random_documents(place.folder / "documents", sizes.tokens)
    rows = [
        _drawn(place, store, seq_len, documents) for documents in (False, True) for seq_len in sizes.seq_lens
    ]
    return Cost(
        name="data-wait",
        explanation=f"The share of time spent waiting for a batch of {_BATCH} sequences when steps consume "
        f"{sizes.tokens_per_s:,.0f} tokens per second: a consumer sleeps between batches of the ordinary "
        "loader. One rank, one reader thread, documents of 1,000 tokens on average in the page cache.",
        settings={},
        rows=tuple(rows),
    )


def _drawn(place: Place, store: TokenStore, seq_len: int, documents: bool) -> Row:
    period = _BATCH * seq_len / place.sizes.tokens_per_s
    stream = Stream([TokenSource(store)], seq_len, seed=1)
    pin = place.device != "cpu" and torch.cuda.is_available()
    waits = []
    with Loader(stream, _BATCH, documents=documents, pin=pin) as loader:
        for _ in range(_SKIPPED + max(2, round(place.sizes.drawn_s / period))):
            began = time.perf_counter()
            next(loader)
            waits.append(time.perf_counter() - began)
            time.sleep(period)
    waits = waits[_SKIPPED:]
    values = {
        "% of the time": 100 * sum(waits) / (sum(waits) + period * len(waits)),
        "ms per step": 1e3 * period,
        "ms waited, median": 1e3 * statistics.median(waits),
        "ms waited, longest": 1e3 * max(waits),
    }
    what = f"sequences of {seq_len}{', with document masks' if documents else ''}"
    return Row(what=what, values=values, samples={"ms waited": tuple(1e3 * wait for wait in waits)})
