"""From files and --set to one frozen RunConfig that knows where each value came from."""

import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from arriero.config.check import cross_check
from arriero.config.problems import ConfigError, Problem, from_validation, unknown_section
from arriero.config.reference import renamed_keys
from arriero.config.schema import ModelSection, RunConfig
from arriero.config.walk import field_at, section_of, without_unset
from arriero.errors import UserError

Table = dict[str, Any]
# Completes the [model] table, given the other sections and the names that only the embedded default gives;
# a parameter because presets and model directories are read above this package.
ExpandModel = Callable[[Mapping[str, Any], Mapping[str, Any], Collection[str]], Mapping[str, Any]]
_EMBEDDED = "embedded default"
_BESIDE_STORED = ("events.jsonl", "manifest.json")


@dataclass(frozen=True)
class LoadedRun:
    config: RunConfig
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        return _origin_of(key, self.origins, "default")


def load_run(path: Path | None, sets: Iterable[str], expand_model: ExpandModel) -> LoadedRun:
    """Layers, lowest first: schema defaults, preset or model to start from, `extends`, the file, --set."""
    tree: Table = {}
    origins: dict[str, str] = {}
    if path is None:
        default = files("arriero.config").joinpath("default.toml").read_text(encoding="utf-8")
        _overlay(tree, tomllib.loads(default), _EMBEDDED, origins)
    else:
        _overlay_file(tree, origins, path, seen=())
    _overlay_sets(tree, origins, sets)
    return _validate(tree, origins, expand_model, str(path or _EMBEDDED))


def config_from_toml(path: Path) -> RunConfig:
    """Read a stored run.toml, which holds every value itself; keys of earlier versions are renamed."""
    return _validate(_upgraded(_read_toml(path)), {}, lambda table, *_: table, str(path)).config


def _upgraded(table: Table) -> Table:
    """Rename the keys of earlier versions in a stored run file."""
    for old, new in renamed_keys().items():
        (old_section, old_name), (section, name) = old.split("."), new.split(".")
        if isinstance(table.get(old_section), dict) and old_name in table[old_section]:
            table.setdefault(section, {})[name] = table[old_section].pop(old_name)
    return table


def _is_stored(path: Path) -> bool:
    """Return whether a file is the run.toml of a run directory or of a checkpoint."""
    return path.name == "run.toml" and any((path.parent / name).exists() for name in _BESIDE_STORED)


def _overlay_file(tree: Table, origins: dict[str, str], path: Path, seen: tuple[Path, ...]) -> None:
    table = _upgraded(_read_toml(path)) if _is_stored(path) else _read_toml(path)
    if path.resolve() in seen:
        raise UserError(f"{path} extends itself", "remove `extends` from one of the files in the circle")
    base = table.pop("extends", None)
    if base is not None:
        if not isinstance(base, str):
            raise UserError(
                f"{path}: extends = {base!r} is not a file name", 'write it like extends = "base.toml"'
            )
        _overlay_file(tree, origins, path.parent / base, (*seen, path.resolve()))
    _overlay(tree, table, str(path), origins)


