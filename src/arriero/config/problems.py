"""Turning what is wrong with a run file into sentences: where, which key, what is wrong, what to do."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from arriero.config.schema import RunConfig
from arriero.config.walk import all_keys, field_at
from arriero.errors import UserError


@dataclass(frozen=True)
class Problem:
    key: str
    what: str
    todo: str


class ConfigError(UserError):
    """Every problem of a run file at once."""

    def __init__(self, problems: Iterable[tuple[str, Problem]]) -> None:
        self.problems = tuple(problems)
        lines = [f"{where}: {p.key}: {p.what}; {p.todo}" for where, p in self.problems]
        several = f"{len(lines)} problems in the configuration\n  - " if len(lines) > 1 else ""
        super().__init__(several + "\n  - ".join(lines))


def nearest(word: str, choices: Iterable[str]) -> str | None:
    match = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return match[0] if match else None


def nearest_key(key: str) -> str | None:
    """What a mistyped key most likely means: a key of its own section, else any by its last word."""
    keys = all_keys(RunConfig)
    section, _, word = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == section}
    if match := nearest(word, siblings):
        return siblings[match]
    elsewhere = {k.rpartition(".")[2]: k for k in keys if "." in k}
    if match := nearest(word, elsewhere):
        return elsewhere[match]
    return nearest(key, keys)


def from_validation(errors: Iterable[Mapping[str, Any]]) -> list[Problem]:
    found: dict[str, Problem] = {}
    for error in errors:
        key = _key_of(error)
        found.setdefault(key, _explain(key, error))
    return [p for k, p in found.items() if not any(other.startswith((f"{k}.", f"{k}[")) for other in found)]


def _key_of(error: Mapping[str, Any]) -> str:
    """The key an error is about; the branch of a union that pydantic tried is not part of it."""
    key = ""
    for part in error["loc"]:
        if isinstance(part, int):
            key += f"[{part}]"
            continue
        candidate = f"{key}.{part}" if key else part
        if error["type"] != "extra_forbidden" and field_at(RunConfig, candidate) is None:
            break
        key = candidate
    return key


def _explain(key: str, error: Mapping[str, Any]) -> Problem:
    kind, value = error["type"], error.get("input")
    if kind == "extra_forbidden":
        close = nearest_key(key)
        todo = f"did you mean '{close}'?" if close else "`arriero config schema` lists all keys"
        return Problem(key, "unknown section" if "." not in key else "unknown key", todo)
    field = field_at(RunConfig, key)
    meaning = (field.description or "").rstrip(".") if field else ""
    if kind == "missing":
        return Problem(key, "is missing", f"add it ({meaning})" if meaning else "add it")
    if kind == "value_error":
        what, _, todo = error["msg"].removeprefix("Value error, ").partition("; ")
        return Problem(key, what, todo or f"see `arriero config explain {key}`")
    expected = error["msg"].removeprefix("Input should be ")
    return Problem(key, f"{value!r} is not accepted", f"it should be {expected}")
