"""The named models of presets.toml, and a user's own fields laid over them."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from arriero.errors import UserError, nearest
from arriero.model.spec import ModelSpec

_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
_SHAPE = {"family", "vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "tied"}


def preset_names() -> tuple[str, ...]:
    return tuple(_table())


def about(name: str) -> str:
    return _entry(name)["about"]


def load_preset(name: str) -> ModelSpec:
    return ModelSpec.from_dict(_fields(name))


def resolve(preset: str | None, overrides: Mapping[str, object]) -> ModelSpec:
    """None leaves a field as the preset has it; `rope_scaling = false` takes the preset's scaling away."""
    own = {name: value for name, value in overrides.items() if value is not None}
    return ModelSpec.from_dict(_overlay(_fields(preset) if preset else {}, own))


def expand(table: Mapping[str, Any]) -> dict[str, object]:
    """The [model] table of a run file with every dimension filled in."""
    own = {name: value for name, value in table.items() if name != "preset"}
    fields = resolve(table.get("preset"), own).to_dict()
    fields.pop("nominal_params", None)
    return fields


def _overlay(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, object]:
    merged = {**base, **own}
    scaling = own.get("rope_scaling")
    if isinstance(scaling, Mapping):
        merged["rope_scaling"] = {**_SCALING, **(base.get("rope_scaling") or {}), **scaling}
    if own.keys() & {"heads", "dim"} and "head_dim" not in own:
        merged.pop("head_dim", None)
    if "heads" in own and "kv_heads" not in own and base.get("kv_heads") == base.get("heads"):
        merged.pop("kv_heads", None)
    if own.keys() & _SHAPE and "nominal_params" not in own:
        merged.pop("nominal_params", None)
    if merged.get("rope_scaling") is False:
        del merged["rope_scaling"]
    return merged


def _fields(name: str) -> dict[str, object]:
    entry = _entry(name)
    own = {key: value for key, value in entry.items() if key not in ("like", "about")}
    return _overlay(_fields(entry["like"]), own) if "like" in entry else own


def _entry(name: str) -> dict[str, Any]:
    if name in _table():
        return _table()[name]
    near = nearest(name, preset_names(), cutoff=0.4)
    hint = f"did you mean '{near}'? " if near else ""
    raise UserError(f"there is no model preset '{name}'", f"{hint}`arriero config models` lists them all")


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
