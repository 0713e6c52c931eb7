"""What would make a run fit, more devices or smaller settings; and the run file with a layout written out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomlkit

from arriero.config.fields import to_toml
from arriero.config.load import load_run
from arriero.config.schema import RunConfig
from arriero.errors import UserError
from arriero.files import publish_file
from arriero.model.presets import expand
from arriero.plan.candidates import Candidate, Plan
from arriero.plan.hardware import Cluster
from arriero.plan.layout import AXES
from arriero.plan.measured import Measured
from arriero.plan.rates import Rates
from arriero.plan.resolve import resolve
from arriero.plan.search import plan_run
from arriero.units import counted

_MOST_DEVICES = 2**17
# settings that need less memory, the least harmful first
_SMALLER: tuple[tuple[str, Any, str], ...] = (
    ("optim.state", "bf16", "moments in bf16"),
    ("optim.state", "int8", "8-bit optimizer state"),
    ("precision.master", "bf16", "master weights in bf16 with stochastic rounding"),
    ("memory.offload_activations", True, "activations in host memory"),
    ("memory.offload_state", True, "optimizer state in host memory"),
)


@dataclass(frozen=True)
class Question:
    """What is asked of the planner, beside the run and the number of devices."""

    config: RunConfig
    cluster: Cluster
    fix: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    memory_limit: int | None = None
    measured: Measured | None = None

    def plan(self, devices: int, keep: int | None = None) -> tuple[Plan, Rates]:
        """Return the plan for a number of devices, and the rates it was made with."""
        nodes = max(self.cluster.nodes, -(-devices // self.cluster.devices_per_node))
        cluster = self.cluster.with_nodes(nodes)
        rates = Rates(cluster, self.measured)
        found = plan_run(
            self.config,
            cluster,
            devices,
            fix=self.fix,
            most=self.most,
            exclude=self.exclude,
            memory_limit=self.memory_limit,
            rates=rates,
            keep=keep,
        )
        return found, rates

    def fits(self, devices: int) -> bool:
        try:
            return bool(self.plan(devices, keep=1)[0].candidates)
        except UserError:
            return False


def advice(question: Question, devices: int) -> list[str]:
    """Say on how many devices the run would fit, and which settings would make it fit on these."""
    lines, here = [], counted(devices, "device")
    if (enough := fewest_devices(question, devices)) is not None:
        lines.append(f"The smallest number of devices on which it would fit is {enough:,}.")
    config = question.config
    for key, value, meaning in _SMALLER:
        section, name = key.split(".")
        values = getattr(config, section)
        smaller = config.model_copy(update={section: values.model_copy(update={name: value})})
        if getattr(values, name) != value and replace(question, config=smaller).fits(devices):
            text = str(value).lower() if isinstance(value, bool) else value
            lines.append(f"With --set {key}={text} ({meaning}) it would fit on {here}.")
    most = f"No number of devices up to {_MOST_DEVICES:,} is enough"
    return lines or [f"{most}; choose a smaller model, batch or sequence length."]


def fewest_devices(question: Question, devices: int) -> int | None:
    """Return the smallest number of devices above `devices` on which something fits, by doubling."""
    per_node, free, count = question.cluster.devices_per_node, replace(question, fix={}), devices
    while count < _MOST_DEVICES:
        count = 2 * count if count < per_node or count % per_node == 0 else -(-count // per_node) * per_node
        if free.fits(count):
            return count
    return None


def planned_keys(candidate: Candidate) -> dict[str, Any]:
    """Return the keys of the run file that a candidate sets, with their values."""
    choice = candidate.choice
    keys: dict[str, Any] = {f"parallel.{axis}": getattr(choice.layout, axis) for axis in AXES}
    if choice.layout.pp > 1:
        keys |= {"parallel.schedule": choice.schedule, "parallel.stages_per_rank": choice.stages_per_rank}
    keys |= {"parallel.reshard": choice.reshard, "parallel.sync": choice.sync}
    keys["train.micro_batch"] = choice.micro_batch
    keys["memory.activation_checkpointing"] = str(choice.checkpointing)
    return keys


def write_run_file(path: Path, run_file: Path | None, sets: Sequence[str], found: Plan) -> None:
    """Write the run file with the keys of the best candidate; comments and order stay."""
    if run_file is None:
        text = to_toml(found.best.choice.applied(found.config))
    else:
        document = tomlkit.parse(run_file.read_text(encoding="utf-8-sig"))
        given = [item.partition("=")[0].strip() for item in sets]
        written = {key: _value(found.config, key) for key in given} | planned_keys(found.best)
        for key, value in written.items():
            *tables, name = key.split(".")
            table: Any = document
            for part in tables:
                if not isinstance(table.get(part), dict):
                    table[part] = tomlkit.table()
                table = table[part]
            table[name] = value
        text = tomlkit.dumps(document)
    publish_file(path, text.encode())
    resolve(load_run(path, (), expand).config, found.machine, found.devices)


def _value(config: RunConfig, key: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value
