"""What is known of every key: type, default, meaning, other trainers' names; the page docs/config.md."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from arriero.config.schema import RunConfig
from arriero.config.toml import toml_value
from arriero.config.walk import all_keys, field_at, section_of, unset_value
from arriero.errors import nearest


@dataclass(frozen=True)
class KeyFacts:
    key: str
    type: str
    default: str
    meaning: str
    elsewhere: dict[str, list[str]]


def facts_of(key: str) -> KeyFacts | None:
    """None for an unknown key. A section has no type and no default."""
    key = re.sub(r"\[\d+\]", "", key)
    field = field_at(RunConfig, key)
    if field is None:
        return None
    kind = default = ""
    if field.annotation is not section_of(field.annotation):
        unset = unset_value(field)
        kind = _type_words(_schema_node(key), toml_value(unset))
        value = unset if unset is not None else field.get_default()
        default = "required" if field.is_required() else toml_value(_plain(value))
    return KeyFacts(key, kind, default, field.description or "", _aliases().get(key, {}))


def keys_of(section: str) -> list[str]:
    """The keys directly inside a section; [] for a key that is not a section."""
    return [key for key in all_keys(RunConfig) if key.rpartition(".")[0] == section]


def suggestion(key: str) -> str | None:
    """What to do about an unknown key: the key that does this here, or the nearest name."""
    if answer := answer_to(key):
        return answer
    if near := nearest_key(key):
        return f"here this is '{near}'" if near == alias_of(key) else f"did you mean '{near}'?"
    return None


def renamed_keys() -> dict[str, str]:
    """Return the keys of earlier versions with their names now."""
    return _aliases()["renamed"]


def answer_to(name: str) -> str | None:
    """What to do instead of another trainer's setting that no single key replaces."""
    answers, name = _aliases()["answers"], _normal(name)
    return answers.get(name) or answers.get(name.rpartition(".")[2])


def alias_of(name: str) -> str | None:
    """The key that does what another trainer's setting does."""
    name = _normal(name)
    return _names().get(name) or _names().get(name.rpartition(".")[2])


def nearest_key(key: str) -> str | None:
    """The key an unknown one stands for: by another trainer's name, or by a similar name."""
    name = _normal(key)
    section, _, word = name.rpartition(".")
    names = _names()
    if name in names or ("_" in word and word in names):
        return names.get(name) or names[word]
    keys = all_keys(RunConfig)
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == section}
    if match := nearest(word, siblings):
        return siblings[match]
    if word in names:
        return names[word]
    elsewhere = {k.rpartition(".")[2]: k for k in reversed(keys) if "." in k}  # the first of a name wins
    if match := nearest(word, elsewhere, cutoff=0.8):
        return elsewhere[match]
    match = nearest(word, names, cutoff=0.85)
    return names[match] if match else None


def page() -> str:
    """The Markdown reference of all keys."""
    lines = [_HEAD]
    for section in RunConfig.model_fields:
        field = RunConfig.model_fields[section]
        lines += [f"\n## [{section}]", f"{field.description}\n", *_table(section)]
    return "\n".join(lines) + "\n"


_HEAD = """# Run file reference
<!-- Generated from src/arriero/config/schema.py and aliases.toml by `make docs`; do not edit. -->

Every key of the run file. `arriero config explain KEY` prints one entry, `arriero config show RUN.toml` the
values of a run with their origin.

- `--set KEY=VALUE` overrides a key. VALUE is TOML; the quotes around plain text may be left out.
- `--set KEY=default` restores the default of any key or section, whatever the run file and the files it
  extends set. To give a text key the value "default", quote it: `--set run.name='"default"'`.
- A key whose default is `"auto"` is derived, or not used, unless it is set; `"auto"` leaves it unset. A text
  key whose default is `false` is left unset by `false`. So a file can undo what the file it extends sets.
- Quantities carry a unit: `"4M tok"`, `"500 steps"`, `"2h"`. The suffixes k, M, B (or G) and T are decimal;
  `1e9` and `1E+9` are accepted.
- The last column has the names of other trainers. An unknown key with such a name is answered with the key
  here."""


def _table(section: str) -> list[str]:
    lines = ["| key | type | default | meaning | elsewhere |", "|---|---|---|---|---|"]
    for key in keys_of(section):
        facts = facts_of(key)
        assert facts is not None
        inner = keys_of(key)
        names = "; ".join(
            f"{who}: {_code(names)}" for who, names in facts.elsewhere.items() if who != "others"
        )
        others = _code(facts.elsewhere.get("others", []))
        default = facts.default if facts.default in ("", "required") else f"`{facts.default}`"
        cells = [
            f"`{key}`",
            facts.type or "table",
            default,
            facts.meaning,
            "; ".join(filter(None, (names, others))),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines += _table(key)[2:] if inner else []
    return lines


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


_LIMITS = {"exclusiveMinimum": ">", "minimum": ">=", "maximum": "<=", "exclusiveMaximum": "<"}
_TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}


def _type_words(node: dict[str, Any], unset: str) -> str:
    """A person's words for a JSON Schema node; `unset` stands for null."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type_words(branch, unset) for branch in node["anyOf"]))
    if "const" in node or "enum" in node:
        return " or ".join(map(toml_value, node.get("enum", [node.get("const")])))
    if node.get("type") == "null":
        return unset
    if node.get("type") == "array":
        items = node.get("prefixItems") or [node["items"]]
        count = f"{len(items)} " if "prefixItems" in node else ""
        return f"list of {count}{_type_words(items[0], unset)}"
    if node.get("type") not in _TYPES:
        return "table"
    words = node.get("$comment", _TYPES[node["type"]])
    limits = [f"{sign} {node[name]}" for name, sign in _LIMITS.items() if name in node]
    limits += [f"matching `{node['pattern']}`"] if "pattern" in node else []
    limits += ["like " + ", ".join(map(toml_value, node["examples"]))] if "examples" in node else []
    return f"{words} {', '.join(limits)}".rstrip()


def _schema_node(key: str) -> dict[str, Any]:
    document = _schema()
    node = document
    for part in key.split("."):
        while "properties" not in node:
            node = document["$defs"][str(_reference(node))]
        node = node["properties"][part]
    return node


@cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def _reference(node: dict[str, Any]) -> str | None:
    """The definition a schema node points to: plain, as one of several types, or as the item of a list."""
    if "$ref" in node:
        return node["$ref"].rpartition("/")[2]
    inner = [*node.get("anyOf", []), *([node["items"]] if "items" in node else [])]
    return next((found for each in inner if (found := _reference(each))), None)


def _normal(name: str) -> str:
    return re.sub(r"\[\d+\]", "", name).lstrip("-").replace("-", "_").lower()


@cache
def _aliases() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("arriero.config").joinpath("aliases.toml").read_text(encoding="utf-8"))


@cache
def _names() -> dict[str, str]:
    """Other trainers' names to our keys. Of a dotted name the last part counts too, if it tells enough."""
    names = dict(renamed_keys())
    tables = {key: table for key, table in _aliases().items() if key not in ("answers", "renamed")}
    every = [(name, key) for key, table in tables.items() for each in table.values() for name in each]
    for name, key in every:
        names.setdefault(name, key)
    for name, key in every:
        word = name.rpartition(".")[2]
        if "_" in word:
            names.setdefault(word, key)
    return names
