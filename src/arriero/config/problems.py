"""Turning what is wrong with a run file into sentences: where, which key, what is wrong, what to do."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arriero.config.schema import RunConfig
from arriero.config.toml import toml_value
from arriero.config.walk import all_keys, field_at
from arriero.errors import UserError, nearest


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


# What other trainers call our keys.
_CALLED_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "max_norm": "optim.clip",
    "grad_clip": "optim.clip",
    "batch_size": "train.batch",
    "gradient_accumulation_steps": "train.micro_batch",
    "steps": "train.horizon",
    "max_steps": "train.horizon",
    "num_steps": "train.horizon",
    "epochs": "train.horizon",
    "warmup_steps": "schedule.warmup",
    "hidden_size": "model.dim",
    "n_embd": "model.dim",
    "num_layers": "model.layers",
    "n_layer": "model.layers",
    "num_attention_heads": "model.heads",
    "n_heads": "model.heads",
    "intermediate_size": "model.ffn",
    "seq_length": "data.seq_len",
    "context_length": "data.seq_len",
    "dataset": "data.sources",
    "dtype": "precision.compute",
}


def nearest_key(key: str) -> str | None:
    """What a mistyped key likely means: a key of its section, another trainer's name, a key elsewhere."""
    keys = all_keys(RunConfig)
    section, _, word = re.sub(r"\[\d+\]", "", key).rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == section}
    if match := nearest(word, siblings):
        return siblings[match]
    if word in _CALLED_ELSEWHERE:
        return _CALLED_ELSEWHERE[word]
    elsewhere = {k.rpartition(".")[2]: k for k in keys if "." in k}
    match = nearest(word, elsewhere, cutoff=0.8)
    return elsewhere[match] if match else None


def from_validation(errors: Iterable[Mapping[str, Any]]) -> list[Problem]:
    """One problem per key; a section is not blamed for what is wrong with a key inside it."""
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for error in errors:
        by_key.setdefault(_key_of(error), []).append(error)
    inner = [k for k in by_key if not any(other.startswith((f"{k}.", f"{k}[")) for other in by_key)]
    return [_explain(key, by_key[key]) for key in inner]


def _key_of(error: Mapping[str, Any]) -> str:
    """The key an error is about; the branch of a union that was tried is not part of it."""
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
        close = nearest_key(key)
        todo = f"did you mean '{close}'?" if close else "`arriero config schema` lists all keys"
        return Problem(key, "unknown section" if "." not in key else "unknown key", todo)
    if "missing" in kinds:
        field = field_at(RunConfig, key)
        meaning = field.description if field and field.description else key
        return Problem(key, "is missing", f"add it ({meaning.rstrip('.')})")
    if "value_error" in kinds:
        what, _, todo = kinds["value_error"]["msg"].removeprefix("Value error, ").partition("; ")
        return Problem(key, what, todo or f"see `arriero config explain {key}`")
    wanted = " or ".join(dict.fromkeys(_wanted(error) for error in errors))
    return Problem(key, f"{toml_value(errors[0]['input'])} is not accepted", f"it should be {wanted}")


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
