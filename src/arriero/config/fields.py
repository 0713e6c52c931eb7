"""Field types of the run file that know how to read what people write."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from arriero.units import Span, parse_span


def _read_span(value: Any) -> Span:
    if isinstance(value, Span):
        return value
    if isinstance(value, str):
        return parse_span(value)
    raise ValueError(f"{value!r} has no unit; write it like '4M tok', '500 steps' or '2h'")


def _only(units: tuple[str, ...], example: str):
    def check(span: Span) -> Span:
        if span.unit not in units:
            raise ValueError(f"'{span}' has the wrong unit here; write it like {example}")
        if span.amount < 1:
            raise ValueError(f"'{span}' must be more than nothing; write it like {example}")
        return span

    return check


def _span_type(units: tuple[str, ...], example: str, meaning: str) -> Any:
    check = _only(units, example)
    return Annotated[
        Span,
        BeforeValidator(lambda value: check(_read_span(value))),
        PlainSerializer(str),
        WithJsonSchema(
            {"type": "string", "description": meaning, "examples": re.findall(r"'([^']+)'", example)}
        ),
    ]


AnySpan = _span_type(("tok", "steps", "s"), "'4M tok', '500 steps' or '2h'", "tokens, steps or wall time")
Progress = _span_type(("tok", "steps"), "'4M tok' or '500 steps'", "tokens or steps")
Tokens = _span_type(("tok",), "'4M tok'", "tokens")
