"""What `bench costs` leaves: tables of numbers, each with what it means and how it was made."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from arriero.bench.result import Code, Device, Part
from arriero.errors import UserError


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


class Costs(Part):
    """`load` is the machine's one-minute load average before the first measurement and after the last: times
    of a machine that others use are not those of one that nobody uses."""

    schema_version: Literal[1] = 1
    kind: Literal["costs"] = "costs"
    time: str
    command: list[str]
    costs: tuple[Cost, ...]
    load: tuple[float, float]
    device: Device
    code: Code

    def write(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error})", "give another file") from None


def is_costs(path: Path) -> bool:
    """By what the file says of itself; it need not be sound otherwise."""
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("kind") == "costs"


def read_costs(path: Path) -> Costs:
    try:
        return Costs.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise UserError(
            f"{path} holds no costs of this version ({where}: {first['msg']})",
            "make it anew with `arriero bench costs --json`",
        ) from None


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
