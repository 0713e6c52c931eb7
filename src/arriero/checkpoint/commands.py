"""`arriero ckpt list | inspect | verify | prune`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from arriero.errors import UserError
from arriero.units import human_bytes, human_count, human_time

if TYPE_CHECKING:
    from arriero.checkpoint.directory import Saved
    from arriero.checkpoint.manifest import Manifest

Run = Annotated[Path, typer.Argument(help="A run directory, or its name under runs/.", show_default=False)]
Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, or a run directory: its newest.", show_default=False)
]
Quick = Annotated[bool, typer.Option("--quick", help="Look at sizes only; read no file.")]


def list_checkpoints(run: Run, quick: Quick = False) -> None:
    """The checkpoints of a run: step, tokens, size, age, whether they are valid.

    Every file is read and its checksum compared, unless --quick. Damaged checkpoints that a run has renamed
    aside are listed too.

    Example: arriero ckpt list runs/demo
    """
    from arriero.checkpoint.directory import aside_in, saved_in

    console, directory = Console(highlight=False), _run_directory(run)
    found, aside = saved_in(directory, report_unreadable=True), aside_in(directory)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("step", "tokens", "size", "age"):
        table.add_column(heading, justify="right")
    table.add_column("valid" if not quick else "complete", overflow="fold")
    for saved, problem in zip(found, _judged(console, found, quick), strict=True):
        verdict = "[green]yes[/]" if problem is None else f"[red]no: {escape(problem)}[/]"
        made = saved.manifest
        if made is None:
            table.add_row(str(saved.step), "", "", "", verdict)
            continue
        size, age = human_bytes(made.size), human_time(time.time() - made.time)
        table.add_row(str(saved.step), human_count(made.tokens), size, age, verdict)
    for step, path in aside:
        table.add_row(str(step), "", "", "", f"[red]no: renamed aside as {escape(path.name)}[/]")
    console.print(table if found or aside else f"{run} has no checkpoints")


def inspect(
    path: Checkpoint, tensors: Annotated[bool, typer.Option(help="List every tensor.")] = True
) -> None:
    """What is in a checkpoint: tensors with shapes and types, layout, versions, config.

    Example: arriero ckpt inspect runs/demo/checkpoints/step-00000600
    """
    directory, made = _read(path)
    console = Console(highlight=False)
    facts = Table.grid(padding=(0, 2))
    layout = " x ".join(f"{axis} {n}" for axis, n in made.layout.items() if n > 1) or "1 process"
    rows = [
        ("checkpoint", str(directory)),
        ("step", f"{made.step:,}"),
        ("tokens", f"{made.tokens:,}"),
        ("saved", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(made.time))),
        ("layout", f"{layout} (read on any other)"),
        ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
        ("tokenizer", made.tokenizer[:12]),
        ("size", f"{human_bytes(made.size)} in {len(made.files) + 1} files"),
    ]
    for name, value in rows:
        facts.add_row(f"[bold]{name}", escape(value))
    console.print(facts)
    if tensors:
        console.print(_tensor_table(made))
    console.print("[bold]run.toml[/]")
    console.print((directory / "run.toml").read_text(), markup=False, soft_wrap=True)


def verify(path: Checkpoint) -> None:
    """Compare the checksum of every file of a checkpoint and look for NaN and infinity in its tensors.

    Exit code 1 and the names of what is wrong, if anything is.

    Example: arriero ckpt verify runs/demo
    """
    from arriero.checkpoint.manifest import damaged_files
    from arriero.checkpoint.state import non_finite_tensors

    console = Console(highlight=False)
    directory, made = _read(path, damaged=1)
    with _bar(console, made.size) as advance:
        bad = damaged_files(directory, made, progress=advance, report_unreadable=True)
    for name, problem in sorted(bad.items()):
        console.print(f"[red]{escape(name)}[/] {escape(problem)}", soft_wrap=True)
    if bad:
        raise typer.Exit(1)
    with _bar(console, made.size) as advance:
        wrong = non_finite_tensors(directory, made, advance)
    for name in wrong:
        console.print(f"[red]{escape(name)}[/] contains non-finite values", soft_wrap=True)
    if wrong:
        raise typer.Exit(1)
    counts = f"{len(made.files)} files, {len(made.tensors)} tensors, {human_bytes(made.size)}"
    console.print(f"{directory} is valid: {counts}", soft_wrap=True)


def prune(
    run: Run,
    keep: Annotated[int | None, typer.Option(min=1, help="How many of the newest stay.")] = None,
    keep_every: Annotated[
        str | None, typer.Option(help="The first after each such stretch stays: '10B tok'.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Delete old checkpoints of a run that is not training, by its run file's rules or the given ones.

    Nothing is deleted before the newest one has been read and found valid.

    Example: arriero ckpt prune runs/demo --keep 1
    """
    from arriero.checkpoint.directory import delete, saved_in
    from arriero.checkpoint.manifest import damaged_files
    from arriero.checkpoint.retention import Mark, to_delete
    from arriero.config.load import config_from_toml
    from arriero.units import parse_span

    console, directory = Console(highlight=False), _run_directory(run)
    config = config_from_toml(directory / "run.toml")
    span = parse_span(keep_every) if keep_every else config.checkpoint.keep_every
    period = span.in_tokens(config.train.batch.amount) if span else None
    usable = [saved for saved in saved_in(directory) if saved.problem is None and saved.manifest]
    if not usable:
        raise UserError(f"{directory} has no checkpoint that can be used", "see `arriero ckpt list`")
    newest = usable[-1]
    assert newest.manifest is not None
    if damaged_files(newest.directory, newest.manifest):
        raise UserError(
            f"{newest.directory} is damaged, so older ones must stay", "remove it, then prune again"
        )
    marks = [Mark(saved.step, saved.manifest.tokens) for saved in usable if saved.manifest]
    gone = set(to_delete(marks, keep or config.checkpoint.keep, period))
    for saved in usable:
        if saved.step in gone:
            problem = None if dry_run else delete(saved.directory)
            done = "would remove" if dry_run else "removed" if problem is None else "could not remove"
            reason = f" ({problem})" if problem else ""
            console.print(f"{done} {saved.directory}{reason}", markup=False, soft_wrap=True)
    stay = ", ".join(str(saved.step) for saved in usable if saved.step not in gone)
    console.print(f"kept: {stay}", soft_wrap=True)


