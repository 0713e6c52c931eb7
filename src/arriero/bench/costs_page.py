"""The section of docs/performance.md on what costs beside the arithmetic of a step."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from arriero.bench.costs_result import Cost, Costs, number


def cost_tables(found: Sequence[tuple[Path, Costs]], beside: Path) -> Iterator[str]:
    """Links are as seen from the folder `beside`."""
    yield "### Cost of the rest\n"
    yield "What `arriero bench costs` measured, on each device.\n"
    for path, costs in found:
        device = costs.device
        where = device.name if device.name == device.cpu else f"{device.name} ({device.cpu})"
        yield f"#### {where}\n"
        before, after = costs.load
        yield (
            f"From [{path.name}]({os.path.relpath(path, beside)}); load of the {device.cores} cores: "
            f"{before:.1f} before, {after:.1f} after.\n"
        )
        for cost in costs.costs:
            yield f"**{cost.name}.** {cost.explanation}\n"
            yield from _table(cost)
            yield ""


def _table(cost: Cost) -> Iterator[str]:
    heads = list(cost.rows[0].values)
    yield f"| | {' | '.join(heads)} |"
    yield f"|---|{'---:|' * len(heads)}"
    for row in cost.rows:
        yield f"| {row.what} | {' | '.join(number(row.values[head]) for head in heads)} |"
