"""`arriero bench matrix`."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arriero.bench.step_commands import Steps, Warmup
from arriero.config.options import Sets
from arriero.errors import UserError, nearest
from arriero.ui import make_console

if TYPE_CHECKING:
    from arriero.bench.matrix import Cell

SEVERAL = "Several are separated by commas."


def matrix(
    models: Annotated[str, typer.Option(help=f"Which models; all unless given. {SEVERAL}")] = "",
    modes: Annotated[str, typer.Option(help=f"Which modes. {SEVERAL}")] = "",
    layouts: Annotated[str, typer.Option(help=f"Which layouts. {SEVERAL}")] = "",
    sets: Sets = [],
    steps: Steps = 20,
    warmup: Warmup = 5,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of a step, on each rank.")] = 1,
    out: Annotated[Path, typer.Option(help="Where tables and results go.")] = Path("bench-matrix"),
    small: Annotated[
        bool, typer.Option("--small", help="Small sisters of the models, on this machine's CPU.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a cell may take.")] = 1800,
) -> None:
    """Measure models in one process, DDP, FSDP and HSDP, each in bf16, compiled, float8, recomputed and all.

    Each cell is an `arriero bench step` of its own. One that fails is shown with its reason, and the rest
    goes on. Writes matrix.md, matrix.json, matrix.html and the result of each cell.

    Example: arriero bench matrix --models gpt2-1.5b --layouts '1 process' --modes bf16,compile
    """
    from arriero.bench.matrix import LAYOUTS, MODELS, MODES, Matrix, Order, run_cells
    from arriero.bench.matrix_page import html, markdown

    order = Order(
        models=chosen("--models", models, list(MODELS)),
        layouts=chosen("--layouts", layouts, LAYOUTS),
        modes=chosen("--modes", modes, list(MODES)),
        steps=steps,
        warmup=warmup,
        accumulate=accumulate,
        small=small,
        devices=0 if small else _gpus(),
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
    number = len(order.models) * len(order.layouts) * len(order.modes)
    with console.status(f"1 of {number}") as status:
        for cell in run_cells(order):
            cells.append(cell)
            console.plain(_line(cell))
            status.update(f"{len(cells) + 1} of {number}")
            # after each cell: what a long run has shown stays when it is stopped
            found = Matrix(time=began, small=small, accumulate=accumulate, cells=cells)
            found.write(out / "matrix.json")
            (out / "matrix.md").write_text(markdown(found), encoding="utf-8")
            (out / "matrix.html").write_text(html(found), encoding="utf-8")
    console.plain(f"written to {out}: matrix.md, matrix.json, matrix.html")
    if any(cell.failed for cell in cells):
        raise typer.Exit(1)


def chosen(option: str, given: str, known: Sequence[str]) -> list[str]:
    wanted = [each.strip() for each in given.split(",") if each.strip()]
    for each in wanted:
        if each not in known:
            near = nearest(each, known)
            raise UserError(
                f"{option}: there is no '{each}'" + (f" (did you mean '{near}'?)" if near else ""),
                f"choose of {', '.join(known)}",
            )
    return wanted or list(known)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _line(cell: "Cell") -> str:
    where = f"{cell.model:20} {cell.layout:10} {cell.mode:13}"
    if cell.result is None:
        return f"{where} {cell.problem}"
    timing = cell.result.timing
    return f"{where} {timing.tokens_per_s:>10,.0f} tok/s {timing.median_ms:>10,.1f} ms"
