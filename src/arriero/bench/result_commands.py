"""`arriero bench compare` and `arriero bench page`."""

from pathlib import Path
from typing import Annotated

import typer

from arriero.errors import UserError
from arriero.ui import make_console

RESULT = "A file of `arriero bench step --json`."


def compare(
    first: Annotated[Path, typer.Argument(help=RESULT)],
    second: Annotated[Path, typer.Argument(help=RESULT)],
) -> None:
    """How many times as fast the second result is as the first; refused if they are different work.

    Precision and optimizer states belong to the work; layout, compilation and recomputation do not.

    Example: arriero bench compare before.json after.json
    """
    from arriero.bench.compare import compare as compare_results
    from arriero.bench.result import Result

    results = [Result.read(path) for path in (first, second)]
    found = compare_results(*results)
    console = make_console()
    for path, result in zip((first, second), results, strict=True):
        t = result.timing
        console.print(
            f"{path}: {t.tokens_per_s:,.0f} tok/s, {t.median_ms:,.1f} ms a step "
            f"({t.lower_quartile_ms:,.1f} to {t.upper_quartile_ms:,.1f}); {result.mode}, {result.layout}, "
            f"{result.device.name} x {result.device.count}",
            markup=False,
        )
    console.print(
        f"the second is {found.ratio:.3f} times as fast as the first "
        f"({found.least:.3f} to {found.most:.3f}): [bold]{found.verdict}[/]",
    )


def page(
    results: Annotated[Path, typer.Option(help="The folder of results.")] = Path("benchmarks/results"),
    write: Annotated[
        Path | None,
        typer.Option(
            help="The page whose tables to replace; without it they are printed.", show_default=False
        ),
    ] = None,
) -> None:
    """The tables of docs/performance.md, from the results that are kept.

    Example: arriero bench page --write docs/performance.md
    """
    from arriero.bench.results_page import read_results, replace_section, tables

    kept = read_results(results)
    if write is None:
        typer.echo(tables(kept, Path()), nl=False)
        return
    try:
        text = write.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{write} cannot be read ({error})", "give a page that is there") from None
    text = replace_section(text, "results", tables(kept, write.parent), str(write))
    write.write_text(text, encoding="utf-8")
    typer.echo(f"{write}: {len(kept)} results")
