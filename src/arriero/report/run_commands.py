"""`arriero runs`, `runs compare`, `status` and `report`: what runs have done."""

import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.checkpoint.commands import Run, run_directory_at
from arriero.config.options import AsJson, check_writable
from arriero.errors import UserError
from arriero.ui import Table, facts, make_console, panel, print_json, styled
from arriero.units import human_count, human_time

if TYPE_CHECKING:
    from arriero.report.history import RunHistory, RunSummary

_COLOURS = {
    "running": "green",
    "finished": "cyan",
    "stopped": "yellow",
    "failed": "red",
    "killed": "red",
    "new": "dim",
}
_POINTS = 8
# a run that was killed or failed is shown with its last events
_SHOWN_EVENTS = 4

Folder = Annotated[Path, typer.Option("--dir", help="The directory that holds the runs.")]


def list_runs(context: typer.Context, folder: Folder = Path("runs"), as_json: AsJson = False) -> None:
    """List runs with state, progress, loss and speed, or compare some of them.

    Example: arriero runs --dir runs
    """
    from arriero.report.history import find_runs

    if context.invoked_subcommand is not None:
        return
    rows = [run.summary for run in find_runs(folder)]
    if as_json:
        print_json({"runs": [asdict(row) for row in rows]})
        return
    console = make_console()
    if not rows:
        console.print(f"{folder} has no runs")
        return
    table = Table("run", "state", ">step", ">tokens", ">loss", ">validation", ">tok/s", ">last active")
    for row in rows:
        table.row(
            row.run,
            styled(row.state, _COLOURS[row.state]),
            _step(row),
            human_count(row.tokens) if row.tokens else "",
            _number(row.loss, "{:.4f}"),
            _number(row.eval_loss, "{:.4f}"),
            _number(row.tokens_per_s, "{:,.0f}"),
            _ago(row.last_activity),
        )
    console.print(table)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run directories, or names under runs/.")],
    as_json: AsJson = False,
) -> None:
    """Compare runs: the keys that differ, the loss at equal numbers of tokens, speed and memory.

    Losses are interpolated between logged steps.

    Example: arriero runs compare runs/base runs/higher-lr
    """
    from arriero.config.fields import toml_value
    from arriero.report.history import RunHistory, differing_settings, run_names

    if len(runs) < 2:
        raise UserError("one run cannot be compared", "name two or more")
    found = [RunHistory(run_directory_at(run)) for run in runs]
    names = run_names(found)
    changed = differing_settings(found)
    curves = _curves(found)
    totals = [_totals(run) for run in found]
    if as_json:
        print_json({"runs": names, "settings": changed, "curves": curves, "totals": totals})
        return
    console = make_console()
    settings = Table("key", *names, title="settings that differ")
    for key, values in changed.items():
        settings.row(key, *("" if value is None else toml_value(value) for value in values))
    console.print(settings if changed else "The run files are equal.")
    for key, title in (("loss", "training loss"), ("eval_loss", "validation loss")):
        table = Table(">tokens", *(f">{name}" for name in names), ">difference", title=f"\n{title}")
        for point in curves[key]:
            known = [value for value in point["values"] if value is not None]
            spread = known[-1] - known[0] if len(known) == len(found) else None
            shown = [_number(value, "{:.4f}") for value in point["values"]]
            table.row(human_count(point["tokens"]), *shown, _number(spread, "{:+.4f}"))
        if curves[key]:
            console.print(table)
    table = Table("whole run", *(f">{name}" for name in names), title="\nspeed and memory")
    for key, pattern in _TOTALS.items():
        if any(each[key] is not None for each in totals):
            table.row(key, *(_number(each[key], pattern) for each in totals))
    console.print(table)


_TOTALS = {
    "steps": "{:,.0f}",
    "last loss": "{:.4f}",
    "last validation loss": "{:.4f}",
    "median tok/s": "{:,.0f}",
    "median MFU": "{:.1%}",
    "peak GiB": "{:.1f}",
}


def _totals(run: "RunHistory") -> dict[str, float | None]:
    def values(key: str) -> list[float]:
        return [value for _, value in run.series(key)]

    speeds, mfu, row = values("tokens_per_s"), values("mfu"), run.summary
    # the first line contains compilation
    steady = speeds[1:] or speeds
    found = (
        row.step,
        row.loss,
        row.eval_loss,
        median(steady) if steady else None,
        median(mfu[1:] or mfu) if mfu else None,
        max(values("peak_mem_gib"), default=None),
    )
    return dict(zip(_TOTALS, found, strict=True))


