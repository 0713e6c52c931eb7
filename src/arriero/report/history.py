"""Read a run directory: the state, curves, events and settings of a run. Nothing is changed."""

import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from arriero.config.fields import flat
from arriero.config.load import config_from_toml
from arriero.config.timeline import total_steps
from arriero.errors import UserError
from arriero.events import EVENTS, METRICS, last_record, metrics_of, read_events
from arriero.files import is_locked
from arriero.report.goodput import Goodput, goodput
from arriero.train.rundir import lock_of
from arriero.units import human_count

_RUN_FILE = "run.toml"
State = Literal["running", "finished", "stopped", "failed", "killed", "new"]
_STATES: dict[str, State] = {
    "end": "finished",
    "signal": "stopped",
    "fault": "failed",
    "hang": "failed",
    "start": "killed",
}
_NOTABLE = {
    *("signal", "fault", "hang", "skip", "bad step", "rollback", "no rollback", "slow rank", "save failed"),
    *("remark", "failure", "exclude", "shrink", "kill", "give up", "resubmit"),
}
_REASON_KEYS = ("message", "text", "reason", "why", "error", "signal")
_MEASURED = ("loss", "tokens_per_s", "mfu", "peak_mem_gib", "reserved_mem_gib", "energy_kwh")


@dataclass(frozen=True)
class RunSummary:
    """What a run has reached and how fast it is; None for what is not known."""

    run: str
    directory: str
    state: State
    step: int
    total_steps: int | None
    tokens: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_mem_gib: float | None
    reserved_mem_gib: float | None
    energy_kwh: float | None
    last_activity: float


@dataclass(frozen=True)
class RunHistory:
    """A run, read from its directory when a property is first used."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved run file, as one value per key."""
        try:
            return flat(tomllib.loads((self.directory / _RUN_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.directory / _RUN_FILE} cannot be read ({error})") from None

    @cached_property
    def total_steps(self) -> int | None:
        """Number of steps of the whole run; None for a horizon in wall time or a file of another version."""
        try:
            return total_steps(config_from_toml(self.directory / _RUN_FILE))
        except UserError:
            return None

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return list(read_events(self.directory / EVENTS))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl in the order of steps; of a step that was repeated, the last line."""
        return metrics_of(self.directory)

    @cached_property
    def last(self) -> dict[str, Any]:
        """The last line of metrics.jsonl, read from the end of the file; {} if there is none."""
        return last_record(self.directory / METRICS, "step")

    @cached_property
    def summary(self) -> RunSummary:
        """The facts of a run for a row of a table, without reading all of metrics.jsonl."""
        evaluated = next((each.get("eval_loss") for each in reversed(self._evaluations)), None)
        measured = {key: self.last.get(key) for key in _MEASURED}
        return RunSummary(
            run=self.name,
            directory=str(self.directory),
            state=self.state,
            step=self.last.get("step", 0),
            total_steps=self.total_steps,
            tokens=self.last.get("tokens", 0),
            eval_loss=evaluated,
            last_activity=self.last_activity,
            **measured,
        )

    @cached_property
    def state(self) -> State:
        """A run without a lock whose last start has no end was killed."""
        if is_locked(lock_of(self.directory)):
            return "running"
        kinds = [event["event"] for event in self.events if event["event"] in _STATES]
        return _STATES[kinds[-1]] if kinds else "new"

    @property
    def last_activity(self) -> float:
        """Time of the last change of metrics, events or run file, in seconds since 1970."""
        files = (self.directory / name for name in (METRICS, EVENTS, _RUN_FILE))
        return max(file.stat().st_mtime for file in files if file.exists())

    @cached_property
    def goodput(self) -> Goodput | None:
        return goodput(self.directory)

    @property
    def notable_events(self) -> list[dict[str, Any]]:
        """What went wrong, or was decided because of it."""
        return [event for event in self.events if event_kind(event) in _NOTABLE]

    @property
    def about(self) -> list[str]:
        """Size of the model, devices and layout of the last start; empty before it."""
        start = next((event for event in reversed(self.events) if event["event"] == "start"), {})
        size, ranks, device = (start.get(key) for key in ("parameters", "ranks", "device"))
        parameters = f"{human_count(size)} parameters" if isinstance(size, int) else None
        devices = f"{ranks} x {device}" if isinstance(ranks, int) and ranks > 1 else device
        return [str(each) for each in (parameters, devices, start.get("layout")) if each]

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (tokens, value) of every line that has the key; 'eval_losses.NAME' is inside a table.

        Evaluations are read from the events, which also have the one before the first step.
        """
        outer, _, inner = key.partition(".")
        found: dict[int, float] = {}
        for line in self._evaluations if outer in ("eval_loss", "eval_losses") else self.metrics:
            value = line.get(outer)
            value = value.get(inner) if inner and isinstance(value, dict) else value
            if isinstance(value, int | float) and isinstance(line.get("tokens"), int):
                found[line["tokens"]] = value
        return sorted(found.items())

    @property
    def _evaluations(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "evaluation"]


def find_runs(folder: Path) -> list[RunHistory]:
    """Return the runs in a folder, the last active one first."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a directory",
            "`arriero train` writes runs into runs/; --dir names another folder",
        )
    found = [RunHistory(path) for path in folder.iterdir() if (path / _RUN_FILE).is_file()]
    return sorted(found, key=lambda run: run.last_activity, reverse=True)


def event_kind(event: dict[str, Any]) -> str:
    """Return what an event is; one of the supervisor is its decision."""
    return event.get("decision", event["event"])


def event_title(event: dict[str, Any]) -> str:
    step = f" at step {event['step']:,}" if isinstance(event.get("step"), int) else ""
    return f"{event_kind(event)}{step}"


def event_text(event: dict[str, Any]) -> str:
    """Return the sentence of an event that says what happened; it may be empty."""
    return next((str(event[key]) for key in _REASON_KEYS if event.get(key)), "")


def run_names(runs: Sequence[RunHistory]) -> list[str]:
    """Return the names of runs, or their paths where names are not distinct."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.directory) for run in runs]


def differing_settings(runs: Sequence[RunHistory]) -> dict[str, list[Any]]:
    """Return the value in each run of every key that differs; None where a run has no such key."""
    keys = {key: None for run in runs for key in run.settings}
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def at_tokens(series: Sequence[tuple[int, float]], tokens: float) -> float | None:
    """Return a curve's value at a number of tokens, interpolated; None outside of the curve."""
    place = bisect_left(series, (tokens, float("-inf")))
    if place < len(series) and series[place][0] == tokens:
        return series[place][1]
    if place in (0, len(series)):
        return None
    (left, before), (right, after) = series[place - 1], series[place]
    return before + (after - before) * (tokens - left) / (right - left)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve as text, one character per mean of neighbouring values."""
    bars = "▁▂▃▄▅▆▇█"
    means = list(_means(values, width))
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((value - low) * scale)] for value in means)


def _means(values: Sequence[float], width: int) -> Iterator[float]:
    count = min(width, len(values))
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        yield sum(part) / len(part)
