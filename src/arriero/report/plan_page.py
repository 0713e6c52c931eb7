"""The HTML page of a plan: why this layout, where a step and the memory go, and every other candidate."""

from collections.abc import Mapping, Sequence
from typing import Any

from arriero.report.page import (
    Bar,
    Cell,
    Column,
    Point,
    Section,
    Span,
    page,
    scatter,
    sentences,
    significant,
    stacked_bars,
    table,
    tiles,
    timeline,
)
from arriero.units import human_count

_GIB = 2**30
# bars of candidates that are compared
_COMPARED = 8
# the parts of a step in the order of a bar; a part has the same colour on every page
_TIMES = {
    "matmul": "var(--c1)",
    "attention": "var(--c2)",
    "elementwise": "var(--c3)",
    "recompute": "var(--c4)",
    "head and loss": "var(--c6)",
    "gradients": "var(--c7)",
    "exposed communication": "var(--c5)",
    "pipeline bubble": "var(--c8)",
    "optimizer, host and other": "var(--muted)",
}
_MEMORY = {
    "weights": "var(--c1)",
    "gradients": "var(--c7)",
    "optimizer state": "var(--c3)",
    "activations": "var(--c2)",
    "gathered weights": "var(--c4)",
    "working memory": "var(--c6)",
    "loss": "var(--c8)",
    "other": "var(--muted)",
}
_SLOTS = {"forward": "var(--c1)", "backward": "var(--c2)", "weights": "var(--c3)"}
_SLOT_NAMES = {"forward": "forward", "backward": "backward", "weights": "weight gradients"}

Facts = Mapping[str, Any]


def plan_page(facts: Facts) -> str:
    """Return the page of a plan from the object that `arriero plan --json` prints."""
    best, candidates = facts["candidates"][0], facts["candidates"]
    where = f"{facts['devices']:,} x {facts['device']}"
    title = f"{facts['model'] or facts['run']}: plan for {where}"
    length = f"sequence length {facts['seq_len']:,}, global batch {facts['batch_tokens']:,} tokens"
    subtitle = f"{facts['cluster']}; {length}; best of {facts['considered']:,} candidates"
    parts: list[Section | str] = [_tiles(facts, best)]
    parts.append(Section("Why this layout", sentences(facts["explanation"])))
    parts.append(_times(candidates[:_COMPARED]))
    parts.append(_memory(candidates[:_COMPARED]))
    if facts.get("timeline"):
        parts.append(_pipeline(facts, best))
    if len(candidates) > 1:
        parts.append(_scatter(candidates))
    parts += [_table(candidates), _rejected(facts["rejected"]), _sources(facts)]
    return page(title, subtitle, parts)


def _tiles(facts: Facts, best: Facts) -> str:
    run = facts["whole_run"]
    mfu = f"MFU {best['mfu']:.1%}" if best["mfu"] is not None else "peak of the device unknown"
    all_devices = facts["devices"] * best["tokens_per_s_per_device"]
    used = f"of {_gib(best['memory_free_bytes'])} free, {best['memory_margin']:.0%} unused"
    rows = [
        ("layout", _degrees(best["layout"]), _settings(best)),
        ("speed", f"{best['tokens_per_s_per_device']:,.0f} tok/s", f"per device; {mfu}"),
        ("step", _seconds(best["step_s"]), f"{all_devices:,.0f} tok/s in all"),
        ("memory per device", _gib(best["memory_bytes"]), used),
    ]
    if run.get("hours") is not None:
        hours = f"{human_count(run['device_hours'])} device-hours, {run['steps']:,} steps"
        rows.append(("whole run", _duration(run["hours"]), hours))
    if run.get("cost_usd") is not None:
        rows.append(("cost", f"${human_count(run['cost_usd'])}", f"{run['energy_mwh']:,.1f} MWh"))
    return tiles(rows)


def _times(candidates: Sequence[Facts]) -> Section:
    bars = []
    for each in candidates:
        parts = {name: each["compute_s"].get(name, 0.0) for name in _TIMES}
        parts["exposed communication"] = sum(each["exposed_s"].values())
        parts["pipeline bubble"] = each["bubble_s"]
        counted = sum(parts.values())
        parts["optimizer, host and other"] = max(0.0, each["step_s"] - counted)
        speed = f"{_seconds(each['step_s'])}, {each['tokens_per_s_per_device']:,.0f} tok/s per device"
        bars.append(Bar(each["text"], parts, speed))
    shown = {name: colour for name, colour in _TIMES.items() if any(bar.parts[name] > 0 for bar in bars)}
    note = "Seconds of one optimizer step on the busiest rank. Hidden communication is not shown."
    return Section("Where a step goes", stacked_bars(bars, shown, "s"), note)


def _memory(candidates: Sequence[Facts]) -> Section:
    bars = []
    for each in candidates:
        known = {name: each["memory_parts"].get(name, 0) / _GIB for name in _MEMORY}
        known["other"] = max(0.0, each["memory_bytes"] / _GIB - sum(known.values()))
        text = f"{_gib(each['memory_bytes'])}, {each['memory_margin']:.0%} unused"
        bars.append(Bar(each["text"], known, text, each["memory_free_bytes"] / _GIB))
    shown = {name: colour for name, colour in _MEMORY.items() if any(bar.parts[name] > 0 for bar in bars)}
    note = "Predicted peak of the rank that needs most, in GiB. The line is the free memory of a device."
    return Section("Memory", stacked_bars(bars, shown, "GiB", "free memory of a device"), note)


