"""Turning what is wrong with a run file into sentences: where, which key, what is wrong, what to do."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arriero.config.reference import alias_of, facts_of, renamed_keys, suggestion
from arriero.config.schema import RunConfig
from arriero.config.toml import toml_value
from arriero.config.walk import field_at, section_of, unset_value
from arriero.errors import UserError, nearest

_LONGEST_SHOWN = 100


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration; `origin` is the file or option that gave the key."""

    key: str
    what: str
    todo: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.origin}: {self.key}: {self.what}; {self.todo}".removeprefix(": ")


class ConfigError(UserError):
    """Reports all problems of a configuration at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        several = f"{count} problems in the configuration\n  - " if count > 1 else ""
        super().__init__(several + "\n  - ".join(map(str, self.problems)))


def unknown_section(name: str, value: Any) -> list[Mapping[str, Any]]:
    """The errors of a table that is no section: one per key, if any of them is known from elsewhere."""
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
    """One problem per key; a section is not blamed for what is wrong with a key inside it."""
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for error in errors:
        by_key.setdefault(_key_of(error), []).append(error)
    inner = [k for k in by_key if not any(other.startswith((f"{k}.", f"{k}[")) for other in by_key)]
    return [_explain(key, by_key[key]) for key in inner]


def _key_of(error: Mapping[str, Any]) -> str:
    """The key an error is about; the branch of a union that was tried is not part of it."""
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
    if key in RunConfig.model_fields and (ours := alias_of(key)):
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
