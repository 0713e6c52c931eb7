"""`bench matrix`: models x layouts x modes, each cell in its own process, and their tables."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from arriero.bench.result import Part, StepResult, Stored
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
    match layout:
        case "DDP":
            return {"dp_replicate": devices, "dp_shard": 1}
        case "FSDP":
            return {"dp_replicate": 1, "dp_shard": devices}
        case "HSDP":
            return {"dp_replicate": 2, "dp_shard": devices // 2}
    return {"dp_replicate": 1, "dp_shard": 1}


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


_HTML_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #d5d9e0; --dim: #5d6675; --bad: #b3261e; --bar: #3b7dd8;
  --back: #ffffff; --text: #1a1d23; --head: #f3f5f8; }}
@media (prefers-color-scheme: dark) {{ :root {{ --line: #363c47; --dim: #9aa4b4; --bad: #ff8a80;
  --bar: #5f9bea; --back: #14171c; --text: #e6e9ee; --head: #1d2128; }} }}
body {{ background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .3rem; }}
p, .note {{ color: var(--dim); margin: .3rem 0; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; margin: .6rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ border: 1px solid var(--line); padding: .45rem .7rem; text-align: left; vertical-align: top; }}
th {{ background: var(--head); font-weight: 600; white-space: nowrap; }}
td b {{ font-size: 1.05rem; white-space: nowrap; }}
td small {{ display: block; color: var(--dim); }}
td.bad {{ color: var(--bad); font-size: .85rem; overflow-wrap: anywhere; }}
td.none {{ color: var(--dim); font-size: .85rem; }}
.bar {{ height: 4px; background: var(--bar); border-radius: 2px; margin: .25rem 0; }}
</style>
</head>
<body>
"""


def matrix_markdown(matrix: Matrix) -> str:
    parts = [f"# {_title(matrix)}\n", *(f"\n{line}\n" for line in _about(matrix))]
    layouts, modes = _distinct(matrix, "layout"), _distinct(matrix, "mode")
    for model in _distinct(matrix, "model"):
        parts.append(f"\n## {model}\n{_work_summary(matrix, model)}\n\n")
        parts += [f"| | {' | '.join(layouts)} |\n", f"|---|{'---|' * len(layouts)}\n"]
        for mode in modes:
            cells = [_markdown_cell(matrix.of(model, layout, mode)) for layout in layouts]
            parts.append(f"| {mode} | {' | '.join(cells)} |\n")
    return "".join(parts)


def matrix_html(matrix: Matrix) -> str:
    parts = [_HTML_HEAD.format(title=escape(_title(matrix))), f"<h1>{escape(_title(matrix))}</h1>\n"]
    parts += [f"<p>{escape(line)}</p>\n" for line in [*_about(matrix), "Bars compare the speed per rank."]]
    layouts, modes = _distinct(matrix, "layout"), _distinct(matrix, "mode")
    for model in _distinct(matrix, "model"):
        fastest = max((c.result.timing.tokens_per_s / c.ranks for c in _done(matrix, model)), default=1.0)
        heads = "".join(f"<th>{escape(layout)}</th>" for layout in layouts)
        parts.append(f"<h2>{escape(model)}</h2>\n<p>{escape(_work_summary(matrix, model))}</p>\n")
        parts.append(f'<div class="wide"><table>\n<tr><th></th>{heads}</tr>\n')
        for mode in modes:
            cells = (_html_cell(matrix.of(model, layout, mode), fastest) for layout in layouts)
            parts.append(f"<tr><th>{escape(mode)}</th>{''.join(cells)}</tr>\n")
        parts.append("</table></div>\n")
    parts.append(f"<h2>How MFU is counted</h2>\n{_conventions(matrix)}</body>\n</html>\n")
    return "".join(parts)


def _title(matrix: Matrix) -> str:
    return "Training speed: layouts and modes" + (", small models on a CPU" if matrix.small else "")


def _about(matrix: Matrix) -> Iterator[str]:
    done = [cell.result for cell in matrix.cells if cell.result]
    failed = sum(cell.failed for cell in matrix.cells)
    unmet = len(matrix.cells) - len(done) - failed
    yield (
        f"{len(done)} of {len(matrix.cells)} cells ran, {failed} failed, {unmet} need more GPUs. "
        f"{matrix.time}"
    )
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


class _Done(Cell):
    """A cell with a result."""

    result: StepResult


def _done(matrix: Matrix, model: str) -> list[_Done]:
    return [_Done(**dict(c)) for c in matrix.cells if c.model == model and c.result is not None]


def _distinct(matrix: Matrix, field: str) -> Sequence[str]:
    return list(dict.fromkeys(getattr(cell, field) for cell in matrix.cells))


def _markdown_cell(cell: Cell | None) -> str:
    if cell is None or cell.result is None:
        return (cell.problem if cell else "").replace("|", "\\|")[:300]
    return f"{cell.result.timing.tokens_per_s:,.0f} tok/s, {', '.join(_details(cell.result))}"


def _html_cell(cell: Cell | None, fastest: float) -> str:
    if cell is None or cell.result is None:
        problem = cell.problem if cell else ""
        kind = "bad" if cell and cell.failed else "none"
        return f'<td class="{kind}">{escape(problem[:300])}</td>'
    speed = cell.result.timing.tokens_per_s
    bar = f'<div class="bar" style="width:{100 * speed / cell.ranks / fastest:.0f}%"></div>'
    details = "".join(f"<small>{escape(each)}</small>" for each in _details(cell.result))
    return f"<td><b>{speed:,.0f} tok/s</b>{bar}{details}</td>"


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


def _conventions(matrix: Matrix) -> str:
    done = next((cell.result for cell in matrix.cells if cell.result), None)
    if done is None:
        return "<p>Nothing ran.</p>"
    rows = "".join(
        f"<tr><td>{escape(rate.convention)}</td><td>{escape(rate.formula)}</td></tr>" for rate in done.rates
    )
    return f"<p>The tables show the first formula; each result has all.</p><table>{rows}</table>\n"
