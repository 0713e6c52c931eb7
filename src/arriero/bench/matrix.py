"""`bench matrix`: models x layouts x modes, each cell in its own process, and their tables."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arriero.bench.result import Part, StepResult, Stored
from arriero.config.fields import toml_value
from arriero.model.presets import resolve
from arriero.report.page import Bar, Section, page, sentences, stacked_bars, text_table
from arriero.ui import markdown_table
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
# the minimum number of ranks of a layout
_MIN_RANKS = {"1 process": 1, "DDP": 2, "FSDP": 2, "HSDP": 4}
_EXCEPTION_LINE = re.compile(r"^[\w.]+(?:Error|Exception)\b.*", re.MULTILINE)


@dataclass(frozen=True)
class MatrixModel:
    """`sequences` is the micro-batch size, `small` the scaled-down dimensions, `extra` further settings."""

    preset: str
    sequences: int
    seq_len: int
    small: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)


def _narrow(heads: int, kv_heads: int, layers: int, ffn: int) -> dict[str, Any]:
    shape = {"layers": layers, "dim": 16 * heads, "heads": heads, "kv_heads": kv_heads, "head_dim": 16}
    return {f"model.{name}": value for name, value in (shape | {"ffn": ffn, "vocab_size": 4096}).items()}


# the first two have the batches of their published benchmark, the others those of published records
MODELS: dict[str, MatrixModel] = {
    "gpt2-1.5b": MatrixModel("bench-gpt2-1.5b", 8, 1024, _narrow(4, 4, 2, 256)),
    "llama3.1-70b-proxy": MatrixModel("bench-llama-3.1-70b-proxy", 2, 4096, _narrow(8, 1, 1, 448)),
    "llama3.1-8b": MatrixModel(
        "llama3.1-8b",
        1,
        8192,
        _narrow(4, 1, 2, 224),
        {"precision.master": "bf16", "optim.state": "bf16"},
    ),
    "llama3.2-1b": MatrixModel("llama3.2-1b", 4, 8192, _narrow(4, 1, 2, 256)),
}
SMALL_SEQUENCES, SMALL_SEQ_LEN = 2, 64
_PER_RANK = "tokens per second and rank"


class Cell(Part):
    """One measurement; `problem` is empty if there is a result."""

    model: str
    layout: str
    mode: str
    ranks: int
    result: StepResult | None
    problem: str

    @property
    def failed(self) -> bool:
        """Whether it failed; a cell for more GPUs than present did not."""
        return self.result is None and self.problem != _too_few(self.ranks)


def _too_few(ranks: int) -> str:
    return f"needs {counted(ranks, 'GPU')}"


class Matrix(Stored):
    """All cells that have run so far."""

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
class MatrixRequest:
    """Which cells to run, and how."""

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


def run_cells(request: MatrixRequest) -> Iterator[Cell]:
    """Run all cells; the loss check of a mode is done in its first cell and reused in the others."""
    checked: dict[tuple[str, ...], Path] = {}
    for model in request.models:
        for layout in request.layouts:
            for mode in request.modes:
                family = resolve(MODELS[model].preset, {}).family
                key = (family, mode, *map(str, MODELS[model].extra.items()))
                cell = _run_cell(request, model, layout, mode, checked.get(key))
                if cell.result is not None and cell.result.gate.holds:
                    checked.setdefault(key, _file(request, model, layout, mode))
                yield cell


def degrees(layout: str, devices: int) -> dict[str, int]:
    replicas = {"DDP": devices, "HSDP": 2}.get(layout, 1)
    shards = {"FSDP": devices, "HSDP": devices // 2}.get(layout, 1)
    return {"dp_replicate": replicas, "dp_shard": shards}


def settings(request: MatrixRequest, model: str, layout: str, mode: str) -> tuple[int, dict[str, Any]]:
    """Return the number of ranks and the keys of a cell."""
    least, chosen = _MIN_RANKS[layout], MODELS[model]
    ranks = least if request.small or layout == "1 process" else max(least, request.devices // 2 * 2)
    micro = SMALL_SEQUENCES if request.small else chosen.sequences
    seq_len = SMALL_SEQ_LEN if request.small else chosen.seq_len
    sets: dict[str, Any] = {
        "model.preset": chosen.preset,
        "data.seq_len": seq_len,
        "train.batch": f"{seq_len * micro * ranks * request.accumulate} tok",
        "train.micro_batch": micro,
        "precision.compute": "bf16",
        "precision.compile": False,
        **{f"parallel.{axis}": degree for axis, degree in degrees(layout, ranks).items()},
        **chosen.extra,
        **MODES[mode],
    }
    if request.small:
        sets |= {"run.device": "cpu", **chosen.small}
    return ranks, sets


def command(request: MatrixRequest, model: str, layout: str, mode: str, gate_from: Path | None) -> list[str]:
    ranks, sets = settings(request, model, layout, mode)
    written = [f"{key}={toml_value(value)}" for key, value in sets.items()]
    keys = [word for each in [*written, *request.sets] for word in ("--set", each)]
    gate = ["--gate-from", str(gate_from)] if gate_from else []
    steps = ["--steps", str(request.steps), "--warmup", str(request.warmup), "--nproc", str(ranks)]
    name = f"{model}, small" if request.small else model
    where = ["--json", str(_file(request, model, layout, mode)), "--name", name]
    return [sys.executable, "-m", "arriero", "bench", "step", *keys, *steps, *gate, *where]


def _run_cell(request: MatrixRequest, model: str, layout: str, mode: str, gate_from: Path | None) -> Cell:
    ranks, _ = settings(request, model, layout, mode)

    def cell(result: StepResult | None, problem: str = "") -> Cell:
        return Cell(model=model, layout=layout, mode=mode, ranks=ranks, result=result, problem=problem)

    if not request.small and ranks > request.devices:
        return cell(None, _too_few(ranks))
    file = _file(request, model, layout, mode)
    file.unlink(missing_ok=True)
    arguments = command(request, model, layout, mode, gate_from)
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=request.timeout)
    except subprocess.TimeoutExpired:
        return cell(None, f"not finished after {request.timeout:g} s")
    if done.returncode or not file.exists():
        return cell(None, main_error(done.stdout, done.stderr) or f"ended with code {done.returncode}")
    return cell(StepResult.read(file))


def main_error(stdout: str, stderr: str) -> str:
    """Return the most informative line of a failure: of an error, a loss check, or a crash on some rank."""
    if found := re.search(r"^error: (.*)", stderr, re.MULTILINE):
        return found[1].strip()
    if found := re.search(r"^the loss check failed.*\n(.*)", stdout, re.MULTILINE):
        return f"{found[0].splitlines()[0]}; {found[1].strip()}"
    if crashes := _EXCEPTION_LINE.findall(stderr):
        return crashes[-1].strip()
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _file(request: MatrixRequest, model: str, layout: str, mode: str) -> Path:
    name = "-".join((model, layout, mode)).replace(" ", "_")
    return request.folder / "cells" / f"{name}.json"


def matrix_markdown(matrix: Matrix) -> str:
    parts = [f"# {_title(matrix)}", *_about(matrix)]
    for model in _distinct(matrix, "model"):
        rows = [[text.replace("|", "\\|") for text in row] for row in _rows(matrix, model)]
        lines = markdown_table(("mode", *_distinct(matrix, "layout")), rows)
        parts += [f"## {model}\n{_work_summary(matrix, model)}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def matrix_html(matrix: Matrix) -> str:
    parts: list[Section | str] = [sentences(list(_about(matrix)))]
    for model in _distinct(matrix, "model"):
        body = text_table(("mode", *_distinct(matrix, "layout")), _rows(matrix, model))
        if speeds := [(cell, cell.result.timing.tokens_per_s / cell.ranks) for cell in _done(matrix, model)]:
            bars = [Bar(f"{c.layout}, {c.mode}", {_PER_RANK: v}, f"{v:,.0f} tok/s") for c, v in speeds]
            body += stacked_bars(bars, {_PER_RANK: "var(--c1)"}, "tok/s")
        parts.append(Section(model, body, _work_summary(matrix, model)))
    if rates := next((cell.result.rates for cell in matrix.cells if cell.result), []):
        formulas = text_table(("name", "formula"), [(rate.convention, rate.formula) for rate in rates])
        note = "The tables show the first formula; each result has all."
        parts.append(Section("How MFU is counted", formulas, note))
    return page(_title(matrix), "", parts)


def _title(matrix: Matrix) -> str:
    return "Training speed: layouts and modes" + (", small models on a CPU" if matrix.small else "")


def _about(matrix: Matrix) -> Iterator[str]:
    done = [cell.result for cell in matrix.cells if cell.result]
    failed = sum(cell.failed for cell in matrix.cells)
    unmet = len(matrix.cells) - len(done) - failed
    counts = f"{len(done)} of {len(matrix.cells)} cells ran, {failed} failed, {unmet} need more GPUs"
    yield f"{counts}. {matrix.time}"
    if done:
        result = done[0]
        timed = len(result.timing.step_ms)
        yield (
            f"{result.device.name}, {result.device.cpu}; torch {result.code.versions['torch']}, "
            f"arriero {result.code.versions['arriero']} at {(result.code.commit or 'no commit')[:10]}"
            f"{' with changes' if result.code.dirty else ''}. "
            f"Tokens per second of all ranks at the median of {timed} steps after "
            f"{result.timing.warmup_steps}; data, clipping, optimizer and logging are timed."
        )
    if matrix.small:
        yield (
            "These are scaled-down models with the family and head groups of the models, "
            f"with {SMALL_SEQUENCES} sequences of {SMALL_SEQ_LEN} tokens per rank. They show that every "
            "combination works; their speed says nothing about the models."
        )
    yield "A cell has a speed only if the losses of its mode on a small model agree with fp32 within bounds."


def _work_summary(matrix: Matrix, model: str) -> str:
    chosen, done = MODELS[model], _done(matrix, model)
    if not done:
        return f"{chosen.sequences} x {chosen.seq_len} tokens per rank"
    work = done[0].result.work
    spec = work.model
    sequences = done[0].result.micro_batch
    weights = f"{work.master} weights, {work.optimizer_state} {work.optimizer} states"
    tokens = f"{matrix.accumulate} x {sequences} x {work.seq_len} tokens per rank"
    return (
        f"{work.parameters:,} parameters ({spec['layers']} layers of {spec['dim']}, {spec['heads']} heads, "
        f"{spec['kv_heads']} of keys), {tokens}; {weights}"
    )


def _done(matrix: Matrix, model: str) -> list[Any]:
    """Return the cells of a model that have a result."""
    return [cell for cell in matrix.cells if cell.model == model and cell.result is not None]


def _distinct(matrix: Matrix, field: str) -> Sequence[str]:
    return list(dict.fromkeys(getattr(cell, field) for cell in matrix.cells))


def _rows(matrix: Matrix, model: str) -> list[list[str]]:
    """Return the table of a model: a row per mode, a column per layout."""
    layouts = _distinct(matrix, "layout")
    return [
        [mode, *(_text(matrix.of(model, layout, mode)) for layout in layouts)]
        for mode in _distinct(matrix, "mode")
    ]


def _text(cell: Cell | None) -> str:
    if cell is None or cell.result is None:
        return cell.problem[:300] if cell else ""
    return f"{cell.result.timing.tokens_per_s:,.0f} tok/s, {', '.join(_details(cell.result))}"


def _details(result: StepResult) -> Iterator[str]:
    timing, rate = result.timing, result.rate("causal")
    yield f"{timing.median_ms:,.1f} ms ({timing.lower_quartile_ms:,.1f}-{timing.upper_quartile_ms:,.1f})"
    yield f"{result.memory.allocated_gib:.2f} GiB"
    if rate.mfu is not None:
        yield f"MFU {rate.mfu:.1%}"
    if rate.mfu_of_float8_peak is not None:
        yield f"{rate.mfu_of_float8_peak:.1%} of the float8 peak"
    if result.gate.needed and result.gate.holds is None:
        yield "loss not checked"
