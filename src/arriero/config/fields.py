"""Value types of the run file, such as quantities of training, and how values are written as TOML."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Literal, cast

import tomlkit
from pydantic import BaseModel, BeforeValidator, PlainSerializer, WithJsonSchema
from tomlkit.items import Item

from arriero.units import Span, parse_span

Kind = Literal["auto", "none", "full", "selective", "attention", "every", "fraction", "budget"]

_AMOUNT = re.compile(r"-?\d{1,9}/\d{1,9}|-?\d{0,9}\.?\d{1,9}")
_WORDS = ("auto", "none", "full", "selective", "attention")
_EXAMPLES = ("auto", "none", "full", "selective", "attention", "every:2", "fraction:1/3", "budget:0.5")


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which activations are recomputed in the backward pass instead of kept.

    `amount` is the K of every:K, the P of fraction:P and the B of budget:B, and 1 for the other kinds.
    """

    kind: Kind = "none"
    amount: Fraction = Fraction(1)

    def __str__(self) -> str:
        if self.kind in _WORDS:
            return self.kind
        return f"{self.kind}:{float(self.amount) if self.kind == 'budget' else self.amount}"

    @classmethod
    def parse(cls, text: str) -> "ActivationCheckpointing":
        """Read a value of memory.activation_checkpointing."""
        kind, colon, written = text.strip().partition(":")
        if kind in _WORDS and not colon:
            return cls(cast(Kind, kind))
        if kind not in ("every", "fraction", "budget"):
            examples = ", ".join(f"'{word}'" for word in _EXAMPLES)
            raise ValueError(f"'{text}' is not a kind of activation checkpointing; write it like {examples}")
        amount = _amount(written.strip())
        if kind == "every" and (amount is None or amount < 1 or amount.denominator != 1):
            raise ValueError(f"'{text}' does not say every how many blocks; write it like 'every:2'")
        if kind == "budget" and (amount is None or not 0 <= amount <= 1):
            raise ValueError(f"'{text}' is no share of memory between 0 and 1; write it like 'budget:0.5'")
        if amount is None:
            raise ValueError(
                f"'{text}' is no share of the blocks; write it like 'fraction:1/3' or 'fraction:0.4'"
            )
        return cls(cast(Kind, kind), amount)

    @property
    def is_selective(self) -> bool:
        """Whether a part of a block's activations is kept, instead of all or none."""
        return self.kind in ("selective", "attention")

    def blocks(self, layers: int) -> frozenset[int]:
        """Return the blocks that are recomputed, wholly or in part, numbered over the whole model."""
        match self.kind:
            case "full" | "selective" | "attention":
                return frozenset(range(layers))
            case "every":
                return frozenset(range(int(self.amount) - 1, layers, int(self.amount)))
            case "fraction":
                return evenly(self.amount, layers)
            case "none" | "budget":
                return frozenset()
            case "auto":
                raise ValueError("'auto' must be resolved first")


@cache
def evenly(share: Fraction, layers: int) -> frozenset[int]:
    """Return a share of the blocks, evenly spread and centred.

    Block i of 1..layers is included when i * share reaches 1/2, 3/2, 5/2, ...
    """
    included, next_at = set(), Fraction(1, 2)
    for block in range(layers):
        if (block + 1) * share >= next_at:
            included.add(block)
            next_at += 1
    return frozenset(included)


def _amount(text: str) -> Fraction | None:
    if not _AMOUNT.fullmatch(text):
        return None
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None


def _write(value: Any) -> Any:
    return str(value) if isinstance(value, Span | ActivationCheckpointing) else value


Zero = Literal["rejected", "off", "allowed"]


def _span_type(units: tuple[str, ...], example: str, meaning: str, zero: Zero = "rejected") -> Any:
    """Make the type of a quantity; `zero` says whether 0 and false are rejected, both off, or both 0."""

    def read(value: Any) -> Span | Literal[False]:
        if value is False and zero != "rejected":
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
        if span.amount < 1 and zero == "rejected":
            raise ValueError(f"'{value}' must be more than zero; write it like {example}")
        return False if span.amount < 1 and zero == "off" else span

    text = {"type": "string", "$comment": meaning, "examples": re.findall(r"'([^']+)'", example)}
    schema = text if zero == "rejected" else {"anyOf": [text, {"const": False}]}
    kind = Span | Literal[False] if zero == "off" else Span
    return Annotated[kind, BeforeValidator(read), PlainSerializer(_write), WithJsonSchema(schema)]


_ANY = (("tok", "steps", "s"), "'4M tok', '500 steps' or '2h'", "tokens, steps or wall time")
_PROGRESS = (("tok", "steps"), "'4M tok' or '500 steps'", "tokens or steps")
_TOKENS = (("tok",), "'4M tok'", "tokens")
AnySpan, AnySpanOrOff = _span_type(*_ANY), _span_type(*_ANY, zero="off")
Progress, ProgressOrOff = _span_type(*_PROGRESS), _span_type(*_PROGRESS, zero="off")
ProgressOrZero = _span_type(*_PROGRESS, zero="allowed")
Tokens, TokensOrOff = _span_type(*_TOKENS), _span_type(*_TOKENS, zero="off")
WallTime = _span_type(("s",), "'10min' or '2h'", "wall time")


def _read_checkpointing(value: Any) -> ActivationCheckpointing:
    return value if isinstance(value, ActivationCheckpointing) else ActivationCheckpointing.parse(str(value))


CheckpointingField = Annotated[
    ActivationCheckpointing,
    BeforeValidator(_read_checkpointing),
    PlainSerializer(_write),
    WithJsonSchema({"type": "string", "examples": list(_EXAMPLES)}),
]


def to_toml(config: BaseModel, comment: Callable[[str], str | None] = lambda _: None) -> str:
    """Write a config as TOML without the keys that have no value; `comment` may add a remark to a key."""
    document = tomlkit.document()
    for section, values in config.model_dump(mode="json", exclude_none=True).items():
        table = tomlkit.table()
        for name, value in values.items():
            item = _toml_item(value)
            if remark := comment(f"{section}.{name}"):
                # remarks begin in the same column
                item.comment(remark).trivia.comment_ws = " " * max(1, 37 - len(f"{name}{item.as_string()}"))
            table.add(name, item)
        document.add(section, table)
    return tomlkit.dumps(document)


def toml_value(value: Any) -> str:
    """Write one value as TOML; "nothing" for None."""
    return "nothing" if value is None else _toml_item(value).as_string()


def _toml_item(value: Any) -> Item:
    """Return a TOML item in which tables and lists are inline."""
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update({name: _toml_item(each) for name, each in value.items() if each is not None})
        return table
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend([_toml_item(each) for each in value])
        return array
    return tomlkit.item(value)
