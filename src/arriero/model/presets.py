"""Named models (presets), and run-file fields that override them."""

import math
import re
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from arriero.errors import UserError, nearest
from arriero.model.family import families
from arriero.model.spec import ModelSpec

_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
_REMOVABLE = ("rope_scaling", "sliding_window")
_SHAPE = {"family", "vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "tied", "extra"}


def preset_names() -> tuple[str, ...]:
    return tuple(_table())


def about(name: str) -> str:
    return _entry(name)["about"]


def load_preset(name: str) -> ModelSpec:
    return ModelSpec.from_dict(_fields(name))


def resolve(preset: str | None, overrides: Mapping[str, object]) -> ModelSpec:
    """Override fields of a preset. None keeps the field; `rope_scaling = false` removes the scaling."""
    own = {name: value for name, value in overrides.items() if value is not None}
    return ModelSpec.from_dict(_overlay(_fields(preset) if preset else {}, own))


def expand(
    table: Mapping[str, Any], sections: Mapping[str, Any] | None = None, embedded: Collection[str] = ()
) -> dict[str, object]:
    """Complete the [model] table of a run file from a preset, or from the model that the run starts from.

    `sections` are the other sections of the run file. A model to start from overrides the keys in `embedded`.
    """
    sections = sections or {}
    start = sections.get("checkpoint")
    if start is not None and (start.start_from or start.resume_from):
        from arriero.model.description import expand_from

        spec = expand_from(table, sections, embedded)
    else:
        spec = completed(table, sections)
    fields = spec.to_dict()
    fields.pop("nominal_params", None)
    return fields


def completed(table: Mapping[str, Any], sections: Mapping[str, Any]) -> ModelSpec:
    """Complete a [model] table; without a preset, `max_seq_len` is the longest sequence of the run."""
    own = {name: value for name, value in table.items() if name != "preset"}
    if "preset" not in table and own and "data" in sections:
        data = sections["data"]
        own.setdefault("max_seq_len", max(data.seq_len, *(phase.seq_len or 0 for phase in data.phases), 0))
    return resolve(table.get("preset"), own)


def _overlay(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, object]:
    merged = {**base, **own}
    scaling = own.get("rope_scaling")
    if isinstance(scaling, Mapping):
        before = base.get("rope_scaling") or {}
        if "type" in scaling and scaling["type"] != before.get("type", "llama3"):
            before = {"high_freq_factor": 32.0} if scaling["type"] == "yarn" else {}
        merged["rope_scaling"] = {**_SCALING, **before, **scaling}
    if isinstance(own.get("extra"), Mapping):
        merged["extra"] = {**(base.get("extra") or {}), **own["extra"]}
    if own.keys() & {"heads", "dim"} and "head_dim" not in own:
        merged.pop("head_dim", None)
    if "heads" in own and "kv_heads" not in own and base.get("kv_heads") == base.get("heads"):
        merged.pop("kv_heads", None)
    if own.keys() & _SHAPE and "nominal_params" not in own:
        merged.pop("nominal_params", None)
    return {name: value for name, value in merged.items() if value is not False or name not in _REMOVABLE}


def _fields(name: str) -> dict[str, object]:
    entry = _entry(name)
    own = {key: value for key, value in entry.items() if key not in ("like", "about")}
    return _overlay(_fields(entry["like"]), own) if "like" in entry else own


def _entry(name: str) -> dict[str, Any]:
    if name in _table():
        return _table()[name]
    raise UserError(
        f"there is no model preset '{name}'",
        f"{_suggestion(name)}; `arriero config models` lists all presets".replace("?;", "?"),
    )


def _suggestion(name: str) -> str:
    """Suggest the preset of about the same size, else the presets of the series, else all series."""
    series: dict[str, list[str]] = {}
    for preset in preset_names():
        series.setdefault(_series_and_size(preset)[0], []).append(preset)
    wanted, size = _series_and_size(name)
    family = nearest(wanted, series, cutoff=0.8)
    if family and size:
        # 'llama-7b' is as near to llama2 as to llama3
        versions = [
            each for each in series if each == wanted or (family != wanted and each[:-1] == family[:-1])
        ]
        found = [preset for each in versions for preset in series[each]] or series[family]
        distance = {preset: abs(math.log(load_preset(preset).parameters / size)) for preset in found}
        best = min(distance, key=lambda preset: distance[preset])
        if distance[best] < math.log(1.5):
            return f"did you mean '{best}'?"
    elif close := nearest(name, preset_names(), cutoff=0.85):
        return f"did you mean '{close}'?"
    if family:
        return f"presets of {family}: {', '.join(series[family])}"
    plain = [each for each in series if series[each][0].startswith(f"{each}-")]
    return f"known families: {', '.join(plain)}; for other Llama-class models set the dimensions in [model]"


def _series_and_size(name: str) -> tuple[str, float | None]:
    """Split a model name: 'meta-llama/Llama-3.1-8B' -> ('llama3.1', 8e9); without a size, (name, None)."""
    plain = name.rpartition("/")[2].lower().removeprefix("meta-")
    match = re.search(r"[-_]?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", plain)
    family = re.sub(r"[-_]", "", plain[: match.start()] if match else plain)
    return family, float(match[1]) * {"b": 1e9, "m": 1e6}[match[2]] if match else None


def _table() -> dict[str, dict[str, Any]]:
    files = [family.presets for family in families().values() if family.presets]
    return {name: entry for file in files for name, entry in _read(file).items()}


@cache
def _read(file: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads(file.read_text(encoding="utf-8"))
