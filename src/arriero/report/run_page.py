"""The HTML page of one or several runs: curves, speed, data, goodput, checkpoints, plan and settings.

Curves are drawn by Plotly, whose script is embedded: the page needs no network. The rest is built from the
frame in `report/page.py`.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from plotly.offline import get_plotlyjs

from arriero.checkpoint.directory import find_checkpoints
from arriero.checkpoint.scores import checkpoint_row
from arriero.config.fields import toml_value
from arriero.data.order.ledger import LEDGER
from arriero.report.goodput import CAUSES
from arriero.report.history import RunHistory, differing_settings, event_text, event_title, run_names
from arriero.report.page import Bar, Cell, Column, Section, page, stacked_bars, table, text_table, tiles
from arriero.train.plan_file import predicted_and_measured
from arriero.units import human_count, human_time

_HERE = Path(__file__).parent
# points of a curve in the page; of more, the extremes of each interval are kept
_POINTS = 2000
_TINTS = [f"c{number}" for number in range(1, 9)]
_MARKED = {
    "start": "c2",
    "save": "c1",
    "evaluation": "c3",
    "signal": "c4",
    **dict.fromkeys(("fault", "hang", "save failed", "failure", "give up"), "c5"),
    **dict.fromkeys(("skip", "bad step", "rollback", "no rollback", "slow rank"), "c8"),
}
_NOT_MARKED = ("remark",)
_SHOWN_EVENTS = 20


class Chart(NamedTuple):
    """A chart of curves over tokens; each curve is a key of metrics.jsonl, its name, and its factor."""

    title: str
    unit: str
    curves: Sequence[tuple[str, str, float]]
    axis: Literal["linear", "log", "from zero"] = "linear"


_CHARTS = (
    Chart("Loss", "nats per token", (("loss", "training", 1), ("eval_loss", "validation", 1))),
    Chart("Throughput", "tok/s", (("tokens_per_s", "tok/s", 1),), "from zero"),
    Chart("Model FLOPs utilisation", "%", (("mfu", "MFU", 100), ("hfu", "HFU", 100))),
    Chart("Gradient norm", "", (("grad_norm", "gradient norm", 1),), "log"),
    Chart("Learning rate", "", (("lr", "learning rate", 1),), "from zero"),
    Chart(
        "Memory", "GiB", (("peak_mem_gib", "allocated", 1), ("reserved_mem_gib", "reserved", 1)), "from zero"
    ),
    Chart("Waiting for data", "% of the time", (("data_wait", "waiting", 100),), "from zero"),
    Chart("Energy", "joules per token", (("joules_per_token", "energy", 1),), "from zero"),
)


def run_page(runs: Sequence[RunHistory], refresh_s: float | None = None, has_scripts: bool = True) -> str:
    """Return the page. With `refresh_s` it reloads its content from the same address at that interval, where
    it needs no scripts again."""
    names = run_names(runs)
    parts: list[Section | str] = [_tiles(run) for run in runs] if len(runs) == 1 else [_overview(runs, names)]
    charts = [Section(each.title, figure) for each in _CHARTS if (figure := _figure(each, runs, names))]
    parts.append(f'<div class="charts">{"".join(map(str, charts))}</div>')
    parts += list(filter(None, (_sources(runs, names), _history(runs, names), _goodput(runs, names))))
    parts += list(filter(None, (_checkpoints(runs, names), _plan(runs, names), _settings(runs, names))))
    title = names[0] if len(runs) == 1 else " and ".join(names)
    about = [*(runs[0].about if len(runs) == 1 else ()), f"written {_moment(datetime.now().timestamp())}"]
    scripts = [get_plotlyjs(), (_HERE / "charts.js").read_text(encoding="utf-8")] if has_scripts else []
    if refresh_s and has_scripts:
        scripts.append(f"setInterval(refresh, {1000 * refresh_s:.0f});")
    return page(f"Run {title}" if len(runs) == 1 else f"Runs {title}", "; ".join(about), parts, scripts)


def _tiles(run: RunHistory) -> str:
    row = run.summary
    facts = [
        ("state", row.state, f"last active {_moment(row.last_activity)}"),
        ("step", f"{row.step:,}", f"of {row.total_steps:,}" if row.total_steps else ""),
        ("tokens", human_count(row.tokens), ""),
    ]
    if run.last and row.loss is None:
        skipped = f"{run.last.get('skipped', 0):,} updates were skipped"
        facts.append(("last training loss", "not finite", skipped))
    for key, name in (("loss", "training loss"), ("eval_loss", "validation loss")):
        if series := run.series(key):
            facts.append((name, f"{series[-1][1]:.4f}", f"{series[0][1]:.4f} at the start"))
    if row.tokens_per_s:
        mfu = f", MFU {row.mfu:.1%}" if row.mfu else ""
        facts.append(("speed", f"{row.tokens_per_s:,.0f}", f"tok/s{mfu}"))
    if row.peak_mem_gib:
        facts.append(("memory", f"{row.peak_mem_gib:.1f} GiB", "peak of a device"))
    if row.energy_kwh:
        facts.append(("energy", f"{row.energy_kwh:,.3g} kWh", "of the devices"))
    if (report := run.goodput) is not None:
        facts.append(("goodput", f"{report.share:.1%}", f"{human_time(report.allocated_s)} of device time"))
    return tiles(facts)


def _overview(runs: Sequence[RunHistory], names: Sequence[str]) -> Section:
    titles = ("state", "step", "tokens", "loss", "validation loss", "tok/s", "GiB", "goodput")
    rows = []
    for run, name in zip(runs, names, strict=True):
        row, report = run.summary, run.goodput
        share = report.share if report else None
        values = (row.loss, row.eval_loss, row.tokens_per_s, row.peak_mem_gib, share)
        patterns = ("{:.4f}", "{:.4f}", "{:,.0f}", "{:.1f}", "{:.1%}")
        rows.append(
            [
                Cell(name, name),
                Cell(row.state, row.state),
                Cell(f"{row.step:,}", row.step),
                Cell(human_count(row.tokens), row.tokens),
                *(_number(value, pattern) for value, pattern in zip(values, patterns, strict=True)),
            ]
        )
    return Section("Overview", table([Column("run", is_text=True), *map(Column, titles)], rows))


def _number(value: float | None, pattern: str) -> Cell:
    return Cell("", 0.0) if value is None else Cell(pattern.format(value), value)


def _figure(chart: Chart, runs: Sequence[RunHistory], names: Sequence[str]) -> str:
    """Return the chart as HTML, or nothing if no run has its curves."""
    traces = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        for place, (key, label, factor) in enumerate(_curves(chart, run)):
            points = thinned(run.series(key), _POINTS)
            if not points:
                continue
            tint = _TINTS[(place if len(runs) == 1 else number) % len(_TINTS)]
            traces.append(
                {
                    "name": label if len(runs) == 1 else f"{name}, {label}",
                    "x": [tokens for tokens, _ in points],
                    "y": [factor * value for _, value in points],
                    "mode": "lines+markers" if len(points) < 40 else "lines",
                    "line": {"width": 1.6, "dash": "dot" if place and len(runs) > 1 else "solid"},
                    # curves of one run have one colour if there are several runs
                    "marker": {"symbol": place, "size": 7} if len(runs) > 1 else {},
                    "tint": tint,
                }
            )
    if not traces:
        return ""
    vertical = {
        "title": {"text": chart.unit},
        "type": "log" if chart.axis == "log" else "linear",
        "rangemode": "tozero" if chart.axis == "from zero" else "normal",
        # 3e-4 instead of 300µ
        "exponentformat": "e" if chart.title == "Learning rate" else "B",
    }
    # a long legend takes its rows from the chart
    height = 320 + 16 * max(0, len(traces) - 3)
    across = {"title": {"text": "tokens"}, "rangemode": "tozero"}
    return _drawn(chart.title, traces, {"xaxis": across, "yaxis": vertical, "hovermode": "x unified"}, height)


def _curves(chart: Chart, run: RunHistory) -> list[tuple[str, str, float]]:
    """Return the curves of a chart; the chart of losses also has one per validation source."""
    curves = list(chart.curves)
    if chart.title == "Loss":
        sources = {name for event in run.events for name in event.get("eval_losses") or {}}
        curves += [(f"eval_losses.{name}", f"validation, {name}", 1) for name in sorted(sources)]
    return curves


def _drawn(title: str, traces: list[dict[str, Any]], layout: dict[str, Any], height: int = 320) -> str:
    # "</" would end the script element
    content = json.dumps({"data": traces, "layout": layout}).replace("</", "<\\/")
    label = escape(title)
    return (
        f'<div class="chart" style="height:{height}px" role="img" aria-label="{label}">'
        f'<script type="application/json">{content}</script></div>'
    )


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points: of each interval the lowest and the highest, so that spikes stay."""
    if len(points) <= most:
        return list(points)
    kept: list[tuple[float, float]] = []
    intervals = most // 2
    for i in range(intervals):
        part = points[i * len(points) // intervals : (i + 1) * len(points) // intervals]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def _sources(runs: Sequence[RunHistory], names: Sequence[str]) -> Section | None:
    rows = []
    for run, name in zip(runs, names, strict=True):
        path = run.directory / LEDGER
        try:
            sources = json.loads(path.read_bytes())["sources"]
            read = [(str(each["name"]), int(each["tokens"]), float(each["epochs"])) for each in sources]
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            problem = f"{LEDGER} is damaged ({type(error).__name__}: {error})"
            rows.append([Cell(name, name), Cell(problem, problem)])
            continue
        total = sum(tokens for _, tokens, _ in read) or 1
        for source, tokens, epochs in read:
            rows.append(
                [
                    Cell(name, name),
                    Cell(source, source),
                    Cell(f"{tokens:,}", tokens),
                    Cell(f"{tokens / total:.1%}", tokens / total),
                    Cell(f"{epochs:.3f}", epochs),
                ]
            )
    columns = [
        Column("run", is_text=True),
        Column("source", is_text=True),
        *map(Column, ("tokens", "share", "epochs")),
    ]
    note = "From ledger.json, as of the last checkpoint or the end. `arriero data audit` verifies it."
    return Section("Data", _by_run(runs, columns, rows), note) if rows else None


def _history(runs: Sequence[RunHistory], names: Sequence[str]) -> Section | None:
    """Events over wall time: starts, saves, evaluations, signals, faults and decisions of the supervisor."""
    traces: list[dict[str, Any]] = []
    for run, name in zip(runs, names, strict=True):
        kinds = dict.fromkeys(event["event"] for event in run.events if event["event"] not in _NOT_MARKED)
        for kind in kinds:
            mine = [event for event in run.events if event["event"] == kind]
            label = kind if len(runs) == 1 else f"{name}, {kind}"
            traces.append(
                {
                    "name": kind,
                    "x": [datetime.fromtimestamp(event["time"], UTC).isoformat() for event in mine],
                    "y": [label] * len(mine),
                    "text": [_details(event) for event in mine],
                    "hovertemplate": "%{x}<br>%{text}<extra></extra>",
                    "mode": "markers",
                    "marker": {"size": 9, "symbol": "line-ns-open" if kind == "save" else "circle"},
                    "tint": _MARKED.get(kind, "muted"),
                }
            )
    if not traces:
        return None
    lanes = len({trace["y"][0] for trace in traces})
    axis = {"type": "category", "autorange": "reversed"}
    layout = {"xaxis": {"type": "date"}, "yaxis": axis, "showlegend": False, "hovermode": "closest"}
    drawn = _drawn("Events", traces, layout, 120 + 34 * lanes)
    return Section("Events", drawn + _notable(runs, names))


def _notable(runs: Sequence[RunHistory], names: Sequence[str]) -> str:
    """Return a table of faults and decisions, because a phone and a printed page have no hovering."""
    rows = [
        [name, event_title(event), event_text(event), _moment(event["time"])]
        for run, name in zip(runs, names, strict=True)
        for event in run.notable_events[-_SHOWN_EVENTS:]
    ]
    return _texts_by_run(runs, ("run", "event", "what happened", "time"), rows) if rows else ""


def _details(event: dict[str, Any]) -> str:
    shown = {key: value for key, value in event.items() if key not in ("time", "event", "versions")}
    return escape("; ".join(f"{key} {value}" for key, value in shown.items()))[:300]


def _goodput(runs: Sequence[RunHistory], names: Sequence[str]) -> Section | None:
    bars = []
    for run, name in zip(runs, names, strict=True):
        if (report := run.goodput) is not None and report.allocated_s > 0:
            parts = {"steps that were kept": report.kept_s, **report.lost_s}
            shown = f"{report.share:.1%} of {human_time(report.allocated_s)}"
            bars.append(Bar(name, {part: seconds / 3600 for part, seconds in parts.items()}, shown))
    if not bars:
        return None
    shown = ("steps that were kept", *CAUSES)
    tints = dict(zip(shown, ("c2", "c4", "c1", "c3", "c6", "c8", "c5", "c7", "muted"), strict=True))
    used = {
        part: f"var(--{tint})" for part, tint in tints.items() if any(bar.parts[part] > 0 for bar in bars)
    }
    note = "Device-hours that were allocated: goodput is the share of steps that were kept."
    return Section("Goodput", stacked_bars(bars, used, "device-hours", is_share=True), note)


def _checkpoints(runs: Sequence[RunHistory], names: Sequence[str]) -> Section | None:
    rows = []
    for run, name in zip(runs, names, strict=True):
        for saved in map(checkpoint_row, find_checkpoints(run.directory)):
            numbers = (saved.tokens, saved.bytes, saved.saved_at)
            rows.append(
                [
                    Cell(name, name),
                    Cell(f"{saved.step:,}", saved.step),
                    *(Cell(text, n or 0) for text, n in zip(saved.shown(_moment), numbers, strict=True)),
                    Cell(saved.scores or saved.problem or "", saved.scores),
                ]
            )
    titles = ("step", "tokens", "size", "saved")
    columns = [Column("run", is_text=True), *map(Column, titles), Column("evaluations", is_text=True)]
    return Section("Checkpoints", _by_run(runs, columns, rows)) if rows else None


def _plan(runs: Sequence[RunHistory], names: Sequence[str]) -> Section | None:
    rows = [
        (name, *row)
        for run, name in zip(runs, names, strict=True)
        for row in predicted_and_measured(run.directory)
    ]
    titles = ("run", "", "measured", "predicted, and its error")
    return Section("Plan", _texts_by_run(runs, titles, rows)) if rows else None


def _by_run(runs: Sequence[RunHistory], columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table whose first column is the run; the page of a single run needs no such column."""
    first = 1 if len(runs) == 1 else 0
    return table(columns[first:], [row[first:] for row in rows])


def _texts_by_run(runs: Sequence[RunHistory], titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = 1 if len(runs) == 1 else 0
    return text_table(titles[first:], [row[first:] for row in rows])


def _settings(runs: Sequence[RunHistory], names: Sequence[str]) -> Section:
    changed = differing_settings(runs) if len(runs) > 1 else {}
    keys = dict.fromkeys([*changed, *(key for run in runs for key in run.settings)])
    rows = [
        [key, *(toml_value(run.settings[key]) if key in run.settings else "" for run in runs)] for key in keys
    ]
    note = f"The first {len(changed)} keys differ." if changed else ""
    shown = text_table(("key", *names), rows)
    return Section("Settings", f"<details><summary>all keys</summary>{shown}</details>", note)


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
