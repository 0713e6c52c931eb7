"""`bench costs`: what all costs that is not the arithmetic of a step, measured on this machine."""

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from arriero.bench.cost_memory import memory
from arriero.bench.cost_sizes import ON_GPU, Place, Sizes
from arriero.bench.cost_steps import growth, overhead, saves
from arriero.bench.cost_waits import data_wait, start_up
from arriero.bench.costs_result import Cost, Costs
from arriero.bench.machine import describe_code, describe_machine
from arriero.data.prepare.builtin import prepare_builtin
from arriero.errors import UserError
from arriero.parallel.world import world_from
from arriero.train.device import choose_device

MEASURES: dict[str, Callable[[Place], Cost]] = {
    "start-up": start_up,
    "overhead": overhead,
    "saves": saves,
    "data-wait": data_wait,
    "growth": growth,
    "memory": memory,
}


def measure_costs(
    names: Sequence[str],
    device: str,
    cache: Path,
    tell: Callable[[str], None],
    sizes: Sizes | None = None,
) -> Costs:
    """The result names neither folders nor the machine."""
    if world_from().size > 1:
        raise UserError("a launcher has started several ranks", "costs are measured by one process alone")
    found = choose_device(device)
    measured, load = [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="arriero-costs-") as folder:
        place = Place(device, Path(folder), cache, sizes or (ON_GPU if found.is_gpu else Sizes()))
        prepare_builtin("builtin:synthetic", cache)
        for name in names:
            tell(name)
            measured.append(MEASURES[name](place))
    command = ["arriero", "bench", "costs", "--device", device]
    return Costs(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=[*command, *(["--only", ",".join(names)] if list(names) != list(MEASURES) else [])],
        costs=tuple(measured),
        load=(load, os.getloadavg()[0]),
        device=describe_machine(found, 1),
        code=describe_code(),
    )
