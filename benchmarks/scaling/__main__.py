"""Measure how the parts of a start and of a save grow with the number of ranks; write docs/scaling.md.

python -m benchmarks.scaling --only store,groups --write docs/scaling.md
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from arriero.bench.commands import chosen
from arriero.bench.machine import describe_code
from arriero.bench.result import replace_section
from arriero.config.options import check_writable
from arriero.data.prepare.builtin import prepare_builtin
from benchmarks.scaling import measured, simulated
from benchmarks.script import run_script

SECTIONS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "groups": lambda _: measured.groups(),
    "store": lambda _: simulated.store(),
    "imports": simulated.imports,
    "settings": lambda _: simulated.settings(),
    "checkpoint": lambda _: simulated.checkpoint(),
    "data": simulated.data,
    "logs": measured.logs,
    "launches": lambda _: measured.launches(),
}


def table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(_shown(row[name]) for name in names)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main(
    only: Annotated[str, typer.Option(help=f"Sections, separated by commas: {', '.join(SECTIONS)}.")] = "",
    write: Annotated[Path | None, typer.Option(help="The page whose sections are replaced.")] = None,
) -> None:
    """Measure and print the tables of docs/scaling.md."""
    check_writable("--write", write)
    names = chosen("--only", only, list(SECTIONS))
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        folder = Path(name)
        prepare_builtin("builtin:stdlib", folder)
        for each in names:
            before = os.getloadavg()[0]
            text = table(SECTIONS[each](folder))
            commit = (describe_code().commit or "unknown")[:7]
            load = f"{before:.1f} before and {os.getloadavg()[0]:.1f} after"
            text += f"\nCommit {commit}, {os.cpu_count()} cores, load {load}.\n"
            print(f"{each}\n\n{text}")
            if write is not None:
                write.write_text(replace_section(write.read_text(), each, text, str(write)))


if __name__ == "__main__":
    run_script(main)
