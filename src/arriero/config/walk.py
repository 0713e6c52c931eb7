"""Walking the sections and keys of the run file's schema."""

import re
import typing
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every section and key, dotted, in the order they are declared."""
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
    """The section a field holds: directly, as an optional, or as a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        if section := section_of(argument):
            return section
    return None


def unset_value(field: FieldInfo) -> Literal["auto", False] | None:
    """The value that leaves an optional key unset: "auto", or false where the value is free text."""
    if field.is_required() or field.get_default() is not None or field.default_factory is not None:
        return None
    return False if str in typing.get_args(field.annotation) else "auto"


def without_unset(section: type[BaseModel], table: Any) -> Any:
    """The table without keys that are given their unset value."""
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
