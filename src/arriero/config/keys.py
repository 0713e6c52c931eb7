"""Keys of the run file: lookup, facts, names in other trainers, and sentences about problems with them."""

import re
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from arriero.config.fields import toml_value
from arriero.config.schema import RunConfig
from arriero.errors import UserError, nearest

_LONGEST_SHOWN = 100


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every section and key, dotted, in the order of declaration."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if section := section_of(field.annotation):
            keys += all_keys(section, f"{prefix}{name}.")
    return keys


def field_at(model: type[BaseModel], key: str) -> FieldInfo | None:
    field = None
    current: type[BaseModel] | None = model
    for part in re.sub(r"\[\d+\]", "", key).split("."):
        if current is None or part not in current.model_fields:
            return None
        field = current.model_fields[part]
        current = section_of(field.annotation)
    return field


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field holds: directly, as an optional, or as a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        if section := section_of(argument):
            return section
    return None


def unset_value(field: FieldInfo) -> Literal["auto", False] | None:
    """Return the value that leaves an optional key unset: "auto", or false where the value is free text."""
    if field.is_required() or field.get_default() is not None or field.default_factory is not None:
        return None
    return False if str in typing.get_args(field.annotation) else "auto"


def without_unset(section: type[BaseModel], table: Any) -> Any:
    """Return the table without the keys that have their unset value."""
    if isinstance(table, list):
        return [without_unset(section, item) for item in table]
    if not isinstance(table, dict):
        return table
    kept = {}
    for name, value in table.items():
        field = section.model_fields.get(name)
        word = unset_value(field) if field else None
        if word is not None and value == word and type(value) is type(word):
            continue
        inner = section_of(field.annotation) if field else None
        kept[name] = without_unset(inner, value) if inner else value
    return kept


@dataclass(frozen=True)
class KeyFacts:
    key: str
    type: str
    default: str
    meaning: str
    elsewhere: dict[str, list[str]]


def facts_of(key: str) -> KeyFacts | None:
    """Return the facts of a key, or None for an unknown key. A section has no type and no default."""
    key = re.sub(r"\[\d+\]", "", key)
    field = field_at(RunConfig, key)
    if field is None:
        return None
    kind, default, node = "", "", _schema_node(key)
    if field.annotation is not section_of(field.annotation):
        unset = unset_value(field)
        kind = _type_words(node, toml_value(unset))
        value = unset if unset is not None else field.get_default()
        default = "required" if field.is_required() else toml_value(_plain(value))
    return KeyFacts(key, kind, default, node.get("description", ""), _aliases().get(key, {}))


def keys_of(section: str) -> list[str]:
    """Return the keys directly inside a section; none for a key that is not a section."""
    return [key for key in all_keys(RunConfig) if key.rpartition(".")[0] == section]


def suggestion(key: str) -> str | None:
    """Return what to do about an unknown key: use the key with this function here, or the nearest name."""
    if answer := advice_for(key):
        return answer
    if near := nearest_key(key):
        return f"the key here is '{near}'" if near == key_for(key) else f"did you mean '{near}'?"
    return None


def renamed_keys() -> dict[str, str]:
    """Return the keys of earlier versions with their names now."""
    return _aliases()["renamed"]


def advice_for(name: str) -> str | None:
    """Return what to do instead of another trainer's setting that no single key replaces."""
    answers, name = _aliases()["answers"], _normal(name)
    return answers.get(name) or answers.get(name.rpartition(".")[2])


def key_for(name: str) -> str | None:
    """Return the key that replaces another trainer's setting or a key of an earlier version."""
    name = _normal(name)
    return _names().get(name) or _names().get(name.rpartition(".")[2])


def nearest_key(key: str) -> str | None:
    """Return the key that an unknown one most likely means, by other trainers' names or by similarity."""
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


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


_LIMITS = {"exclusiveMinimum": ">", "minimum": ">=", "maximum": "<=", "exclusiveMaximum": "<"}
_TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}


def _type_words(node: dict[str, Any], unset: str) -> str:
    """Describe a JSON Schema node in words; `unset` replaces null."""
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
    """Return the definition that a schema node refers to: directly, in a union, or as the item of a list."""
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
    """Map other trainers' names to keys; the last part of a dotted name counts too, if it has a '_'."""
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


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration; `origin` is the file or option that gave the key."""

    key: str
    what: str
    todo: str
    origin: str = ""

    def __str__(self) -> str:
        origin = "" if self.origin == "default" else self.origin
        return f"{origin}: {self.key}: {self.what}; {self.todo}".removeprefix(": ")


class ConfigError(UserError):
    """Reports all problems of a configuration at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        several = f"{count} problems in the configuration\n  - " if count > 1 else ""
        super().__init__(several + "\n  - ".join(map(str, self.problems)))


