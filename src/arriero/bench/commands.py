"""`arriero bench step | matrix | parity | compare`."""

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from arriero.bench.cases import MODELS, Case, cases
from arriero.config.options import RunFile, Sets, check_writable
from arriero.errors import UserError, nearest
from arriero.train.commands import Nproc
from arriero.ui import Console, columns, facts, make_console, styled

if TYPE_CHECKING:
    from arriero.bench.matrix import Cell
    from arriero.bench.parity import Verdict
    from arriero.bench.result import Gate, Rate, StepResult, Timing

_PROFILED_STEPS = 3
_SYNTHETIC = "data.sources=[{path='builtin:synthetic'}]"
_COMMAS = "Separate several with commas; default: all."
_PARITY_COLUMNS = {"layout": 32, "ranks": 5, "loss": 8, "gradient": 8, "weights": 8, "seconds": 7, "": 5}

Steps = Annotated[int, typer.Option(min=1, help="Number of timed steps.")]
Warmup = Annotated[int, typer.Option(min=0, help="Number of untimed steps first; blocks compile in them.")]
Json = Annotated[Path | None, typer.Option("--json", help="File for the result.", show_default=False)]
Profile = Annotated[bool, typer.Option(help="Profile three more steps, to show where the time goes.")]
NoGate = Annotated[bool, typer.Option("--no-gate", help="Skip the loss check; the result is marked.")]
GateFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Reuse the loss check of this result if mode, device and code are the same.",
        show_default=False,
    ),
]
Documents = Annotated[
    str | None,
    typer.Option(
        metavar="MEAN[:SIGMA]",
        help="Use packed random documents with a document mask. Their lengths in tokens are log-normal; "
        "SIGMA is 1 by default, and 0 makes all lengths equal.",
        show_default=False,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keep the profiler's trace of rank 0, for chrome://tracing or Perfetto; FILE.gz is compressed.",
        show_default=False,
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the result; default: the run's.", show_default=False)]


def step(
    run_file: RunFile = None,
    sets: Sets = [],
    nproc: Nproc = None,
    steps: Steps = 20,
    warmup: Warmup = 5,
    json: Json = None,
    profile: Profile = True,
    no_gate: NoGate = False,
    gate_from: GateFrom = None,
    documents: Documents = None,
    trace: Trace = None,
    name: Name = None,
) -> None:
    """Measure the training step of a run: speed, memory, energy, and where the time goes.

    The run trains as with `arriero train`; without a run file, on synthetic text. Data loading, gradient
    clipping, optimizer and logging are timed; evaluation, checkpoints and export are skipped. Unless the
    mode is plain fp32, a small model is first trained in this mode and in fp32. If their losses differ by
    more than the bound of the mode, no speed is shown and the exit code is 1.

    Example: arriero bench step --set model.preset=llama3.2-1b --set data.seq_len=8192
    --set train.batch='32768 tok' --json result.json
    """
    from arriero.bench.result import StepResult
    from arriero.config.load import load_run
    from arriero.model.presets import expand

    config = load_run(run_file, [*([] if run_file else [_SYNTHETIC]), *sets], expand).config
    if config.data.packing == "none":
        raise UserError(
            "with data.packing 'none' every step is different work", "set it to 'concat' or 'bestfit'"
        )
    check_writable("--json", json)
    check_writable("--trace", trace)
    if trace is not None and not profile:
        raise UserError("--trace needs profiled steps", "omit --no-profile")
    earlier = StepResult.read(gate_from) if gate_from else None
    # torch reads it when it is loaded: otherwise its profiler prints to standard error
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from arriero.bench.machine import check_commit_variable, process_started
    from arriero.bench.measure import StepCounts
    from arriero.bench.step import DocumentLengths, benchmark
    from arriero.interrupt import Interrupted

    check_commit_variable()
    lengths = DocumentLengths.parse(documents) if documents is not None else None
    counts = StepCounts(warmup, steps, _PROFILED_STEPS if profile else 0, process_started())
    console = make_console()
    title = name or (config.run.name if run_file else str(config.model.preset or config.model.family))
    try:
        with console.status("") as status:
            given = (nproc or 1, not no_gate, earlier, status.update, lengths, trace)
            found = benchmark(config, title, counts, *given)
    except Interrupted as stop:
        raise typer.Exit(128 + stop.number) from None
    if found is None:
        return
    if not isinstance(found, StepResult):
        _show_failed_gate(console, found)
        raise typer.Exit(1)
    console.print(facts(_rows(found)))
    if json is not None:
        found.write(json)
        console.plain(f"written to {json}")
    if trace is not None:
        console.plain(f"trace written to {trace}")


def _show_failed_gate(console: Console, gate: "Gate") -> None:
    console.print("[bold red]the loss check failed: no speed[/]")
    if gate.error:
        console.plain(gate.error)
    for what, found, bound in (
        ("loss", gate.loss, gate.loss_bound),
        ("first gradient norm", gate.norm, gate.norm_bound),
    ):
        difference = "is not a number" if found is None else f"differs by {found:.2e}"
        reference = f"{gate.model}, {gate.steps} steps against fp32"
        console.plain(f"  {what} {difference}, limit {bound:.1e} ({reference})")


def _rows(result: "StepResult") -> list[tuple[str, str, str]]:
    timing, work, losses = result.timing, result.work, result.losses
    memory, device = result.memory, result.device
    reserved = "of this process" if memory.reserved_gib is None else f"{memory.reserved_gib:.2f} GiB reserved"
    norms = (losses.first_grad_norm, losses.last_grad_norm)
    sequences = work.tokens_per_step // work.seq_len
    energy: tuple[str, str] = (
        "not reported",
        "no NVIDIA GPU, or nvidia-ml-py is missing: pip install 'arriero[nvidia]'",
    )
    if result.energy is not None:
        per_joule = f"{result.energy.tokens_per_joule:,.1f} tokens per J"
        energy = (f"{result.energy.joules_per_step:,.1f} J per step", per_joule)
    rows: list[tuple[str, str, str]] = [
        ("work", f"{result.name}, {sequences} x {work.seq_len}", f"{work.parameters:,} parameters"),
        ("mode", result.mode, f"{result.layout or 'one process'}; {device.name} x {device.count}"),
        ("loss check", *_gate_text(result.gate)),
        ("speed", f"{timing.tokens_per_s:,.0f} tok/s", "of all ranks, at the median step"),
        ("step", f"{timing.median_ms:,.1f} ms", _timing_text(timing)),
        ("start-up", f"{timing.start_up_s:.1f} s", "from process start to the end of the first step"),
        ("memory", f"{memory.allocated_gib:.2f} GiB", f"peak, {reserved}"),
        ("energy", *energy),
        (
            "loss",
            f"{losses.first:.4f} -> {losses.last:.4f}",
            f"steps {losses.first_step} and {losses.last_step}",
        ),
        (
            "gradient norm",
            " -> ".join("not finite" if norm is None else f"{norm:.4g}" for norm in norms),
            "before clipping",
        ),
        *map(_rate_row, result.rates),
    ]
    if result.breakdown is not None:
        for category, time in result.breakdown.parts.items():
            share = time / result.breakdown.step_ms
            rows.append((category, f"{time:,.2f} ms", f"{share:.1%} of a profiled step"))
    rows.append(("not timed", ", ".join(result.left_out), ""))
    return rows


def _timing_text(timing: "Timing") -> str:
    if len(timing.step_ms) == 1:
        return timing.spread
    return (
        f"{timing.min_ms:,.1f} to {timing.max_ms:,.1f}, quartiles {timing.lower_quartile_ms:,.1f} and "
        f"{timing.upper_quartile_ms:,.1f}; {len(timing.step_ms)} steps after {timing.warmup_steps}"
    )


def _rate_row(rate: "Rate") -> tuple[str, str, str]:
    if rate.tflops_per_device is None:
        return rate.convention, "not counted", rate.formula
    mfu = f"  MFU {rate.mfu:.1%}" if rate.mfu is not None else ""
    if rate.mfu_of_float8_peak is not None:
        mfu += f" (of the float8 peak {rate.mfu_of_float8_peak:.1%})"
    return rate.convention, f"{rate.tflops_per_device:,.4g} TFLOP/s{mfu}", rate.formula


def _gate_text(gate: "Gate") -> tuple[str, str]:
    if not gate.needed:
        return "not needed", "plain fp32 is the reference"
    if gate.holds is None:
        return "NOT CHECKED", "the loss of this mode was not compared with fp32"
    return (
        "passed" if gate.holds else "failed",
        f"loss differs by {gate.loss:.1e}, limit {gate.loss_bound:.1e}; gradient norm {gate.norm:.1e}, limit "
        f"{gate.norm_bound:.1e}; {gate.model}, {gate.steps} steps",
    )


def matrix(
    models: Annotated[
        str, typer.Option(help=f"Some of gpt2-1.5b, llama3.1-70b-proxy, llama3.1-8b, llama3.2-1b. {_COMMAS}")
    ] = "",
    modes: Annotated[
        str, typer.Option(help=f"Some of bf16, compile, float8, selective AC, all together. {_COMMAS}")
    ] = "",
    layouts: Annotated[str, typer.Option(help=f"Some of 1 process, DDP, FSDP, HSDP. {_COMMAS}")] = "",
    sets: Sets = [],
    steps: Steps = 20,
    warmup: Warmup = 5,
    accumulate: Annotated[
        int, typer.Option(min=1, help="Micro-batches per step (gradient accumulation).")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Directory for tables and results.")] = Path("bench-matrix"),
    small: Annotated[bool, typer.Option("--small", help="Use scaled-down models on the CPU.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Maximum seconds per cell.")] = 1800,
) -> None:
    """Measure models x {1 process, DDP, FSDP, HSDP} x {bf16, compile, float8, selective checkpointing, all}.

    Each cell is an `arriero bench step` in its own process. A cell that fails is shown with its reason, and
    the others still run. Writes matrix.md, matrix.json, matrix.html and the result of each cell.

    Example: arriero bench matrix --models gpt2-1.5b --layouts '1 process' --modes bf16,compile
    """
    from torch.cuda import device_count

    from arriero.bench.matrix import LAYOUTS, MODELS, MODES, Matrix, MatrixRequest, run_cells
    from arriero.bench.matrix import matrix_html as html
    from arriero.bench.matrix import matrix_markdown as markdown

    request = MatrixRequest(
        models=chosen("--models", models, list(MODELS)),
        layouts=chosen("--layouts", layouts, LAYOUTS),
        modes=chosen("--modes", modes, list(MODES)),
        steps=steps,
        warmup=warmup,
        accumulate=accumulate,
        small=small,
        devices=0 if small else device_count(),
        sets=sets,
        folder=out,
        timeout=timeout,
    )
    try:
        (out / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error})", "give another --out") from None
    console = make_console()
    began = datetime.now(UTC).isoformat(timespec="minutes")
    cells: list[Cell] = []
    number = len(request.models) * len(request.layouts) * len(request.modes)
    with console.status(f"1 of {number}") as status:
        for cell in run_cells(request):
            cells.append(cell)
            console.plain(_cell_line(cell))
            status.update(f"{len(cells) + 1} of {number}")
            # written after each cell, so that a stopped matrix keeps its results
            found = Matrix(time=began, small=small, accumulate=accumulate, cells=cells)
            found.write(out / "matrix.json")
            (out / "matrix.md").write_text(markdown(found), encoding="utf-8")
            (out / "matrix.html").write_text(html(found), encoding="utf-8")
    console.plain(f"written to {out}: matrix.md, matrix.json, matrix.html")
    if any(cell.failed for cell in cells):
        raise typer.Exit(1)


def chosen(option: str, given: str, known: Sequence[str]) -> list[str]:
    """Split a list option and check its names; an empty option chooses all."""
    wanted = [each.strip() for each in given.split(",") if each.strip()]
    for each in wanted:
        if each not in known:
            near = nearest(each, known)
            raise UserError(
                f"{option}: there is no '{each}'" + (f" (did you mean '{near}'?)" if near else ""),
                f"choose from {', '.join(known)}",
            )
    return wanted or list(known)


def _cell_line(cell: "Cell") -> str:
    where = f"{cell.model:20} {cell.layout:10} {cell.mode:13}"
    if cell.result is None:
        return f"{where} {cell.problem}"
    timing = cell.result.timing
    return f"{where} {timing.tokens_per_s:>10,.0f} tok/s {timing.median_ms:>10,.1f} ms"


def parity(
    model: Annotated[
        str | None,
        typer.Option(help=f"Only one of the models: {', '.join(MODELS)}.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only the cases that `make test` runs.")] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="Only cases whose 'group: name' contains this.", show_default=False
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Also write the result as a Markdown page.", show_default=False)
    ] = None,
    cache: Annotated[Path, typer.Option(help="Directory of the built-in corpus.")] = Path("data"),
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Device; on 'cuda' all ranks share one GPU.")
    ] = "cpu",
) -> None:
    """Train the same steps in every parallel layout and compare with one process.

    Shows relative differences: the largest of 10 losses, the first gradient norm, and the final weights.

    Example: arriero bench parity --quick --only 'two axes'
    """
    if model not in (None, *MODELS):
        raise UserError(f"--model: there are no cases of '{model}'", f"use one of {', '.join(MODELS)}")
    names = [model] if model else MODELS
    wanted = {name: found for name in names if (found := _wanted_cases(name, quick, only, device))}
    if not wanted:
        groups = dict.fromkeys(case.group for case in cases(MODELS[0]))
        raise UserError(f"no case matches '{only}'", f"name one of the groups: {', '.join(groups)}")
    check_writable("--write", write)
    from arriero.bench.parity import check_device, parity_page
    from arriero.interrupt import Interrupted

    check_device(device)
    console = make_console()
    try:
        verdicts: dict[str, list[Verdict]] = {}
        for name, chosen_cases in wanted.items():
            verdicts[name] = []
            for verdict in _compared(console, name, chosen_cases, cache, device):
                verdicts[name].append(verdict)
                if write is not None:
                    # written after each case, so that a stopped run keeps its results
                    write.write_text(parity_page(verdicts, device))
    except Interrupted as stop:
        raise typer.Exit(128 + stop.number) from None
    if write is not None:
        console.plain(f"written to {write}")
    _show_failures(console, verdicts)


