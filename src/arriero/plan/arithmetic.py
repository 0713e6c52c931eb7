"""The keys that change the arithmetic of a run or move it to the CPU, which are searched if they are "auto".

"auto" is not their default: a run must not change its arithmetic because it is planned for another machine.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from arriero.config.schema import RunConfig
from arriero.plan.hardware import Machine

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
    sections = {name: getattr(config, name) for name in ("precision", "optim", "memory")}
    return [key for key in _KEYS if getattr(sections[key.split(".")[0]], key.split(".")[1]) == "auto"]


def variants(config: RunConfig, machine: Machine) -> list[Arithmetic]:
    """Return all values of the open keys together, the defaults first; one empty variant if none is open."""
    keys = open_keys(config)
    values = [_KEYS[key][1] for key in keys]
    if not machine.float8:
        values = [("off",) if "off" in each else each for each in values]
    return [dict(zip(keys, each, strict=True)) for each in product(*values)]


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
