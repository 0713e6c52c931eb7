"""The named models of presets.toml, and a user's own fields laid over them."""

import math
import re
import tomllib
from collections.abc import Collection, Mapping
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


def expand(
    table: Mapping[str, Any], sections: Mapping[str, Any] | None = None, embedded: Collection[str] = ()
) -> dict[str, object]:
    """The [model] table of a run file with every dimension: from a preset, or from the model to start from.

    `sections` are the others of the run file; the keys in `embedded` give way to a model to start from.
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
    """Without a preset, `max_seq_len` defaults to the longest sequence that the run trains on."""
    own = {name: value for name, value in table.items() if name != "preset"}
    if "preset" not in table and own and "data" in sections:
        data = sections["data"]
        own.setdefault("max_seq_len", max(data.seq_len, *(phase.seq_len or 0 for phase in data.phases), 0))
    return resolve(table.get("preset"), own)


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
    raise UserError(
        f"there is no model preset '{name}'",
        f"{_suggestion(name)}; `arriero config models` lists all presets",
    )


def _suggestion(name: str) -> str:
    """The preset of the same family and about the same size, the family's presets, or the families."""
    families: dict[str, list[str]] = {}
    for preset in preset_names():
        families.setdefault(_family_and_size(preset)[0], []).append(preset)
    wanted, size = _family_and_size(name)
    family = nearest(wanted, families, cutoff=0.8)
    if family and size:
        # 'llama-7b' is as near to llama2 as to llama3
        versions = [
            each for each in families if each == wanted or (family != wanted and each[:-1] == family[:-1])
        ]
        found = [preset for each in versions for preset in families[each]] or families[family]
        apart = {preset: abs(math.log(load_preset(preset).parameters / size)) for preset in found}
        best = min(apart, key=lambda preset: apart[preset])
        if apart[best] < math.log(1.5):
            return f"did you mean '{best}'?"
    elif close := nearest(name, preset_names(), cutoff=0.85):
        return f"did you mean '{close}'?"
    if family:
        return f"presets of {family}: {', '.join(families[family])}"
    plain = [each for each in families if families[each][0].startswith(f"{each}-")]
    return f"known families: {', '.join(plain)}; for other Llama-class models set the dimensions in [model]"


def _family_and_size(name: str) -> tuple[str, float | None]:
    """'meta-llama/Llama-3.1-8B' -> ('llama3.1', 8e9); the size is None where the name has none."""
    plain = name.rpartition("/")[2].lower().removeprefix("meta-")
    match = re.search(r"[-_]?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", plain)
    family = re.sub(r"[-_]", "", plain[: match.start()] if match else plain)
    return family, float(match[1]) * {"b": 1e9, "m": 1e6}[match[2]] if match else None


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
