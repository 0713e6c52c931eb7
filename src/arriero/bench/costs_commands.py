"""`arriero bench costs`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arriero.bench.matrix_commands import SEVERAL, chosen
from arriero.bench.step_commands import Json
from arriero.config.options import refuse_unwritable
from arriero.ui import make_console

if TYPE_CHECKING:
    from arriero.bench.costs_result import Cost

NAMES = ("start-up", "overhead", "saves", "data-wait", "growth", "memory")

Only = Annotated[
    str, typer.Option(metavar="NAME", help=f"Of {', '.join(NAMES)}; all unless given. {SEVERAL}")
]
Cache = Annotated[Path, typer.Option(help="Where the built-in corpus is kept, made once.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]


def costs(only: Only = "", json: Json = None, cache: Cache = Path("data"), device: Device = "auto") -> None:
    """Measure what training costs beside the arithmetic of a step.

    start-up: seconds to the first step. overhead: microseconds of a step that are the trainer's own. saves:
    how long training waits for a checkpoint. data-wait: the share of time waited for data at 1M tokens a
    second. growth: a step's time by length and layers beside its FLOPs. memory: of each precision, optimizer
    state and recomputation, predicted and measured. All by the code that trains; some minutes in all.

    Example: arriero bench costs --only overhead,data-wait --json costs.json
    """
    names = chosen("--only", only, NAMES)
    refuse_unwritable("--json", json)
    from arriero.bench.costs import measure_costs
    from arriero.interrupt import Interrupted

    console = make_console()
    try:
        with console.status("") as status:
            found = measure_costs(names, device, cache, status.update)
    except Interrupted as stop:
        raise typer.Exit(128 + stop.number) from None
    for cost in found.costs:
        show(console, cost)
    before, after = found.load
    cores = found.device.cores
    console.print(f"load of the {cores} cores: {before:.1f} before, {after:.1f} after", markup=False)
    if json is not None:
        found.write(json)
        console.print(f"written to {json}", soft_wrap=True, markup=False)


def show(console: Console, cost: "Cost") -> None:
    from arriero.bench.costs_result import number

    console.print(f"[bold]{cost.name}[/]  [dim]{escape(cost.explanation)}", soft_wrap=True)
    table = Table(box=None, header_style="bold", padding=(0, 2))
    table.add_column("", no_wrap=True)
    for head in cost.rows[0].values:
        table.add_column(head, justify="right")
    for row in cost.rows:
        table.add_row(escape(row.what), *map(number, row.values.values()))
    console.print(table)
    console.print()
