"""`arriero bench parity`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from arriero.bench.cases import MODELS, Case, cases
from arriero.config.options import refuse_unwritable
from arriero.errors import UserError
from arriero.ui import Console, columns, make_console, styled

if TYPE_CHECKING:
    from arriero.bench.parity import Verdict

_COLUMNS = {"layout": 32, "ranks": 5, "loss": 8, "gradient": 8, "weights": 8, "seconds": 7, "": 5}

Model = Annotated[
    Literal["llama", "gpt2"] | None,
    typer.Option(help="One of the two models alone.", show_default=False),
]
Quick = Annotated[bool, typer.Option("--quick", help="Only the cases that `make test` runs.")]
Only = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Only cases whose 'group: name' holds this.", show_default=False),
]
Write = Annotated[
    Path | None, typer.Option(help="Write the result as a Markdown page, too.", show_default=False)
]
Cache = Annotated[Path, typer.Option(help="Where the built-in corpus is kept, made once.")]
Device = Annotated[
    Literal["cpu", "cuda"], typer.Option(help="Where to compute; on 'cuda' all ranks share one GPU.")
]


def parity(
    model: Model = None,
    quick: Quick = False,
    only: Only = None,
    write: Write = None,
    cache: Cache = Path("data"),
    device: Device = "cpu",
) -> None:
    """Any layout, the same loss: train the same steps in every layout and compare with one process.

    Shown are relative differences: of 20 losses the largest, of the first gradient's norm, of final weights.

    Example: arriero bench parity --quick --only 'two axes'
    """
    wanted = {name: _chosen(name, quick, only, device) for name in ([model] if model else MODELS)}
    if not any(wanted.values()):
        groups = dict.fromkeys(case.group for case in cases(MODELS[0]))
        raise UserError(f"no case matches '{only}'", f"name one of the groups: {', '.join(groups)}")
    refuse_unwritable("--write", write)
    from arriero.bench.parity import refuse_absent
    from arriero.bench.parity_page import page
    from arriero.interrupt import Interrupted

    refuse_absent(device)
    console = make_console()
    try:
        verdicts: dict[str, list[Verdict]] = {}
        for name, chosen in wanted.items():
            verdicts[name] = []
            for verdict in _judged(console, name, chosen, cache, device):
                verdicts[name].append(verdict)
                if write is not None:
                    # after each case: what a long run has shown stays when it is stopped
                    write.write_text(page(verdicts, device))
    except Interrupted as stop:
        raise typer.Exit(128 + stop.number) from None
    if write is not None:
        console.print(f"written to {write}")
    _show_failures(console, verdicts)


def _chosen(model: str, quick: bool, only: str | None, device: str) -> list[Case]:
    return [
        case
        for case in cases(model, device)
        if (case.quick or not quick) and (only is None or case.matches(only))
    ]


def _judged(
    console: Console, model: str, chosen: list[Case], cache: Path, device: str
) -> "Iterator[Verdict]":
    from arriero.bench.parity import judge_all

    group = None
    console.print(columns(_COLUMNS.values(), *_COLUMNS), style="bold")
    with console.status("") as status:
        judging = judge_all(model, chosen, cache, device)
        for number, case in enumerate(chosen, 1):
            if case.group != group:
                group = case.group
                console.print(f"{model}: {group}", style="bold")
            status.update(f"{number} of {len(chosen)}: {case.name}")
            verdict = next(judging)
            console.print(_verdict_row(verdict))
            yield verdict


def _verdict_row(verdict: "Verdict"):
    differences = [f"{value:.1e}" for value in (verdict.loss, verdict.norm, verdict.weights)]
    holds = styled("holds", "green") if verdict.holds else styled("FAILS", "bold red")
    case, seconds = verdict.case, f"{verdict.seconds:.1f}"
    return columns(_COLUMNS.values(), case.name, case.ranks, *differences, seconds, holds)


def _show_failures(console: Console, verdicts: "dict[str, list[Verdict]]") -> None:
    failed = [(model, v) for model, judged in verdicts.items() for v in judged if not v.holds]
    number = sum(map(len, verdicts.values()))
    if not failed:
        console.print(f"[green]{number} of {number} hold[/]")
        return
    console.print(f"[bold red]{len(failed)} of {number} do not hold:[/]")
    for model, verdict in failed:
        console.plain(f"{model}, {verdict.case.title}", "bold")
        console.print(_verdict_row(verdict))
        if verdict.error:
            console.plain(verdict.error)
    raise typer.Exit(1)