def _pipeline(facts: Facts, best: Facts) -> Section:
    slots = facts["timeline"]
    kinds = {kind: colour for kind, colour in _SLOTS.items() if any(s["kind"] == kind for s in slots)}
    spans = [
        Span(
            slot["rank"],
            slot["start"],
            slot["end"],
            _SLOT_NAMES[slot["kind"]],
            str(slot["micro_batch"] + 1),
            _slot_tip(slot),
        )
        for slot in slots
    ]
    lanes = [f"rank {number}" for number in range(best["layout"]["pp"])]
    drawn, every = facts.get("timeline_micro_batches"), best["gradient_accumulation"]
    note = f"{best['schedule']}: each row is a pipeline rank, numbers are micro-batches, gaps are waiting."
    if drawn and drawn < every:
        note += f" {drawn} of {every} micro-batches are drawn, so that the ramps look longer than they are."
    shown = {_SLOT_NAMES[kind]: colour for kind, colour in kinds.items()}
    return Section("Pipeline", timeline(spans, lanes, shown), note)


def _slot_tip(slot: Facts) -> str:
    what = f"{_SLOT_NAMES[slot['kind']]} of micro-batch {slot['micro_batch'] + 1}"
    when = f"{_seconds(slot['end'] - slot['start'])} from {_seconds(slot['start'])}"
    return f"rank {slot['rank']}, stage {slot['stage']}\n{what}\n{when}"


def _scatter(candidates: Sequence[Facts]) -> Section:
    points = []
    for number, each in enumerate(candidates):
        tip = f"{each['text']}\n{_seconds(each['step_s'])} per step, {_gib(each['memory_bytes'])}"
        if each["mfu"] is not None:
            tip += f", MFU {each['mfu']:.1%}"
        points.append(Point(each["step_s"], each["memory_bytes"] / _GIB, tip, "" if number else "best"))
    limit = candidates[0]["memory_free_bytes"] / _GIB
    body = scatter(points, "seconds per step", "GiB per device", (limit, "free memory"))
    note = "The best settings of each layout that fits. Left is faster, low leaves memory unused."
    return Section("Time against memory", body, note)


def _table(candidates: Sequence[Facts]) -> Section:
    names = ("tok/s/device", "MFU", "step", "memory", "unused", "bubble", "exposed", "micro-batch")
    columns = [Column("layout", is_text=True), *map(Column, (*names, "accumulation", "checkpointing"))]
    rows = []
    for each in candidates:
        mfu, step = each["mfu"], each["step_s"]
        waits = {"bubble": each["bubble_s"] / step, "exposed": sum(each["exposed_s"].values()) / step}
        layout = _degrees(each["layout"]) + (f", {each['schedule']}" if each["schedule"] else "")
        rows.append(
            [
                Cell(layout, layout),
                Cell(f"{each['tokens_per_s_per_device']:,.0f}", each["tokens_per_s_per_device"]),
                Cell("unknown" if mfu is None else f"{mfu:.1%}", mfu or 0),
                Cell(_seconds(step), step),
                Cell(_gib(each["memory_bytes"]), each["memory_bytes"]),
                Cell(f"{each['memory_margin']:.0%}", each["memory_margin"]),
                *(Cell(f"{share:.1%}", share) for share in waits.values()),
                *(Cell(str(each[key]), each[key]) for key in ("micro_batch", "gradient_accumulation")),
                Cell(each["activation_checkpointing"], each["activation_checkpointing"]),
            ]
        )
    return Section("All layouts", table(columns, rows, highlight=0), "Click on a heading to sort.")


def _rejected(rejected: Sequence[Facts]) -> str | Section:
    if not rejected:
        return ""
    columns = [Column("reason", is_text=True), Column("candidates"), Column("for example", is_text=True)]
    keys = ("reason", "count", "example")
    rows = [[Cell(f"{r[key]:,}" if key == "count" else r[key], r[key]) for key in keys] for r in rejected]
    return Section("Rejected", table(columns, rows))


def _sources(facts: Facts) -> Section:
    texts = []
    if facts["measured"]:
        texts.append(f"Measured on the device: {', '.join(facts['measured'])}.")
    if facts["analytic"]:
        texts.append(f"Computed from the data sheet: {', '.join(facts['analytic'])}.")
    return Section("Where the numbers come from", sentences(texts))


def _degrees(layout: Mapping[str, int]) -> str:
    parts = [f"{axis} {degree}" for axis, degree in layout.items() if degree > 1]
    return " x ".join(parts) or "one process"


def _settings(best: Facts) -> str:
    schedule = f"{best['schedule']}, " if best["schedule"] else ""
    return f"{schedule}micro-batch {best['micro_batch']}, checkpointing {best['activation_checkpointing']}"


def _duration(hours: float) -> str:
    if hours < 1:
        return _seconds(3600 * hours)
    return f"{hours / 24:,.0f} days" if hours >= 72 else f"{hours:,.1f} h"


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"


def _seconds(seconds: float) -> str:
    return f"{significant(seconds)} s" if seconds >= 1 else f"{significant(1000 * seconds)} ms"
