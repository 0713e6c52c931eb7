"""`bench matrix`: models x layouts x modes, each cell a process of its own that may fail without the rest."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arriero.bench.result import Part, Result, Stored
from arriero.config.fields import toml_value
from arriero.model.presets import resolve
from arriero.units import counted

MODES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "compile": {"precision.compile": True},
    "float8": {"precision.float8": "tensorwise"},
    "selective AC": {"memory.activation_checkpointing": "selective"},
    "all together": {
        "precision.compile": True,
        "precision.float8": "tensorwise",
        "memory.activation_checkpointing": "selective",
    },
}
LAYOUTS = ("1 process", "DDP", "FSDP", "HSDP")
# the fewest ranks in which a layout is what its name says
_LEAST = {"1 process": 1, "DDP": 2, "FSDP": 2, "HSDP": 4}
_LAST_WORDS = re.compile(r"^[\w.]+(?:Error|Exception)\b.*", re.MULTILINE)


@dataclass(frozen=True)
class Model:
    """Sequences are a rank's, at once; `small` are the dimensions of its small sister, `extra` settings it
    needs to fit."""

    preset: str
    sequences: int
    seq_len: int
    small: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)


def _narrow(heads: int, kv_heads: int, layers: int, ffn: int) -> dict[str, Any]:
    shape = {"layers": layers, "dim": 16 * heads, "heads": heads, "kv_heads": kv_heads, "head_dim": 16}
    return {f"model.{name}": value for name, value in (shape | {"ffn": ffn, "vocab_size": 4096}).items()}


# batches of the benchmark that the first two are from; the others' are those of their peers' records
MODELS: dict[str, Model] = {
    "gpt2-1.5b": Model("bench-gpt2-1.5b", 8, 1024, _narrow(4, 4, 2, 256)),
    "llama3.1-70b-proxy": Model("bench-llama-3.1-70b-proxy", 2, 4096, _narrow(8, 1, 1, 448)),
    "llama3.1-8b": Model(
        "llama3.1-8b",
        1,
        8192,
        _narrow(4, 1, 2, 224),
        {"precision.master": "bf16", "optim.state": "bf16"},
    ),
    "llama3.2-1b": Model("llama3.2-1b", 4, 8192, _narrow(4, 1, 2, 256)),
}
SMALL_SEQUENCES, SMALL_SEQ_LEN = 2, 64


class Cell(Part):
    """`problem` is empty where there is a result."""

    model: str
    layout: str
    mode: str
    ranks: int
    result: Result | None
    problem: str

    @property
    def failed(self) -> bool:
        """Not where there are too few GPUs for it."""
        return self.result is None and self.problem != _too_few(self.ranks)


def _too_few(ranks: int) -> str:
    return f"needs {counted(ranks, 'GPU')}"


class Matrix(Stored):
    MADE_BY = "arriero bench matrix"

    schema_version: int = 1
    time: str
    small: bool
    accumulate: int
    cells: list[Cell]

    def of(self, model: str, layout: str, mode: str) -> Cell | None:
        wanted = (model, layout, mode)
        return next((c for c in self.cells if (c.model, c.layout, c.mode) == wanted), None)


@dataclass(frozen=True)
class Order:
    """What is to be run, and how each cell is."""

    models: Sequence[str]
    layouts: Sequence[str]
    modes: Sequence[str]
    steps: int
    warmup: int
    accumulate: int
    small: bool
    devices: int
    sets: Sequence[str]
    folder: Path
    timeout: float


def run_cells(order: Order) -> Iterator[Cell]:
    """A mode's gate is judged by the first cell of its family; the others take it from there."""
    judged: dict[tuple[str, ...], Path] = {}
    for model in order.models:
        for layout in order.layouts:
            for mode in order.modes:
                family = resolve(MODELS[model].preset, {}).family
                key = (family, mode, *map(str, MODELS[model].extra.items()))
                cell = _run_cell(order, model, layout, mode, judged.get(key))
                if cell.result is not None and cell.result.gate.holds:
                    judged.setdefault(key, _file(order, model, layout, mode))
                yield cell


