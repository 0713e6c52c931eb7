"""What `bench costs` leaves: tables of numbers, each with what it means and how it was made."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from arriero.bench.result import Code, Machine, Part, Stored


class Row(Part):
    """`values` by what they are, with their unit. `samples` are what the medians among them were taken of."""

    what: str
    values: dict[str, float]
    samples: dict[str, tuple[float, ...]] = Field(default_factory=dict)


class Cost(Part):
    """`settings` are the keys of the run file that all rows share."""

    name: str
    explanation: str
    settings: dict[str, Any]
    rows: tuple[Row, ...]


class Costs(Stored):
    """`load` is the machine's one-minute load average before the first measurement and after the last: times
    of a machine that others use are not those of one that nobody uses."""

    MADE_BY = "arriero bench costs --json"

    schema_version: Literal[1] = 1
    kind: Literal["costs"] = "costs"
    time: str
    command: list[str]
    costs: tuple[Cost, ...]
    load: tuple[float, float]
    device: Machine
    code: Code


def is_costs(path: Path) -> bool:
    """By what the file says of itself; it need not be sound otherwise."""
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("kind") == "costs"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
