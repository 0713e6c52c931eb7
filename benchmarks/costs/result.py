"""The stored result of `make bench-costs`, and its section of docs/performance.md."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from arriero.bench.result import CodeVersion, DeviceInfo, Part, Stored


class Row(Part):
    """`values` by name and unit; `samples` are the measurements that medians among them were taken from."""

    what: str
    values: dict[str, float]
    samples: dict[str, tuple[float, ...]] = Field(default_factory=dict)


class Cost(Part):
    """One table; `settings` are the run file keys that all rows share."""

    name: str
    explanation: str
    settings: dict[str, Any]
    rows: tuple[Row, ...]


class Costs(Stored):
    """`load` is the one-minute load average before and after: a busy machine gives other times."""

    MADE_BY = "make bench-costs"

    schema_version: Literal[1] = 1
    kind: Literal["costs"] = "costs"
    time: str
    command: list[str]
    costs: tuple[Cost, ...]
    load: tuple[float, float]
    device: DeviceInfo
    code: CodeVersion


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def section(folder: Path, relative_to: Path) -> str:
    """Format all stored results of a folder as Markdown; links are relative to `relative_to`."""
    lines: list[str] = []
    for path in sorted(folder.glob("*.json")):
        costs = Costs.read(path)
        device = costs.device
        where = device.name if device.name == device.cpu else f"{device.name} ({device.cpu})"
        before, after = costs.load
        link = os.path.relpath(path, relative_to)
        lines += [f"#### {where}\n", f"From [{path.name}]({link}); load of the {device.cores} cores: "]
        lines[-1] += f"{before:.1f} before, {after:.1f} after.\n"
        for cost in costs.costs:
            lines += [f"**{cost.name}.** {cost.explanation}\n", *_table(cost), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(cost: Cost) -> Iterator[str]:
    heads = list(cost.rows[0].values)
    yield f"| | {' | '.join(heads)} |"
    yield f"|---|{'---:|' * len(heads)}"
    for row in cost.rows:
        yield f"| {row.what} | {' | '.join(number(row.values[head]) for head in heads)} |"
