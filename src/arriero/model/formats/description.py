"""`model.toml`: what a model is, beside weights whose own format does not tell all of it."""

import json
import tomllib
from pathlib import Path
from typing import Any

from arriero.checkpoint.formats.source import Source
from arriero.config.toml import toml_value
from arriero.errors import UserError
from arriero.model.presets import resolve
from arriero.model.spec import ModelSpec

NAME = "model.toml"


def write_description(source: Source, directory: Path) -> None:
    """[model] as in a run file, and in [tokens] the ids of special tokens."""
    spec = source.spec.to_dict()
    spec.pop("nominal_params", None)
    lines = ["[model]", *(f"{name} = {toml_value(value)}" for name, value in spec.items())]
    if source.tokens:
        lines += ["", "[tokens]", *(f"{name} = {toml_value(v)}" for name, v in source.tokens.items())]
    (directory / NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_description(directory: Path) -> tuple[ModelSpec, dict[str, Any]] | None:
    """Of a training checkpoint it is the [model] section of run.toml. None where there is neither."""
    path = next((p for p in (directory / NAME, directory / "run.toml") if p.is_file()), None)
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", "mend it, or copy the checkpoint again") from None
    if not isinstance(table.get("model"), dict):
        raise UserError(f"{path} has no [model] section", "give a checkpoint written by arriero")
    fields = {name: value for name, value in table["model"].items() if name != "preset"}
    tokens = table.get("tokens", {}) if path.name == NAME else {}
    return resolve(None, fields), tokens


def described(directory: Path) -> tuple[ModelSpec, dict[str, Any]]:
    found = read_description(directory)
    if found is None:
        raise UserError(
            f"{directory} holds weights but neither {NAME} nor run.toml to tell which model they are",
            f"write {NAME} there, with the [model] section of the run file",
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})", "copy or download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object", "copy or download it again")
    return content


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