def _wanted_cases(model: str, quick: bool, only: str | None, device: str) -> list[Case]:
    return [
        case
        for case in cases(model, device)
        if (case.quick or not quick) and (only is None or case.matches(only))
    ]


def _compared(
    console: Console, model: str, wanted: list[Case], cache: Path, device: str
) -> "Iterator[Verdict]":
    from arriero.bench.parity import Parity

    group, runs = None, Parity(model, cache, {"run.device": device, "run.share_gpu": device == "cuda"})
    console.print(columns(_PARITY_COLUMNS.values(), *_PARITY_COLUMNS), style="bold")
    with console.status(f"{model}: 0 of {len(wanted)}") as status:
        for number, verdict in enumerate(runs.compare_all(wanted), 1):
            status.update(f"{model}: {number} of {len(wanted)}")
            if verdict.case.group != group:
                group = verdict.case.group
                console.print(f"{model}: {group}", style="bold")
            _show_verdict(console, verdict)
            yield verdict


def _show_verdict(console: Console, verdict: "Verdict") -> None:
    differences = [f"{value:.1e}" for value in (verdict.loss, verdict.norm, verdict.weights)]
    holds = styled("holds", "green") if verdict.holds else styled("FAILS", "bold red")
    case, seconds = verdict.case, f"{verdict.seconds:.1f}"
    console.print(columns(_PARITY_COLUMNS.values(), case.name, case.ranks, *differences, seconds, holds))


