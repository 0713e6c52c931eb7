"""What would make a run fit, more devices or smaller settings; and the run file with a layout written out."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomlkit

from arriero.config.fields import ActivationCheckpointing, to_toml
from arriero.config.keys import Problem
from arriero.config.load import load_run
from arriero.config.schema import RunConfig
from arriero.errors import UserError
from arriero.files import publish_file
from arriero.model.presets import expand
from arriero.plan.candidates import Plan
from arriero.plan.choose import Chooser, Setting, micro_batch_sizes
from arriero.plan.hardware import Cluster, Machine, cluster_of_device
from arriero.plan.layout import AXES
from arriero.plan.measured import Measured
from arriero.plan.memory import MemoryEstimate, usable_bytes
from arriero.plan.rates import Rates, ranking_rates
from arriero.plan.resolve import Resolved, resolve
from arriero.plan.rules import Draft
from arriero.plan.search import plan_run
from arriero.units import counted, human_bytes

_MOST_DEVICES = 2**17
_AUTO = ActivationCheckpointing("auto")
_OPEN = {
    "train.micro_batch": None,
    "parallel.sync": "auto",
    "parallel.reshard": "auto",
    "memory.activation_checkpointing": _AUTO,
    "memory.loss_chunk": "auto",
}
# settings that need less memory, those that change least first
_SMALLER: tuple[tuple[dict[str, Any], str], ...] = (
    (_OPEN, "derived again"),
    ({"memory.offload_activations": True}, "activations in host memory"),
    ({"optim.state": "bf16"}, "moments in bf16"),
    ({"optim.state": "int8"}, "8-bit optimizer state"),
    ({"precision.master": "bf16", "optim.state": "bf16"}, "weights and moments in bf16"),
    ({"precision.master": "bf16", "optim.state": "int8"}, "bf16 weights, 8-bit optimizer state"),
    ({"memory.offload_state": True}, "optimizer state in host memory"),
)
_SHORTEST = 1024
# the share of the predicted peak that the next setting after an out-of-memory error may need
_LESS = 0.92


@dataclass(frozen=True)
class Question:
    """A run, a cluster and the constraints of a plan; only the number of devices is open."""

    config: RunConfig
    cluster: Cluster
    fix: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    explain: Mapping[str, int] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    memory_limit: int | None = None
    measured: Measured | None = None
    machine: Machine | None = None

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
            explain=self.explain,
            exclude=self.exclude,
            memory_limit=self.memory_limit,
            rates=rates,
            machine=self.machine,
            keep=keep,
        )
        return found, rates

    def fitting(self, devices: int) -> Plan | None:
        """Return a plan with one candidate, or None if nothing fits."""
        try:
            found, _ = self.plan(devices, keep=1)
        except UserError:
            return None
        return found if found.candidates else None


def advice(question: Question, devices: int) -> list[str]:
    """Say on how many devices the run would fit, and which settings would make it fit on these."""
    lines, here = [], counted(devices, "device")
    if (enough := fewest_devices(replace(question, fix={}), devices)) is not None:
        lines.append(f"The smallest number of devices on which it would fit is {enough.devices:,}.")

    def needed(config: RunConfig) -> int | None:
        found = replace(question, config=config).fitting(devices)
        return found.best.memory if found else None

    for values, meaning, size in smaller_settings(question.config, needed):
        sets = " ".join(f"--set {key}={_shown(value)}" for key, value in values.items())
        lines.append(f"With {sets} ({meaning}) it would fit on {here}: {human_bytes(size)}.")
    most = f"No number of devices up to {_MOST_DEVICES:,} is enough"
    limit = "" if question.memory_limit is None else ", or raise --memory-limit"
    return lines or [f"{most}; choose a smaller model, batch or sequence length{limit}."]


def smaller_settings(
    config: RunConfig, needed: Callable[[RunConfig], int | None]
) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield settings with which a run fits, their meaning and the bytes they need.

    `needed` returns the bytes of a run that fits, else None.
    """
    length = config.data.seq_len // 2
    shorter = []
    while length >= _SHORTEST:
        shorter.append(({"data.seq_len": length}, "shorter sequences"))
        length //= 2
    for values, meaning in (*_SMALLER, *shorter):
        changed = {key: value for key, value in values.items() if _value(config, key) != value}
        size = needed(config.with_values(changed)) if changed else None
        if size is not None:
            yield changed, meaning, size
            if "data.seq_len" in changed:
                return


