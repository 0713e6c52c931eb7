"""What a directory says about the model in it, beside the weights."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arriero.config.toml import toml_value
from arriero.errors import UserError
from arriero.model.presets import resolve
from arriero.model.spec import ModelSpec

NAME = "model.toml"
_STATE = "state.json"


@dataclass(frozen=True)
class Description:
    """`tokens` are ids under Hugging Face's names; `remarks` are what the user must know about them."""

    spec: ModelSpec
    tokens: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def write_description(spec: ModelSpec, tokens: Mapping[str, Any], directory: Path) -> None:
    """Write model.toml: [model] as in a run file, and in [tokens] the ids of special tokens."""
    fields = spec.to_dict()
    fields.pop("nominal_params", None)
    lines = ["[model]", *(f"{name} = {toml_value(value)}" for name, value in fields.items())]
    if tokens:
        lines += ["", "[tokens]", *(f"{name} = {toml_value(value)}" for name, value in tokens.items())]
    (directory / NAME).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_description(directory: Path) -> Description | None:
    """From model.toml, or from run.toml and state.json of a training checkpoint. None if there is neither."""
    path = next((p for p in (directory / NAME, directory / "run.toml") if p.is_file()), None)
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", "copy the checkpoint again") from None
    if not isinstance(table.get("model"), dict):
        raise UserError(f"{path} has no [model] section", "give a checkpoint written by arriero")
    fields = {name: value for name, value in table["model"].items() if name != "preset"}
    try:
        spec = resolve(None, fields)
    except UserError as error:
        raise UserError(f"{path}: {error.what}", error.todo) from None
    if path.name == NAME:
        return Description(spec, table.get("tokens", {}))
    tokens = read_json(directory / _STATE).get("token_ids") if (directory / _STATE).is_file() else None
    if tokens is None:
        older = f"{directory} does not record its token ids, being from an older version"
        return Description(spec, remarks=(f"{older}: BOS and EOS are guessed from names in its tokenizer",))
    return Description(spec, tokens)


def described(directory: Path) -> Description:
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
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})", "copy or download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object", "copy or download it again")
    return content


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
