"""The keys that change the arithmetic of a run or move it to the CPU, which are searched if they are "auto".

"auto" is not their default: a run must not change its arithmetic because it is planned for another machine.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from arriero.config.keys import Problem
from arriero.config.schema import RunConfig
from arriero.plan.hardware import Machine
from arriero.units import human_bytes

# key: what a decision calls it, its values with the default first, and how a candidate shows the others
_KEYS: Mapping[str, tuple[str, tuple[Any, ...], str]] = {
    "precision.float8": ("float8 recipe", ("off", "tensorwise"), "float8 {}"),
    "optim.state": ("optimizer state", ("fp32", "bf16", "int8"), "{} optimizer state"),
    "memory.offload_activations": ("offload activations", (False, True), "activations offloaded"),
    "memory.offload_state": ("offload state", (False, True), "state offloaded"),
}
# a step must be this much faster for each value that is not the default
_LEAST_GAIN = 1.01

Arithmetic = dict[str, Any]


def open_keys(config: RunConfig) -> list[str]:
    """Return the keys that the run file sets to "auto"."""
    return [key for key in _KEYS if value_of(config, key) == "auto"]


def value_of(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def variants(config: RunConfig, machine: Machine) -> list[Arithmetic]:
    """Return all values of the open keys together, the defaults first; one empty variant if none is open."""
    keys = open_keys(config)
    values = [_KEYS[key][1] for key in keys]
    trains_part = config.lora.rank or config.prefix.tokens or config.llama_adapter.tokens
    if not machine.float8 or trains_part or config.speculator.n_predict:
        values = [("off",) if "off" in each else each for each in values]
    return [dict(zip(keys, each, strict=True)) for each in product(*values)]


def host_problem(open_values: Iterable[str], needed: int, machine: Machine) -> Problem | None:
    """Return what is wrong if a planned offload needs more of the host than the memory of the device.

    Nodes have at least as much memory for each device; how much more is not known.
    """
    keys = [key for key in open_values if key.startswith("memory.offload")]
    if not keys or needed <= machine.memory_total:
        return None
    sizes = human_bytes(needed), human_bytes(machine.memory_total)
    what = f"needs {sizes[0]} of the host per rank, and no more than {sizes[1]} are planned"
    return Problem(keys[0], what, "set it to true if the node has more")


def handicap(values: Iterable[tuple[str, Any]]) -> float:
    """Return the factor for the seconds of a step by which variants are compared."""
    return _LEAST_GAIN ** sum(value != _KEYS[key][1][0] for key, value in values)


def described(values: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the values that are not defaults, in words."""
    return [_KEYS[key][2].format(value) for key, value in values if value != _KEYS[key][1][0]]


def explained(key: str, chosen: Arithmetic, seconds: Mapping[tuple[Any, ...], float]) -> tuple[str, str, str]:
    """Return name, value and reason of a chosen value; `seconds` are those of the variants that fit."""
    name, (default, *_), _ = _KEYS[key]
    value = str(chosen[key]).lower() if isinstance(chosen[key], bool) else chosen[key]
    if chosen[key] == default:
        return (
            name,
            value,
            "no other value is faster by 1 % or more" if seconds else "the default, which fits",
        )
    usual = seconds.get(tuple((chosen | {key: default}).values()))
    if usual is None:
        return name, value, f"the run does not fit with {str(default).lower()}"
    return (
        name,
        value,
        f"{usual / seconds[tuple(chosen.values())] - 1:.1%} faster than {str(default).lower()}",
    )
