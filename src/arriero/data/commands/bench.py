"""`arriero data bench`."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from arriero.config.options import read_size
from arriero.errors import UserError
from arriero.ui import make_console


def bench(
    size: Annotated[str, typer.Option(help="Text to prepare, taken from Python's own files.")] = "100MB",
    text: Annotated[Path | None, typer.Option(help="A JSONL file with a text column to use instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure preparing and reading on this machine, beside the peers that are installed.

    datatrove is looked for in the interpreter that ARRIERO_PEERS_PYTHON names, too.

    Example: arriero data bench --size 1GB
    """
    from arriero.data.bench.table import measure

    wanted = read_size("--size", size)
    if text is not None and not text.is_file():
        raise UserError(f"there is no file {text}", "give a JSONL file")
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="arriero-bench-") as folder, console.status("") as status:
        rows = measure(Path(folder), wanted, text, lambda stage: status.update(stage))
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=2))
        return
    table = Table("what", "who", "result", "", "", box=None, header_style="bold")
    for row in rows:
        value = "-" if row.value is None else f"{row.value:,.3g}" if row.value < 100 else f"{row.value:,.0f}"
        table.add_row(row.what, row.name, value, row.unit, row.remark)
    console.print(table)