def unknown_section(name: str, value: Any) -> list[Mapping[str, Any]]:
    """Return the errors of an unknown section: one per key if other trainers have one of the keys."""
    whole = {"type": "extra_forbidden", "loc": (name,), "msg": "", "input": value}
    if not isinstance(value, Mapping):
        return [whole]
    near = nearest(name, RunConfig.model_fields)
    section = section_of(RunConfig.model_fields[near].annotation) if near else None
    if section is not None and value.keys() <= section.model_fields.keys():
        return [whole]
    if not any(suggestion(f"{name}.{key}") for key in value):
        return [whole]
    return [{**whole, "loc": (name, key), "input": inner} for key, inner in value.items()]


def from_validation(errors: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """Turn pydantic's errors into one problem per key; a section has none if a key inside it has one."""
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for error in errors:
        by_key.setdefault(_key_of(error), []).append(error)
    inner = [k for k in by_key if not any(other.startswith((f"{k}.", f"{k}[")) for other in by_key)]
    return [_explain(key, by_key[key]) for key in inner]


def _key_of(error: Mapping[str, Any]) -> str:
    """Return the key of an error, without the branch of a union that pydantic adds."""
    if error["loc"][0] not in RunConfig.model_fields:
        return ".".join(map(str, error["loc"]))
    key, last = "", len(error["loc"]) - 1
    for place, part in enumerate(error["loc"]):
        if isinstance(part, int):
            key += f"[{part}]"
            continue
        candidate = f"{key}.{part}" if key else part
        unknown = error["type"] == "extra_forbidden" and place == last
        if unknown or field_at(RunConfig, candidate) is not None:
            key = candidate
    return key


def _explain(key: str, errors: Sequence[Mapping[str, Any]]) -> Problem:
    kinds = {error["type"]: error for error in errors}
    if "extra_forbidden" in kinds:
        if isinstance(kinds["extra_forbidden"]["input"], Mapping) and "." not in key:
            near = nearest(key, RunConfig.model_fields)
            return Problem(key, "unknown section", f"did you mean '{near}'?" if near else _all_keys_hint(key))
        if key in renamed_keys():
            return Problem(key, f"this key is now '{renamed_keys()[key]}'", "rename it")
        return Problem(key, "unknown key", suggestion(key) or _all_keys_hint(key))
    if "missing" in kinds:
        facts = facts_of(key)
        return Problem(key, "is missing", f"add it ({(facts.meaning if facts else key).rstrip('.')})")
    if "value_error" in kinds:
        what, _, todo = kinds["value_error"]["msg"].removeprefix("Value error, ").partition("; ")
        return Problem(key, what, todo or f"see `arriero config explain {key}`")
    field = field_at(RunConfig, key)
    unset = unset_value(field) if field else None
    words = [_wanted(error) for error in errors] + ([toml_value(unset)] if unset is not None else [])
    wanted = " or ".join(dict.fromkeys(words))
    if key in RunConfig.model_fields and (ours := key_for(key)):
        wanted = f"a table; this is '{ours}' here"
    given = toml_value(errors[0]["input"])
    given = given if len(given) <= _LONGEST_SHOWN else f"{given[:_LONGEST_SHOWN]}..."
    return Problem(key, f"{given} is not accepted", f"it should be {wanted}")


def _all_keys_hint(key: str) -> str:
    section = key.partition(".")[0]
    if section in RunConfig.model_fields:
        return f"`arriero config explain {section}` lists the keys of this section"
    return f"the sections are {', '.join(RunConfig.model_fields)}"


_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text in quotes",
    "a valid array": "a list",
    "an object": "a table",
    "a finite number": "finite",
    "False": "false",
}


def _wanted(error: Mapping[str, Any]) -> str:
    if error["type"] == "string_pattern_mismatch":
        return f"text that matches {error['ctx']['pattern']}"
    if error["type"] in ("too_short", "too_long"):
        limits = error["ctx"]
        if "min_length" in limits:
            return f"a list of at least {limits['min_length']}"
        return f"a list of at most {limits['max_length']}"
    words = error["msg"].removeprefix("Input should be ")
    return _WORDS.get(words, words)