def _curves(runs: "list[RunHistory]") -> dict[str, list[dict[str, Any]]]:
    """Return losses at token counts that are evenly spaced over the range all runs have reached."""
    from arriero.report.history import at_tokens

    result = {}
    for key in ("loss", "eval_loss"):
        curves = [run.series(key) for run in runs]
        result[key] = []
        if not all(curves):
            continue
        first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
        if last < first:
            continue
        points = {first + (last - first) * i // (_POINTS - 1) for i in range(_POINTS)}
        for tokens in sorted(points):
            values = [at_tokens(curve, tokens) for curve in curves]
            result[key].append({"tokens": tokens, "values": values})
    return result


def status(run: Run, as_json: AsJson = False) -> None:
    """Show a run on one screen: state, progress, time left, losses, speed, memory, checkpoints, faults.

    Example: arriero status runs/demo
    """
    from arriero.checkpoint.directory import find_checkpoints
    from arriero.checkpoint.scores import checkpoint_row
    from arriero.report.history import RunHistory, event_text, event_title

    found = RunHistory(run_directory_at(run))
    left = _time_left(found)
    checkpoints = [checkpoint_row(each) for each in find_checkpoints(found.directory)]
    notable = found.notable_events[-_SHOWN_EVENTS:]
    if as_json:
        about = asdict(found.summary) | {"time_left_s": left, "last": found.last, "events": notable}
        print_json(about | {"checkpoints": [asdict(each) for each in checkpoints]})
        return
    console = make_console()
    title = f"{found.name}: {found.state}, last active {_ago(found.last_activity)}"
    console.print(panel(_progress(found.summary, left), title, align="left"))
    console.print(facts(_facts(found)))
    if checkpoints:
        table = Table(">checkpoint", ">tokens", ">size", ">saved", "evaluations")
        for saved in checkpoints[-3:]:
            table.row(saved.step, *saved.shown(_ago), saved.scores or saved.problem or "")
        console.print(table)
    for event in notable:
        text = event_text(event)
        console.plain(f"{event_title(event)}, {_ago(event['time'])}{text and f': {text}'}", "yellow")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or names under runs/.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The page; default: RUN/report.html.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page and refresh it while runs train.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --serve; 0 takes a free one.")] = 8000,
) -> None:
    """Write one HTML page about a run, or about several side by side. It needs no network.

    It has the curves of loss, validation loss, speed, memory, gradient norm and learning rate, the data that
    was read, events, goodput, checkpoints with their evaluations, the plan, and all settings.

    Example: arriero report runs/demo
    """
    from arriero.files import publish_file
    from arriero.report.history import RunHistory
    from arriero.report.run_page import run_page
    from arriero.report.serve import serve_page

    directories = [run_directory_at(run) for run in runs]
    if serve:
        serve_page(lambda new: run_page(list(map(RunHistory, directories)), 5, has_scripts=new), port)
        return
    out = out or directories[0] / "report.html"
    check_writable("--out", out)
    publish_file(out, run_page([RunHistory(each) for each in directories]).encode())
    make_console().plain(f"wrote {out}")


def _progress(row: "RunSummary", time_left_s: float | None) -> str:
    parts = [f"step {_step(row)}", f"{human_count(row.tokens)} tokens"]
    if time_left_s is not None and row.state == "running":
        parts.append(f"{human_time(time_left_s)} left")
    if row.total_steps:
        done = min(1.0, row.step / row.total_steps)
        parts.insert(0, "█" * round(20 * done) + "░" * (20 - round(20 * done)) + f" {done:.0%}")
    return "   ".join(parts)


def _facts(run: "RunHistory") -> list[tuple[str, ...]]:
    from arriero.report.history import sparkline

    last, row, rows = run.last, run.summary, []
    if about := run.about:
        rows.append(("model", about[0], ", ".join(about[1:])))
    if last and last.get("loss") is None:
        rows.append(("last loss", "not finite", f"{last.get('skipped', 0):,} updates were skipped so far"))
    for key, name in (("loss", "loss"), ("eval_loss", "validation loss")):
        values = [value for _, value in run.series(key)]
        if values:
            rows.append((name, f"{values[-1]:.4f}", sparkline(values, 36)))
    if row.tokens_per_s:
        mfu = f", MFU {row.mfu:.1%}" if row.mfu else ""
        wait = f"waiting for data {last.get('data_wait', 0):.1%} of the time"
        rows.append(("speed", f"{row.tokens_per_s:,.0f} tok/s{mfu}", wait))
    if row.peak_mem_gib:
        reserved = f"{row.reserved_mem_gib:.1f} GiB reserved" if row.reserved_mem_gib else ""
        rows.append(("memory", f"{row.peak_mem_gib:.1f} GiB", reserved))
    if row.energy_kwh:
        each = f"{last['joules_per_token']:.3g} J per token" if last.get("joules_per_token") else ""
        rows.append(("energy", f"{row.energy_kwh:.3g} kWh", each))
    if last.get("grad_norm") is not None:
        rows.append(("gradient norm", f"{last['grad_norm']:.3g}", f"learning rate {last.get('lr', 0):.3g}"))
    if starts := [event["time"] for event in run.events if event["event"] == "start"]:
        rows.append(("started", _ago(starts[-1]), f"start {len(starts)} of this run"))
    return rows


def _time_left(run: "RunHistory") -> float | None:
    recent = [line["step_s"] for line in run.metrics[-20:] if line.get("step_s")]
    if run.total_steps is None or not recent:
        return None
    return max(0, run.total_steps - run.last["step"]) * median(recent)


def _step(row: "RunSummary") -> str:
    return f"{row.step:,} of {row.total_steps:,}" if row.total_steps else f"{row.step:,}"


def _number(value: float | None, pattern: str) -> str:
    return "" if value is None else pattern.format(value)


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}s ago"
    return f"{seconds:.0f} s ago"
