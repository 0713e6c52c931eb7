"""Field types of the run file that know how to read what people write."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from arriero.config.remat import Remat, parse_remat
from arriero.units import Span, parse_span


def _write(value: Any) -> Any:
    return str(value) if isinstance(value, Span | Remat) else value


def _span_type(units: tuple[str, ...], example: str, meaning: str) -> Any:
    def read(value: Any) -> Span:
        if isinstance(value, Span):
            return value
        if not isinstance(value, str):
            raise ValueError(f"{value!r} has no unit; write it like {example}")
        try:
            span = parse_span(value)
        except ValueError as error:
            raise ValueError(f"{error}; write it like {example}") from None
        if span.unit not in units:
            raise ValueError(f"'{value}' has the wrong unit here; write it like {example}")
        if span.amount < 1:
            raise ValueError(f"'{value}' must be more than nothing; write it like {example}")
        return span

    schema = {"type": "string", "description": meaning, "examples": re.findall(r"'([^']+)'", example)}
    return Annotated[Span, BeforeValidator(read), PlainSerializer(_write), WithJsonSchema(schema)]


AnySpan = _span_type(("tok", "steps", "s"), "'4M tok', '500 steps' or '2h'", "tokens, steps or wall time")
Progress = _span_type(("tok", "steps"), "'4M tok' or '500 steps'", "tokens or steps")
Tokens = _span_type(("tok",), "'4M tok'", "tokens")


def _read_remat(value: Any) -> Remat:
    return value if isinstance(value, Remat) else parse_remat(str(value))


RematKind = Annotated[
    Remat,
    BeforeValidator(_read_remat),
    PlainSerializer(_write),
    WithJsonSchema(
        {"type": "string", "examples": ["none", "full", "selective", "attention", "every:2", "fraction:1/3"]}
    ),
]
