"""Measure what training costs beside the arithmetic of a step.

start-up: seconds to the first step. overhead: microseconds of a step spent in the trainer. saves: how long
training waits for a checkpoint. data-wait: the share of time spent waiting for data at 1M tokens per second.
growth: step time by sequence length and layers, beside its FLOPs.

python -m benchmarks.costs --only overhead,data-wait --json costs.json
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arriero.bench.commands import chosen
from arriero.bench.machine import describe_code, describe_device
from arriero.bench.result import replace_section
from arriero.config.options import check_writable
from arriero.data.prepare.builtin import prepare_builtin
from arriero.errors import UserError
from arriero.parallel.world import world_from
from arriero.train.device import choose_device
from benchmarks.costs.result import Cost, Costs, number, section
from benchmarks.costs.sizes import ON_GPU, Place, Sizes
from benchmarks.costs.steps import growth, overhead, saves
from benchmarks.costs.waits import data_wait, start_up
from benchmarks.script import run_script

MEASURES: dict[str, Callable[[Place], Cost]] = {
    "start-up": start_up,
    "overhead": overhead,
    "saves": saves,
    "data-wait": data_wait,
    "growth": growth,
}
RESULTS = Path(__file__).parent / "results"


def measure_costs(
    names: Sequence[str],
    device: str,
    cache: Path,
    report: Callable[[str], None],
    sizes: Sizes | None = None,
) -> Costs:
    """Run the named measurements; the result contains no paths and no host name."""
    if world_from().size > 1:
        raise UserError("a launcher has started several ranks", "costs are measured in one process")
    used = choose_device(device)
    measured, load = [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="arriero-costs-") as folder:
        place = Place(device, Path(folder), cache, sizes or (ON_GPU if used.is_gpu else Sizes()))
        prepare_builtin("builtin:synthetic", cache)
        for name in names:
            report(name)
            measured.append(MEASURES[name](place))
    command = ["python", "-m", "benchmarks.costs", "--device", device]
    return Costs(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=[*command, *(["--only", ",".join(names)] if list(names) != list(MEASURES) else [])],
        costs=tuple(measured),
        load=(load, os.getloadavg()[0]),
        device=describe_device(used, 1),
        code=describe_code(),
    )


Only = Annotated[str, typer.Option(help=f"Comma-separated names, of {', '.join(MEASURES)}; all by default.")]
Json = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
Cache = Annotated[Path, typer.Option(help="Directory of the built-in corpus, which is prepared once.")]
Write = Annotated[Path | None, typer.Option(help="Replace the section of this page and measure nothing.")]


def main(
    only: Only = "",
    json: Json = None,
    cache: Cache = Path("data"),
    device: Literal["auto", "cpu", "cuda"] = "auto",
    write: Write = None,
) -> None:
    if write is not None:
        text = write.read_text(encoding="utf-8")
        generated = section(RESULTS, write.resolve().parent)
        write.write_text(replace_section(text, "costs", generated, str(write)), encoding="utf-8")
        return
    names = chosen("--only", only, list(MEASURES))
    check_writable("--json", json)
    console = Console(highlight=False)
    with console.status("") as status:
        found = measure_costs(names, device, cache, status.update)
    for cost in found.costs:
        show(console, cost)
    before, after = found.load
    console.print(f"load of the {found.device.cores} cores: {before:.1f} before, {after:.1f} after")
    if json is not None:
        found.write(json)
        console.print(f"written to {json}", soft_wrap=True, markup=False)


def show(console: Console, cost: Cost) -> None:
    console.print(f"[bold]{cost.name}[/]  [dim]{escape(cost.explanation)}", soft_wrap=True)
    table = Table(box=None, header_style="bold", padding=(0, 2))
    table.add_column("", no_wrap=True)
    for head in cost.rows[0].values:
        table.add_column(head, justify="right")
    for row in cost.rows:
        table.add_row(escape(row.what), *map(number, row.values.values()))
    console.print(table)
    console.print()


if __name__ == "__main__":
    run_script(main)
