"""The tables of docs/performance.md, made from the results that are kept."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from arriero.bench.breakdown import CATEGORIES
from arriero.bench.result import Result
from arriero.errors import UserError
from arriero.model.spec import FLOP_FORMULAS

Kept = tuple[Path, Result]


def read_results(folder: Path) -> list[Kept]:
    """By device and by file name."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "give one with --results")
    found = [(path, Result.read(path)) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda kept: kept[1].device.name)


def tables(results: Sequence[Kept], beside: Path) -> str:
    """Links are as seen from the folder `beside`."""
    if not results:
        return "No results yet.\n"
    parts: list[str] = []
    for device, group in groupby(results, lambda kept: kept[1].device.name):
        members = list(group)
        parts += [f"### {device}\n", *_speeds(members, beside), ""]
        parts += ["Share of the bf16 peak, by each way of counting:\n", *_shares(members), ""]
        if any(result.breakdown for _, result in members):
            parts += ["Where a step goes, in ms:\n", *_breakdowns(members), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def replace_section(text: str, name: str, generated: str, where: str) -> str:
    """Return the page with the text between <!-- name --> and <!-- /name --> replaced."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise UserError(f"{where} has no {first} ... {last}", "put both where the tables belong")
    return f"{before}{first}\n{generated}{last}{after}"


def _speeds(members: Sequence[Kept], beside: Path) -> Iterator[str]:
    heads = (
        "work",
        "mode",
        "layout",
        "tok/s",
        "ms a step (quartiles)",
        "GiB",
        "J a step",
        "loss checked",
        "code",
        "file",
    )
    yield f"| {' | '.join(heads)} |"
    yield "|---|---|---|---:|---:|---:|---:|---|---|---|"
    for path, result in members:
        t, work = result.timing, result.work
        link = os.path.relpath(path, beside)
        cells = (
            f"{result.name}, {work.tokens_per_step // work.seq_len} x {work.seq_len}",
            result.mode,
            result.layout,
            f"{t.tokens_per_s:,.0f}",
            f"{t.median_ms:,.1f} ({t.spread})",
            f"{result.memory.allocated_gib:.1f}",
            f"{result.energy.joules_per_step:,.0f}" if result.energy else "not reported",
            _checked(result),
            f"{(result.code.commit or 'no commit')[:7]}{'+' if result.code.dirty else ''}",
            f"[{path.name}]({link})",
        )
        yield f"| {' | '.join(cells)} |"


def _checked(result: Result) -> str:
    gate = result.gate
    if not gate.needed:
        return "is the reference"
    return f"{gate.loss:.0e} of {gate.loss_bound:.0e}" if gate.holds else "**no**"


def _shares(members: Sequence[Kept]) -> Iterator[str]:
    """Where the peak is not known, or not of this precision, what was computed in a second."""
    yield f"| file | {' | '.join(FLOP_FORMULAS)} |"
    yield f"|---|{'---:|' * len(FLOP_FORMULAS)}"
    for path, result in members:
        cells = []
        for name in FLOP_FORMULAS:
            rate = result.rate(name)
            speed = "-" if rate.tflops_per_device is None else f"{rate.tflops_per_device:.3g} TFLOP/s"
            shares = f"{rate.mfu:.1%}" if rate.mfu is not None else speed
            float8 = rate.mfu_of_float8_peak
            cells.append(shares if float8 is None else f"{shares} ({float8:.1%} of float8's)")
        yield f"| {path.stem} | {' | '.join(cells)} |"


def _breakdowns(members: Sequence[Kept]) -> Iterator[str]:
    yield f"| file | profiled step | {' | '.join(CATEGORIES)} |"
    yield f"|---|{'---:|' * (len(CATEGORIES) + 1)}"
    for path, result in members:
        if result.breakdown is not None:
            parts = [f"{result.breakdown.parts[each]:,.1f}" for each in CATEGORIES]
            yield f"| {path.stem} | {result.breakdown.step_ms:,.1f} | {' | '.join(parts)} |"