def _read_toml(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(
            f"there is no run file {path}", "check the path, or leave it out for the embedded default"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", "give a readable TOML file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML ({error})", "correct the file") from None


def _overlay_sets(tree: Table, origins: dict[str, str], sets: Iterable[str]) -> None:
    for item in sets:
        key, equals, text = item.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise UserError(f"--set {item} is not an assignment", "write it like --set train.batch='4M tok'")
        if text.strip() == "default" and field_at(RunConfig, key.strip()):
            _restore_default(tree, origins, parts)
            continue
        table: Table = {parts[-1]: _parse_value(text.strip())}
        for part in reversed(parts[:-1]):
            table = {part: table}
        _overlay(tree, table, "--set", origins)


def _restore_default(tree: Table, origins: dict[str, str], parts: list[str]) -> None:
    """Forget what files and earlier --set options gave a key or section."""
    key = ".".join(parts)
    for name in [n for n in origins if n == key or n.startswith(f"{key}.")]:
        del origins[name]
    table: Any = tree
    for part in parts[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table.pop(parts[-1], None)


def _parse_value(text: str) -> Any:
    """A TOML value, or plain text where quotes were left to the shell."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def _overlay(
    tree: Table, table: Mapping[str, Any], origin: str, origins: dict[str, str], prefix: str = ""
) -> None:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and isinstance(tree.get(name, {}), dict):
            _overlay(tree.setdefault(name, {}), value, origin, origins, f"{key}.")
            continue
        tree[name] = value
        origins[key] = origin


def _validate(tree: Table, origins: dict[str, str], expand_model: ExpandModel, where: str) -> LoadedRun:
    sections, problems = _validate_sections(tree)
    try:
        sections |= _expanded_model(tree, sections, expand_model, origins)
    except UserError as error:
        preset = _preset_of(tree)
        key = "model.preset" if preset and preset in error.what else "model"
        problems.append(Problem(key, error.what, error.todo))
    problems += cross_check(sections)
    if problems:
        raise ConfigError(replace(p, origin=_origin_of(p.key, origins, where)) for p in problems)
    return LoadedRun(RunConfig(**sections), origins)


def _preset_of(tree: Table) -> str | None:
    table = tree.get("model")
    preset = table.get("preset") if isinstance(table, dict) else None
    return preset if isinstance(preset, str) else None


def _expanded_model(
    tree: Table, sections: Table, expand_model: ExpandModel, origins: dict[str, str]
) -> Mapping[str, ModelSection]:
    """The model section with every dimension; of a faulty section only the preset's name is checked."""
    preset = _preset_of(tree)
    base = expand_model({"preset": preset}, {}, ()) if preset else {}
    if "model" not in sections:
        return {}
    given = sections["model"].model_dump(exclude_unset=True, exclude_none=True)
    embedded = {name for name in given if _origin_of(f"model.{name}", origins, "") == _EMBEDDED}
    fields = expand_model(given, sections, embedded)
    if "preset" in embedded and fields.get("dim") != base.get("dim"):
        del given["preset"]
    full = {**given, **fields}
    for name in full.keys() - given.keys():
        origins[f"model.{name}"] = _origin_of_dimension(name, full, base, preset, sections)
    return {"model": ModelSection.model_validate(full)}


def _origin_of_dimension(
    name: str, full: Mapping[str, Any], base: Mapping[str, Any], preset: str | None, sections: Table
) -> str:
    """Where a dimension came from that the run file does not give."""
    start = sections.get("checkpoint")
    if start is not None and (start.start_from or start.resume_from):
        return "checkpoint.start_from" if start.start_from else "checkpoint.resume_from"
    if preset:
        return f"preset {preset}" if base.get(name) == full[name] else "derived"
    return "data.seq_len" if name == "max_seq_len" else "default"


def _validate_sections(tree: Table) -> tuple[Table, list[Problem]]:
    """Each section by itself, so that one wrong key does not hide what is wrong elsewhere."""
    sections: Table = {}
    errors: list[Any] = [
        error
        for name, value in tree.items()
        if name not in RunConfig.model_fields
        for error in unknown_section(name, value)
    ]
    for name, field in RunConfig.model_fields.items():
        section = section_of(field.annotation)
        assert section is not None
        table = without_unset(section, tree.get(name, {}))
        try:
            sections[name] = _read_section(section, table)
        except ValidationError as error:
            errors += [{**e, "loc": (name, *e["loc"])} for e in error.errors()]
            unknown = {e["loc"][0] for e in error.errors() if e["type"] == "extra_forbidden"}
            if len(unknown) == error.error_count():
                rest = {key: value for key, value in table.items() if key not in unknown}
                sections[name] = _read_section(section, rest)
    return sections, from_validation(errors)


def _read_section(section: type[BaseModel], table: Any) -> BaseModel:
    """Strictly, through JSON, where a list may stand for a tuple but text never for a number."""
    return section.model_validate_json(json.dumps(table, default=str), strict=True)


def _origin_of(key: str, origins: Mapping[str, str], otherwise: str) -> str:
    """Where a key, the table around it, or something inside it was given; --set speaks last."""
    around = key
    while around:
        if around in origins:
            return origins[around]
        around = around[: max(around.rfind("."), around.rfind("["), 0)]
    inside = [origin for name, origin in origins.items() if name.startswith((f"{key}.", f"{key}["))]
    return "--set" if "--set" in inside else next(iter(inside), otherwise)