def fewest_devices(question: Question, devices: int) -> Plan | None:
    """Return the plan for the smallest number of devices above `devices` on which something fits.

    Nodes are filled, so the numbers are those inside a node and whole nodes. They are doubled until something
    fits, and then bisected: fewer devices are taken to fit less. Devices of a cluster without links are
    connected as in the shipped cluster file for their type.
    """
    if not question.cluster.links:
        try:
            connected = cluster_of_device(question.cluster.device.key, devices)
        except UserError:
            return None
        question = replace(question, cluster=connected)
    per_node = question.cluster.devices_per_node

    def at(number: int) -> int:
        return number if number <= per_node else (number - per_node + 1) * per_node

    low = devices if devices <= per_node else -(-devices // per_node) + per_node - 1
    high, best = low, None
    while best is None:
        low, high = high, 2 * high
        if at(high) > _MOST_DEVICES:
            return None
        best = question.fitting(at(high))
    while high - low > 1:
        middle = (low + high) // 2
        if found := question.fitting(at(middle)):
            high, best = middle, found
        else:
            low = middle
    return best


def refusal(draft: Draft, smallest: Setting, estimates: Sequence[MemoryEstimate]) -> Problem:
    """Say why a run cannot fit, on how many devices it would, and which settings would make it fit here."""
    machine, ranks = draft.machine, draft.layout.ranks
    free, rates = machine.memory_free, ranking_rates(draft.config, machine, ranks)
    phases = zip(estimates, smallest.micro_batches, strict=True)
    parts = max((each.parts(size) for each, size in phases), key=lambda each: sum(each.values()))
    listed = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items() if size > 0.01 * free)
    what = (
        f"a rank needs {human_bytes(smallest.bytes)} at the least ({listed}), "
        f"and {human_bytes(free)} are free"
    )

    def needed(config: RunConfig) -> int | None:
        other, problems = Draft.of(config, machine, draft.spec, draft.layout), []
        problems += other.problems()
        sizes = micro_batch_sizes(other, {}, problems)
        found, fits = Chooser(other, sizes, rates).best() if not problems else (smallest, False)
        return found.bytes if fits else None

    todo = []
    if enough := fewest_devices(Question(draft.config, rates.cluster, machine=machine), ranks):
        degrees = [f"{axis} = {n}" for axis in AXES if (n := getattr(enough.best.choice.layout, axis)) > 1]
        todo.append(f"start {enough.devices} ranks, on which it fits with parallel.{', '.join(degrees)}")
    for values, _, size in smaller_settings(draft.config, needed):
        sets = " and ".join(f"{key} = {_shown(value)}" for key, value in values.items())
        todo.append(f"set {sets}, which needs {human_bytes(size)}")
    return Problem("memory", what, "; or ".join(todo[:4]) or "choose a smaller model or a larger device")


def next_setting(resolved: Resolved) -> str:
    """Return the fastest settings that need clearly less memory than predicted, or those that need least."""
    less = int(_LESS * resolved.predicted_bytes / usable_bytes(1, resolved.machine.is_gpu))
    machine = replace(resolved.machine, memory_free=less)
    draft = Draft.of(resolved.config.with_values(_OPEN), machine, resolved.spec, resolved.layout)
    sizes = micro_batch_sizes(draft, {}, [])
    found, _ = Chooser(draft, sizes, ranking_rates(draft.config, machine, draft.layout.ranks)).best()
    now, choices = resolved.open_settings, found.choices
    settings = {
        "train.micro_batch": (now["train.micro_batch"][0], found.micro_batches[0]),
        "memory.activation_checkpointing": (
            now["memory.activation_checkpointing"],
            str(choices.checkpointing),
        ),
        "memory.loss_chunk": (now["memory.loss_chunk"], choices.chunk),
        "parallel.sync": (now["parallel.sync"], choices.sync),
        "parallel.reshard": tuple(
            "always" if each else "never" for each in (resolved.reshard, choices.reshard)
        ),
    }
    changed = [f"{key} = {_shown(new)}" for key, (old, new) in settings.items() if new != old]
    if changed and found.bytes < resolved.predicted_bytes:
        return " and ".join(changed)
    if not resolved.config.memory.offload_activations:
        return "memory.offload_activations = true"
    return "parallel.dp_shard or parallel.cp higher, on more devices"


def write_run_file(path: Path, run_file: Path | None, sets: Sequence[str], found: Plan) -> None:
    """Write the run file with the keys of the best candidate; comments and order stay."""
    keys = found.best.choice.keys
    if run_file is None:
        text = to_toml(found.config.with_values(keys))
    else:
        document = tomlkit.parse(run_file.read_text(encoding="utf-8-sig"))
        if "extends" in document:
            # the name of the file is relative to the run file
            base = run_file.parent / str(document["extends"])
            document["extends"] = os.path.relpath(base, path.parent)
        given = [item.partition("=")[0].strip() for item in sets]
        for key in dict.fromkeys((*given, *keys)):
            *tables, name = key.split(".")
            table: Any = document
            for part in tables:
                if not isinstance(table.get(part), dict):
                    table[part] = tomlkit.table()
                table = table[part]
            table[name] = _value(found.config.with_values(keys), key, "json")
        text = tomlkit.dumps(document)
    publish_file(path, text.encode())
    resolve(load_run(path, (), expand).config, found.machine, found.devices)


def _value(config: RunConfig, key: str, mode: str = "python") -> Any:
    value: Any = config.model_dump(mode=mode)
    for part in key.split("."):
        value = value[part]
    return value


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "auto" if value is None else str(value)
