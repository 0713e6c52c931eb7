"""Field types of the run file that know how to read what people write."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from arriero.config.remat import Remat, parse_remat
from arriero.units import Span, parse_span


def _write(value: Any) -> Any:
    return str(value) if isinstance(value, Span | Remat) else value


Zero = Literal["refused", "off", "allowed"]


def _span_type(units: tuple[str, ...], example: str, meaning: str, zero: Zero = "refused") -> Any:
    """A quantity; `zero` says whether 0 and false are refused, both mean false, or both mean 0."""

    def read(value: Any) -> Span | Literal[False]:
        if value is False and zero != "refused":
            return False if zero == "off" else Span(0, "steps")
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
        if span.amount < 1 and zero == "refused":
            raise ValueError(f"'{value}' must be more than zero; write it like {example}")
        return False if span.amount < 1 and zero == "off" else span

    text = {"type": "string", "$comment": meaning, "examples": re.findall(r"'([^']+)'", example)}
    schema = text if zero == "refused" else {"anyOf": [text, {"const": False}]}
    kind = Span | Literal[False] if zero == "off" else Span
    return Annotated[kind, BeforeValidator(read), PlainSerializer(_write), WithJsonSchema(schema)]


_ANY = (("tok", "steps", "s"), "'4M tok', '500 steps' or '2h'", "tokens, steps or wall time")
_PROGRESS = (("tok", "steps"), "'4M tok' or '500 steps'", "tokens or steps")
_TOKENS = (("tok",), "'4M tok'", "tokens")
AnySpan, AnySpanOrOff = _span_type(*_ANY), _span_type(*_ANY, zero="off")
Progress, ProgressOrOff = _span_type(*_PROGRESS), _span_type(*_PROGRESS, zero="off")
ProgressOrZero = _span_type(*_PROGRESS, zero="allowed")
Tokens, TokensOrOff = _span_type(*_TOKENS), _span_type(*_TOKENS, zero="off")


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
