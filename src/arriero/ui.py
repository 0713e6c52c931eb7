"""Terminal output of all verbs: lines, tables, panels, progress bars, --json and --quiet.

Nothing else imports rich. Without a terminal there are no bars and no colours, only plain lines.
"""

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import rich.console
from rich.bar import Bar
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

from arriero.events import finite
from arriero.files import Advance

__all__ = ["Text", "escape"]

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Set whether consoles made from now on print nothing."""
    global _quiet
    _quiet = quiet


class Console(rich.console.Console):
    """A rich console that leaves the wrapping of long lines to the terminal."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """Print text with rich markup, or a table or panel."""
        if soft_wrap is None:
            soft_wrap = all(isinstance(each, str | Text) for each in objects)
        super().print(*objects, soft_wrap=soft_wrap, **options)

    def plain(self, text: object, style: str | None = None) -> None:
        """Print text as it is, without markup."""
        self.print(Text(str(text), style or ""))


def make_console(as_json: bool = False) -> Console:
    """Return the console of a verb. With --json it prints to standard error, because stdout is the object.

    Tables have 160 columns where the output is not a terminal.
    """
    stream = sys.stderr if as_json else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 160
    return Console(highlight=False, stderr=as_json, quiet=_quiet, width=width)


def print_json(facts: Mapping[str, Any]) -> None:
    """Print one JSON object, the whole standard output of a verb with --json."""
    sys.stdout.write(json.dumps(finite(facts), indent=2, allow_nan=False, default=str) + "\n")


def print_error(error: Exception) -> None:
    """Print one sentence to standard error, also with --quiet."""
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(str(error))}")


def print_toml(text: str) -> None:
    """Print TOML, highlighted on a terminal and unchanged elsewhere."""
    console = Console()
    if console.is_terminal:
        from rich.syntax import Syntax

        console.print(Syntax(text, "toml", background_color="default", word_wrap=True))
    else:
        sys.stdout.write(text)


class Table(RichTable):
    """A table without lines. A heading that begins with ">" makes its column right-aligned.

    On a narrow terminal the one or two longest columns are wrapped if the others leave them enough room.
    Otherwise each row becomes a block: a title, then short cells with their headings, then long ones.
    """

    _ENOUGH, _LONG = 26, 30  # columns of a wrapped cell; a cell that gets lines of its own in a block

    def __init__(self, *headings: str, title: str | None = None, no_wrap: Collection[str] = ()) -> None:
        super().__init__(
            box=None, header_style="bold", padding=(0, 2, 0, 0), title=title, title_justify="left"
        )
        self._cells: list[list[Text | Bar]] = []
        for heading in headings:
            name = heading.removeprefix(">")
            side = "right" if heading.startswith(">") else "left"
            self.add_column(name, justify=side, overflow="fold", no_wrap=name in no_wrap)

    def row(self, *cells: object) -> None:
        """Add a row of plain values; use `styled` for a colour and `bar` for a bar."""
        row = [each if isinstance(each, Text | Bar) else Text(str(each)) for each in cells]
        self._cells.append(row + [Text()] * (len(self.columns) - len(row)))
        self.add_row(*self._cells[-1])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        widths = [self._width(i) for i in range(len(self.columns))]
        longest = sorted(range(len(widths)), key=lambda i: -widths[i])
        rest = [options.max_width - 2 * len(widths) - sum(widths[i] for i in longest[k:]) for k in range(3)]
        wrapped = next((k for k in range(3) if rest[k] >= k * self._ENOUGH), None)
        if wrapped is None and all(isinstance(cell, Text) for row in self._cells for cell in row):
            yield from self._blocks()
            return
        for i in longest[wrapped or 0 :] if wrapped else ():
            self.columns[i].no_wrap = True
        yield from super().__rich_console__(console, options)

    def _width(self, column: int) -> int:
        cells = [row[column] for row in self._cells if column < len(row)]
        header = Text(str(self.columns[column].header)).cell_len
        return max(
            [header, *(each.cell_len if isinstance(each, Text) else each.width or 0 for each in cells)]
        )

    def _blocks(self) -> Iterator[Any]:
        yield from [Text(str(self.title), "italic")] if self.title else []
        titles = 1 + next((i for i, column in enumerate(self.columns) if column.justify == "left"), 0)
        for row in self._cells:
            cells = [cell if isinstance(cell, Text) else Text() for cell in row]
            yield Text("  ", "bold").join(cells[:titles])
            short, long = [], []
            for column, cell in zip(self.columns[titles:], cells[titles:], strict=True):
                heading = f"{column.header}: " if column.header else ""
                if cell:
                    (long if cell.cell_len > self._LONG else short).append(
                        Text.assemble((heading, "dim"), cell)
                    )
            for text in [Text("  ").join(short)] * bool(short) + long:
                yield Padding(text, (0, 0, 0, 3))


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, with headings as in `Table`."""
    marks = "".join("---:|" if heading.startswith(">") else "---|" for heading in headings)
    names = [heading.removeprefix(">") for heading in headings]
    return [f"| {' | '.join(names)} |", f"|{marks}", *(f"| {' | '.join(row)} |" for row in rows)]


