"""The frame of HTML reports: one file without network access, light and dark, with tiles, tables and charts.

Charts are positioned HTML elements instead of pictures: text keeps its size on a phone, every mark can be
reached by keyboard, and no library is embedded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from pathlib import Path
from typing import NamedTuple

from arriero import __version__

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    """A part of a page; `body` is HTML."""

    title: str
    body: str
    note: str = ""

    def __str__(self) -> str:
        note = f'<p class="note">{_with_code(self.note)}</p>' if self.note else ""
        return f"<section><h2>{escape(self.title)}</h2>{note}{self.body}</section>"


class Cell(NamedTuple):
    """A table cell; `value` is what sorting compares."""

    text: str
    value: float | str


class Column(NamedTuple):
    title: str
    is_text: bool = False


def page(title: str, subtitle: str, parts: Sequence[Section | str], scripts: Sequence[str] = ()) -> str:
    """Return a whole HTML file. Parts that are strings are HTML; `scripts` run after the page's own."""
    style, script = (_HERE.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    more = "".join(f"<script>\n{each}</script>\n" for each in scripts)
    body = "\n".join(map(str, parts))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="dim">{escape(subtitle)}</p>
{body}
<footer>Arriero {escape(__version__)}</footer>
</main>
<div id="tip" role="tooltip"></div>
<script>
{script}</script>
{more}</body>
</html>
"""


def tiles(facts: Sequence[tuple[str, str, str]]) -> str:
    """Return tiles of (name, value, remark)."""
    each = (
        f"<span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(remark)}</span>"
        for name, value, remark in facts
    )
    boxes = "".join(f'<div class="tile">{content}</div>' for content in each)
    return f'<div class="tiles">{boxes}</div>'


def sentences(texts: Sequence[str]) -> str:
    """Return sentences as a list; words in backticks are code."""
    return f"<ul>{''.join(f'<li>{_with_code(text)}</li>' for text in texts)}</ul>"


def _with_code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], highlight: int | None = None) -> str:
    """Return a table that scrolls sideways on small screens; a click on a heading sorts it."""

    def kind(number: int) -> str:
        return ' class="text"' if columns[number].is_text else ""

    heads = "".join(
        f"<th{kind(i)}><button>{escape(column.title)}</button></th>" for i, column in enumerate(columns)
    )
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(
            f'<td{kind(i)} data-value="{escape(str(cell.value))}">{escape(cell.text)}</td>'
            for i, cell in enumerate(row)
        )
        lines.append(f"<tr{' class=best' if number == highlight else ''}>{cells}</tr>")
    inside = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table>{inside}</table></div>'


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    columns = [Column(title, is_text=True) for title in titles]
    return table(columns, [[Cell(text, text) for text in row] for row in rows])


def legend(colour_of: Mapping[str, str]) -> str:
    each = (f'<span><i style="background:{c}"></i>{escape(name)}</span>' for name, c in colour_of.items())
    return f'<div class="legend">{"".join(each)}</div>'


def mark(style: str, tip: str, kind: str = "", text: str = "") -> str:
    """Return an element of a chart that shows `tip` when it is pointed at, touched or focused."""
    return (
        f'<div class="mark {kind}" style="{style}" data-tip="{escape(tip)}" tabindex="0" role="img" '
        f'aria-label="{escape(tip)}">{escape(text)}</div>'
    )


class Bar(NamedTuple):
    """A horizontal stacked bar. `parts` are named amounts, `value` is shown at its end."""

    label: str
    parts: Mapping[str, float]
    value: str
    limit: float | None = None


def stacked_bars(
    bars: Sequence[Bar], shown: Mapping[str, str], unit: str, limit_tip: str = "", is_share: bool = False
) -> str:
    """Return stacked bars with a legend, on one scale or each in full width; `shown` maps parts to
    colours."""
    # a little more, so that a limit at the end of the scale is visible
    longest = 1.01 * max(max(sum(bar.parts.values()), bar.limit or 0) for bar in bars) or 1.0
    lines = []
    for bar in bars:
        longest = sum(bar.parts.values()) if is_share else longest
        parts = "".join(
            mark(
                f"width:{100 * amount / longest:.3f}%;background:{shown.get(name, 'var(--muted)')}",
                f"{bar.label}\n{name}: {significant(amount)} {unit} ({amount / sum(bar.parts.values()):.0%})",
            )
            for name, amount in bar.parts.items()
            if amount > 0
        )
        if bar.limit:
            tip = f"{limit_tip}: {significant(bar.limit)} {unit}"
            parts += mark(f"left:{100 * bar.limit / longest:.3f}%", tip, "limit")
        label = f"<span>{escape(bar.label)}</span><span>{escape(bar.value)}</span>"
        lines.append(f'<div><div class="bar-label">{label}</div><div class="bar">{parts}</div></div>')
    return legend(shown) + f'<div class="bars">{"".join(lines)}</div>'


class Point(NamedTuple):
    x: float
    y: float
    tip: str
    label: str = ""


def scatter(
    points: Sequence[Point], x_title: str, y_title: str, limit: tuple[float, str] | None = None
) -> str:
    """Return a scatter plot; points with a label are emphasised. `limit` is a horizontal line and its
    name."""
    xs, ys = [p.x for p in points], [p.y for p in points] + ([limit[0]] if limit else [])
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(0.0, max(ys))
    left, right, top = x_ticks[0], x_ticks[-1], y_ticks[-1]

    def across(x: float) -> float:
        return 100 * (x - left) / (right - left)

    lines = "".join(f'<hr style="bottom:{100 * y / top:.2f}%">' for y in y_ticks)
    if limit:
        at = f"bottom:{100 * limit[0] / top:.2f}%"
        lines += f'<hr class="limit-line" style="{at}">'
        above = f"top:{100 - 100 * limit[0] / top:.2f}%"
        lines += f'<span class="line-label" style="{above}">{escape(limit[1])}</span>'
    dots = ""
    for point in points:
        place = f"left:{across(point.x):.2f}%;bottom:{100 * point.y / top:.2f}%"
        dots += mark(place, point.tip, "dot best" if point.label else "dot")
        if point.label:
            where = f"left:{across(point.x):.2f}%;top:{100 - 100 * point.y / top:.2f}%"
            dots += f'<span class="dot-label" style="{where}">{escape(point.label)}</span>'
    y_labels = "".join(f'<span style="bottom:{100 * y / top:.2f}%">{significant(y)}</span>' for y in y_ticks)
    x_labels = "".join(f'<span style="left:{across(x):.2f}%">{significant(x)}</span>' for x in x_ticks)
    return (
        f'<div class="y-title">{escape(y_title)}</div><div class="plot"><div class="y-axis">{y_labels}</div>'
        f'<div class="area">{lines}{dots}</div><div class="x-axis">{x_labels}</div>'
        f'<div class="caption">{escape(x_title)}</div></div>'
    )


class Span(NamedTuple):
    """An activity in a lane of a timeline, in seconds."""

    lane: int
    start: float
    end: float
    kind: str
    text: str
    tip: str


def timeline(spans: Sequence[Span], lanes: Sequence[str], shown: Mapping[str, str]) -> str:
    """Return lanes of activities on one time axis, with a legend."""
    end = max(span.end for span in spans)
    rows = []
    for number, name in enumerate(lanes):
        marks = "".join(
            mark(
                f"left:{100 * s.start / end:.3f}%;width:{100 * (s.end - s.start) / end:.3f}%;"
                f"background:{shown[s.kind]}",
                s.tip,
                text=s.text if (s.end - s.start) / end > 0.015 else "",
            )
            for s in spans
            if s.lane == number
        )
        rows.append(f'<span>{escape(name)}</span><div class="lane">{marks}</div>')
    axis = "".join(f"<span>{significant(end * part / 4)} s</span>" for part in range(5))
    return legend(shown) + f'<div class="lanes">{"".join(rows)}<div class="lane-axis">{axis}</div></div>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that enclose an interval."""
    span = (high - low) or abs(high) or 1.0
    raw = span / count
    size = 10.0 ** floor(log10(raw))
    step = next(each * size for each in (1, 2, 2.5, 5, 10) if each * size >= raw)
    first, last = floor(low / step), -floor(-high / step)
    last = max(last, first + 1)
    return [round(step * i, 12) for i in range(first, last + 1)]


def significant(value: float) -> str:
    """Format a number with three significant digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - floor(log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
