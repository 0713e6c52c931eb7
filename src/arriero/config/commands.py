"""The verbs of `arriero config` that only need the run file."""

import json
import re
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from arriero.config.problems import nearest_key
from arriero.config.schema import RunConfig
from arriero.config.toml import toml_value
from arriero.config.walk import field_at, section_of, type_name
from arriero.errors import UserError


def schema() -> None:
    """Print the JSON Schema of the run file, for editors.

    Example: arriero config schema > run.schema.json
    """
    document = _for_editors(RunConfig.model_json_schema())
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["properties"]["extends"] = _EXTENDS
    typer.echo(json.dumps(document, indent=2))


_EXTENDS = {"type": "string", "description": "A run file this one builds on."}


def _for_editors(node: Any) -> Any:
    """TOML has no null, and what a file lacks may stand in the one it extends."""
    if isinstance(node, list):
        return [_for_editors(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key != "required"}
    if "anyOf" in kept:
        kept["anyOf"] = [branch for branch in kept["anyOf"] if branch != {"type": "null"}]
    if kept.get("default", "") is None:
        del kept["default"]
    return {key: _for_editors(value) for key, value in kept.items()}


def explain(key: Annotated[str, typer.Argument(help="A section or key, like train.batch.")]) -> None:
    """Say what a key of the run file means: type, default, allowed values.

    Example: arriero config explain train.batch
    """
    console = Console(highlight=False)
    if key == "extends":
        console.print(f"[bold]extends[/]  {_EXTENDS['description']}")
        return
    field = field_at(RunConfig, key)
    if field is None:
        close = nearest_key(key)
        raise UserError(
            f"'{key}' is not a key of the run file",
            f"did you mean '{close}'?" if close else "see `arriero config schema`",
        )
    console.print(f"[bold]{escape(key)}[/]  {field.description}")
    if section := section_of(field.annotation):
        for name, inner in section.model_fields.items():
            console.print(f"  [cyan]{key}.{name}[/]  {inner.description}")
        return
    console.print(f"  type     {type_name(field.annotation)}", markup=False)
    default = "none: it must be given" if field.is_required() else toml_value(_plain(field.get_default()))
    console.print(f"  default  {default}", markup=False)
    if allowed := _allowed(key):
        console.print(f"  allowed  {allowed}", markup=False)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


_LIMITS = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "pattern": "matching",
}


def _allowed(key: str) -> str:
    """The limits and examples the JSON Schema knows of a key."""
    document = RunConfig.model_json_schema()
    node = document
    for part in re.sub(r"\[\d+\]", "", key).split("."):
        while "properties" not in node:
            node = document["$defs"][_reference(node)]
        node = node["properties"][part]
    branches = [b for b in (node, *node.get("anyOf", [])) if isinstance(b, dict)]
    words = [f"{sign} {b[name]}" for b in branches for name, sign in _LIMITS.items() if name in b]
    words += [", ".join(map(repr, b["enum"])) for b in branches if "enum" in b]
    words += [repr(b["const"]) for b in branches if b.get("const")]
    words += ["like " + ", ".join(map(repr, b["examples"])) for b in branches if "examples" in b]
    return " and ".join(words)


def _reference(node: dict) -> str:
    """The definition a schema node points to: plain, optional, or the item of a list."""
    for candidate in (node, node.get("items", {}), *node.get("anyOf", [])):
        if "$ref" in candidate:
            return candidate["$ref"].rpartition("/")[2]
    raise KeyError(node)