def styled(text: object, style: str) -> Text:
    return Text(str(text), style)


def bar(value: float, largest: float) -> Bar:
    """Return a horizontal bar, for a table cell."""
    return Bar(largest, 0, value, width=40)


def facts(rows: Iterable[tuple[str, ...]]) -> RichTable:
    """Return a panel of facts: a bold name, a value and, if there is a third column, a dim remark."""
    grid = RichTable.grid(padding=(0, 2))
    for name, value, *remark in rows:
        grid.add_row(Text(name, "bold"), Text(value), *(Text(each, "dim") for each in remark))
    return grid


def columns(widths: Iterable[int], *cells: object) -> RichTable:
    """Return one row of cells with fixed widths, for rows that are printed one by one."""
    grid = RichTable.grid(padding=(0, 1))
    for width in widths:
        grid.add_column(width=width)
    grid.add_row(*(each if isinstance(each, Text) else Text(str(each)) for each in cells))
    return grid


def panel(text: Text | str, title: str, align: str = "center") -> Panel:
    """Return text in a box with a title."""
    return Panel(text, title=escape(title), title_align="left" if align == "left" else "center")


def _progress(console: rich.console.Console, *shown: Any, transient: bool = True) -> Progress:
    return Progress(*shown, console=console, transient=transient, disable=not console.is_terminal)


@contextmanager
def byte_progress(console: rich.console.Console, what: str, total: int) -> Iterator[Advance]:
    """Show a bar of bytes with speed and time left; yield the function that advances it."""
    shown = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with _progress(console, TextColumn("{task.description}"), *shown) as progress:
        task = progress.add_task(escape(what), total=total)
        yield lambda count: progress.advance(task, count)


class StageProgress:
    """Shows a bar per stage of some work; called with the stage, the amount done and the total.

    `title` is printed before the first stage, so that work without stages prints nothing.
    """

    def __init__(self, console: rich.console.Console, title: str = "") -> None:
        self._bars, self._title = _progress(console), title
        self._stages: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._stages:
            if self._title:
                self._bars.console.print(self._title)
            self._bars.start()
        if stage not in self._stages:
            self._stages[stage] = self._bars.add_task(escape(stage), total=total)
        self._bars.update(self._stages[stage], completed=done, total=total)

    def __enter__(self) -> "StageProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._bars.stop()


class LiveBar:
    """A bar with a label before it and changing text behind it, for work that reports its own numbers."""

    def __init__(self, console: rich.console.Console) -> None:
        shown = TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[text]}")
        self._bar = _progress(console, SpinnerColumn(), *shown, transient=False)
        self.started = False

    def start(self, label: str, total: float, text: str = "") -> None:
        self._task, self.started = self._bar.add_task(escape(label), total=total, text=escape(text)), True
        self._bar.start()

    def update(self, done: float, text: str, label: str | None = None) -> None:
        named = None if label is None else escape(label)
        self._bar.update(self._task, completed=done, text=escape(text), description=named)

    def stop(self) -> None:
        self._bar.stop()