def degrees(layout: str, devices: int) -> dict[str, int]:
    match layout:
        case "DDP":
            return {"dp_replicate": devices, "dp_shard": 1}
        case "FSDP":
            return {"dp_replicate": 1, "dp_shard": devices}
        case "HSDP":
            return {"dp_replicate": 2, "dp_shard": devices // 2}
    return {"dp_replicate": 1, "dp_shard": 1}


def settings(order: Order, model: str, layout: str, mode: str) -> tuple[int, dict[str, Any]]:
    """The ranks and the keys of a cell."""
    least, chosen = _LEAST[layout], MODELS[model]
    ranks = least if order.small or layout == "1 process" else max(least, order.devices // 2 * 2)
    micro = SMALL_SEQUENCES if order.small else chosen.sequences
    seq_len = SMALL_SEQ_LEN if order.small else chosen.seq_len
    sets: dict[str, Any] = {
        "model.preset": chosen.preset,
        "data.seq_len": seq_len,
        "train.batch": f"{seq_len * micro * ranks * order.accumulate} tok",
        "train.micro_batch": micro,
        "precision.compute": "bf16",
        "precision.compile": False,
        **{f"parallel.{axis}": degree for axis, degree in degrees(layout, ranks).items()},
        **chosen.extra,
        **MODES[mode],
    }
    if order.small:
        sets |= {"run.device": "cpu", **chosen.small}
    return ranks, sets


def command(order: Order, model: str, layout: str, mode: str, gate_from: Path | None) -> list[str]:
    ranks, sets = settings(order, model, layout, mode)
    written = [f"{key}={toml_value(value)}" for key, value in sets.items()]
    keys = [word for each in [*written, *order.sets] for word in ("--set", each)]
    gate = ["--gate-from", str(gate_from)] if gate_from else []
    steps = ["--steps", str(order.steps), "--warmup", str(order.warmup), "--nproc", str(ranks)]
    name = f"{model}, small" if order.small else model
    where = ["--json", str(_file(order, model, layout, mode)), "--name", name]
    return [sys.executable, "-m", "arriero", "bench", "step", *keys, *steps, *gate, *where]


def _run_cell(order: Order, model: str, layout: str, mode: str, gate_from: Path | None) -> Cell:
    ranks, _ = settings(order, model, layout, mode)

    def cell(result: Result | None, problem: str = "") -> Cell:
        return Cell(model=model, layout=layout, mode=mode, ranks=ranks, result=result, problem=problem)

    if not order.small and ranks > order.devices:
        return cell(None, _too_few(ranks))
    file = _file(order, model, layout, mode)
    file.unlink(missing_ok=True)
    asked = command(order, model, layout, mode, gate_from)
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=order.timeout)
    except subprocess.TimeoutExpired:
        return cell(None, f"not done after {order.timeout:g} s")
    if done.returncode or not file.exists():
        return cell(None, first_words(done.stdout, done.stderr) or f"ended with code {done.returncode}")
    return cell(Result.read(file))


def first_words(stdout: str, stderr: str) -> str:
    """The one line of a failure that tells most: of a refusal, a gate, or a crash on some rank."""
    if found := re.search(r"^error: (.*)", stderr, re.MULTILINE):
        return found[1].strip()
    if found := re.search(r"^the gate does not hold.*\n(.*)", stdout, re.MULTILINE):
        return f"{found[0].splitlines()[0]}; {found[1].strip()}"
    if crashes := _LAST_WORDS.findall(stderr):
        return crashes[-1].strip()
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    return said[-1] if said else ""


def _file(order: Order, model: str, layout: str, mode: str) -> Path:
    name = "-".join((model, layout, mode)).replace(" ", "_")
    return order.folder / "cells" / f"{name}.json"
