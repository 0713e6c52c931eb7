"""The verbs of `arriero config` that only need the run file."""

import json
from typing import Any

import typer

from arriero.config.options import Key
from arriero.config.reference import alias_of, answer_to, facts_of, keys_of, page, suggestion
from arriero.config.schema import RunConfig
from arriero.errors import UserError
from arriero.ui import Table, escape, make_console


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
    """TOML has no null but "auto" or false, and what a file lacks may stand in the one it extends."""
    if isinstance(node, list):
        return [_for_editors(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key != "required"}
    if "anyOf" in kept:
        unset = {"const": False if {"type": "string"} in kept["anyOf"] else "auto"}
        kept["anyOf"] = [unset if branch == {"type": "null"} else branch for branch in kept["anyOf"]]
    if kept.get("default", "") is None:
        del kept["default"]
    return {key: _for_editors(value) for key, value in kept.items()}


def explain(key: Key) -> None:
    """Say what a key of the run file means: type, default, names in other trainers. A section lists its keys.

    Another trainer's name is answered with the key that does the same here.

    Example: arriero config explain train.batch
    """
    console = make_console(wide=True)
    if key == "extends":
        console.print(f"[bold]extends[/]  {_EXTENDS['description']}")
        return
    facts = facts_of(key)
    if facts is None and (answer := answer_to(key)):
        console.print(f"[bold]{escape(key)}[/]  not a key here: {answer}")
        return
    if facts is None and (ours := alias_of(key)):
        console.print(f"[bold]{escape(key)}[/]  here this is {ours}")
        key, facts = ours, facts_of(ours)
    if facts is None:
        todo = suggestion(key) or f"the sections are {', '.join(RunConfig.model_fields)}"
        raise UserError(f"'{key}' is not a key of the run file", todo)
    console.print(f"[bold]{escape(key)}[/]  {escape(facts.meaning)}")
    if facts.type:
        console.plain(f"  type     {facts.type}")
        console.plain(f"  default  {facts.default}")
    for who, names in facts.elsewhere.items():
        console.plain(f"  {who:<12}  {', '.join(names)}")
    if inner := keys_of(facts.key):
        console.print(_listing(inner))


def reference() -> None:
    """Print the reference of all keys as Markdown: type, default, meaning, names in other trainers.

    Example: arriero config reference > docs/config.md
    """
    typer.echo(page(), nl=False)


def _listing(keys: list[str]) -> Table:
    table = Table("key", "type", "default", "meaning", no_wrap=("key",))
    for key in keys:
        facts = facts_of(key)
        assert facts is not None
        table.row(key, facts.type or "table", facts.default, facts.meaning)
    return table
