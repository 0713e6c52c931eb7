"""A plan as tables and sentences on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from arriero.plan.candidates import Candidate, Plan
from arriero.plan.explain import compared, explanation, whole_run, whole_run_text
from arriero.plan.rates import Rates
from arriero.ui import Console, Table, facts
from arriero.units import counted, human_bytes

_HEADINGS = (">tok/s/device", ">MFU", ">step s", ">memory", ">margin", ">bubble", ">exposed comm.")
_MOST_REASONS = 8


def show_plan(console: Console, found: Plan, rates: Rates, top: int) -> None:
    """Print the ranked candidates, the explanation of the best, the whole run, and what was rejected."""
    table = Table(">", "layout", *_HEADINGS)
    for number, candidate in enumerate(found.best_per_layout()[:top], 1):
        table.row(number, candidate.choice, *_cells(candidate))
    console.print(table)
    console.plain("")
    for sentence in explanation(found):
        console.plain(sentence)
    console.plain("")
    where = f"{counted(found.devices, 'device')} of {found.cluster.name} ({found.cluster.device.name})"
    console.print(facts([("whole run", whole_run_text(whole_run(found, found.best, rates)), where)]))
    show_rejections(console, found)


def _cells(candidate: Candidate) -> tuple[str, ...]:
    time = candidate.time
    return (
        f"{time.tokens_per_s:,.0f}",
        f"{time.mfu:.1%}" if time.mfu is not None else "",
        f"{time.seconds:.4g}",
        human_bytes(candidate.memory),
        f"{candidate.margin:.0%}",
        f"{time.bubble / time.seconds:.1%}" if time.bubble else "",
        f"{time.exposed_seconds / time.seconds:.1%}",
    )


def show_rejections(console: Console, found: Plan) -> None:
    if not found.rejections:
        return
    table = Table(">rejected", "why", "for example")
    for each in found.rejections[:_MOST_REASONS]:
        table.row(f"{each.count:,}", each.reason, each.example)
    console.plain("")
    console.print(table)


def show_comparison(console: Console, best: Candidate, other: Candidate) -> None:
    """Print what another candidate loses against the best."""
    table = Table("part of a step", ">best", ">this one", ">difference")
    for name, (first, second) in compared(best, other).items():
        table.row(name, f"{first:.3f} s", f"{second:.3f} s", f"{second - first:+.3f} s")
    sizes = human_bytes(best.memory), human_bytes(other.memory)
    table.row("memory", *sizes, f"{(other.memory - best.memory) / 2**30:+.1f} GiB")
    slower = other.time.seconds / best.time.seconds - 1
    console.plain("")
    console.plain(f"{other.choice}: {slower:+.1%} time per step against the best, {best.choice}.")
    console.print(table)


def show_nothing(console: Console, found: Plan, advice: Sequence[str]) -> None:
    """Say that nothing fits or is allowed, and what would."""
    model = found.config.model.preset or "the model"
    where = f"{counted(found.devices, 'device')} of {found.cluster.name}"
    what = "does not fit on" if found.lacks_memory else "has no allowed layout on"
    console.plain(f"{model} {what} {where} with these settings.", "bold red")
    for sentence in advice:
        console.plain(sentence)
    show_rejections(console, found)


def show_scaling(
    console: Console, unit: str, rows: Sequence[tuple[int, Plan, Mapping[str, Any] | None]]
) -> None:
    """Print the best candidate for each number of nodes or devices."""
    first = next((found for _, found, _ in rows if found.candidates), None)
    table = Table(f">{unit}", "best layout", *_HEADINGS, ">scaling", "whole run")
    for value, found, run in rows:
        if first is None or run is None:
            table.row(value, "nothing fits", *[""] * (len(_HEADINGS) + 2))
            continue
        scaling = found.best.time.tokens_per_s / first.best.time.tokens_per_s
        table.row(value, found.best.choice, *_cells(found.best), f"{scaling:.0%}", whole_run_text(run))
    console.print(table)
