"""Walking the sections and keys of the run file's schema."""

import re
import types
import typing
from typing import Annotated, Any

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


def type_name(annotation: Any) -> str:
    """How a person would name the type of a key."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return " or ".join(
            dict.fromkeys(type_name(type(a)) if a is not False else "false" for a in arguments)
        )
    if origin in (typing.Union, types.UnionType):
        return " or ".join("nothing" if a is type(None) else type_name(a) for a in arguments)
    if origin is tuple:
        return "list of " + ", ".join(type_name(a) for a in arguments if a is not ...)
    if section_of(annotation):
        return "table"
    names = {
        "int": "integer",
        "float": "number",
        "str": "text",
        "bool": "true or false",
        "Span": "quantity",
        "Remat": "text",
    }
    return names.get(annotation.__name__, annotation.__name__)