def _show_failures(console: Console, verdicts: "dict[str, list[Verdict]]") -> None:
    failed = [(model, each) for model, compared in verdicts.items() for each in compared if not each.holds]
    number = sum(map(len, verdicts.values()))
    if not failed:
        console.print(f"[green]{number} of {number} hold[/]")
        return
    console.print(f"[bold red]{len(failed)} of {number} do not hold:[/]")
    for model, verdict in failed:
        console.plain(f"{model}, {verdict.case.title}", "bold")
        _show_verdict(console, verdict)
        if verdict.error:
            console.plain(verdict.error)
    raise typer.Exit(1)


def compare(
    results: Annotated[
        list[Path], typer.Argument(help="Results of `arriero bench step --json`: files or directories.")
    ],
    write: Annotated[
        Path | None,
        typer.Option(
            help="Replace the tables between <!-- results --> and <!-- /results --> of this page.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare two results of the same work, or show tables of any number of results.

    The work is model, batch, sequence length, precision and optimizer state; layout, compilation and
    activation checkpointing may differ. With two files, prints the speed of the second relative to the first.
    With one, with more, or with --write, makes Markdown tables.

    Example: arriero bench compare before.json after.json
    """
    from arriero.bench.result import compare_results, read_results, replace_section, tables

    found = read_results(results)
    if write is not None:
        try:
            text = write.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{write} cannot be read ({error})", "give a page that exists") from None
        text = replace_section(text, "results", tables(found, write.parent), str(write))
        write.write_text(text, encoding="utf-8")
        typer.echo(f"{write}: {len(found)} results")
        return
    if len(results) != 2 or any(path.is_dir() for path in results):
        typer.echo(tables(found, Path()), nl=False)
        return
    by_path = dict(found)
    first, second = (by_path[path] for path in results)
    comparison = compare_results(first, second)
    console = make_console()
    for path, result in zip(results, (first, second), strict=True):
        timing, device = result.timing, result.device
        console.plain(
            f"{path}: {timing.tokens_per_s:,.0f} tok/s, {timing.median_ms:,.1f} ms per step "
            f"({timing.lower_quartile_ms:,.1f} to {timing.upper_quartile_ms:,.1f}); {result.mode}, "
            f"{result.layout}, {device.name} x {device.count}"
        )
    console.print(
        f"the second is {comparison.ratio:.3f} times as fast as the first "
        f"({comparison.least:.3f} to {comparison.most:.3f}): [bold]{comparison.verdict}[/]"
    )