def _run_directory(run: Path) -> Path:
    if not run.is_dir() and not run.is_absolute() and (Path("runs") / run).is_dir():
        run = Path("runs") / run
    if not (run / "run.toml").exists():
        raise UserError(f"{run} is not the directory of a run", "give one that holds a run.toml")
    return run


def _read(path: Path, damaged: int | None = None) -> "tuple[Path, Manifest]":
    """`damaged` is the exit code for a directory whose manifest cannot be used."""
    from arriero.checkpoint.directory import checkpoint_at
    from arriero.checkpoint.manifest import Invalid, read_manifest

    directory = checkpoint_at(path)
    try:
        return directory, read_manifest(directory)
    except Invalid as error:
        if damaged is None:
            raise UserError(f"{directory} {error}", "give a checkpoint that is whole") from None
        Console(highlight=False).print(
            f"[red]{escape(str(directory))}[/] {escape(str(error))}", soft_wrap=True
        )
        raise typer.Exit(damaged) from None


def _judged(console: Console, found: "list[Saved]", quick: bool) -> list[str | None]:
    from arriero.checkpoint.manifest import damaged_files, wrong_sizes

    total = sum(saved.manifest.size for saved in found if saved.manifest)
    verdicts: list[str | None] = []
    with _bar(console, total) as advance:
        for saved in found:
            problem, made = saved.problem, saved.manifest
            if problem is None and made is not None:
                if quick:
                    bad = wrong_sizes(saved.directory, made)
                else:
                    bad = damaged_files(saved.directory, made, progress=advance, report_unreadable=True)
                problem = "; ".join(f"{name} {what}" for name, what in sorted(bad.items())) or None
            verdicts.append(problem)
    return verdicts


class _bar:
    def __init__(self, console: Console, total: int) -> None:
        columns = (TextColumn("reading"), BarColumn(), DownloadColumn(binary_units=True))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self):
        self._bar.start()
        return lambda count: self._bar.advance(self._task, count)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _tensor_table(made: "Manifest") -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("tensor", overflow="fold")
    table.add_column("type")
    table.add_column("shape")
    for name, (dtype, shape) in made.tensors.items():
        table.add_row(escape(name), dtype, " x ".join(map(str, shape)) or "scalar")
    return table
