"""From files and --set to one frozen RunConfig that knows where each value came from."""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from arriero.config.check import cross_check
from arriero.config.problems import ConfigError, Problem, from_validation
from arriero.config.schema import ModelSection, RunConfig
from arriero.config.walk import section_of
from arriero.errors import UserError

Table = dict[str, Any]
# Fills the [model] table with the preset's dimensions; handed in because presets live above this package.
ExpandModel = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class LoadedRun:
    config: RunConfig
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        return self.origins.get(key, "default")


def load_run(path: Path | None, sets: Iterable[str], expand_model: ExpandModel) -> LoadedRun:
    """Layers, lowest first: schema defaults, the preset, `extends` files, the file, --set."""
    tree: Table = {}
    origins: dict[str, str] = {}
    if path is None:
        default = files("arriero.config").joinpath("default.toml").read_text()
        _overlay(tree, tomllib.loads(default), "embedded default", origins)
    else:
        _overlay_file(tree, origins, path, seen=())
    _overlay_sets(tree, origins, sets)
    return _validate(tree, origins, expand_model, str(path or "embedded default"))


def config_from_toml(path: Path) -> RunConfig:
    """Read back a resolved run.toml, which holds every value itself."""
    return _validate(_read_toml(path), {}, dict, str(path)).config


def _overlay_file(tree: Table, origins: dict[str, str], path: Path, seen: tuple[Path, ...]) -> None:
    if path.resolve() in seen:
        raise UserError(f"{path} extends itself", "remove `extends` from one of the files in the circle")
    table = _read_toml(path)
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
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"there is no run file {path}", "check the path, or leave it out for the embedded default"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", "give a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML ({error})", "mend the line it names") from None


def _overlay_sets(tree: Table, origins: dict[str, str], sets: Iterable[str]) -> None:
    for item in sets:
        key, equals, text = item.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise UserError(f"--set {item} is not an assignment", "write it like --set train.batch='4M tok'")
        table: Table = {parts[-1]: _toml_value(text.strip())}
        for part in reversed(parts[:-1]):
            table = {part: table}
        _overlay(tree, table, "--set", origins)


def _toml_value(text: str) -> Any:
    """A TOML value, or plain text where quotes were left to the shell."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


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
    if "model" in sections:
        try:
            sections["model"] = _expand(sections["model"], expand_model, origins)
        except UserError as error:
            preset = sections["model"].preset
            key = "model.preset" if preset and preset in error.what else "model"
            problems.append(Problem(key, error.what, error.todo))
    problems += cross_check(sections)
    if problems:
        raise ConfigError((_origin_of(p.key, origins, where), p) for p in problems)
    return LoadedRun(RunConfig(**sections), origins)


def _expand(model: ModelSection, expand_model: ExpandModel, origins: dict[str, str]) -> ModelSection:
    given = model.model_dump(exclude_none=True)
    full = {**expand_model(given), **given}
    source = f"preset {model.preset}" if model.preset else "derived"
    origins.update({f"model.{name}": source for name in full if name not in given})
    return ModelSection.model_validate(full)


def _validate_sections(tree: Table) -> tuple[Table, list[Problem]]:
    """Each section by itself, so that one wrong key does not hide what is wrong elsewhere."""
    sections: Table = {}
    errors: list[Any] = []
    for name, value in tree.items():
        if name not in RunConfig.model_fields:
            errors.append({"type": "extra_forbidden", "loc": (name,), "msg": "", "input": value})
    for name, field in RunConfig.model_fields.items():
        if name not in tree and not field.is_required():
            sections[name] = field.get_default(call_default_factory=True)
            continue
        try:
            document = json.dumps(tree.get(name, {}), default=str)
            section = section_of(field.annotation)
            assert section is not None
            sections[name] = section.model_validate_json(document, strict=True)
        except ValidationError as error:
            errors += [{**e, "loc": (name, *e["loc"])} for e in error.errors()]
    return sections, from_validation(errors)


def _origin_of(key: str, origins: Mapping[str, str], fallback: str) -> str:
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0] if "." in key else key.rpartition("[")[0]
    return fallback
