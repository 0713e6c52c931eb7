"""Value types of the run file, such as quantities of training, and how values are written as TOML."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Literal, cast

import tomlkit
from pydantic import BaseModel, BeforeValidator, PlainSerializer, WithJsonSchema
from tomlkit.items import Item

from arriero.units import Span, parse_span

BlockMode = Literal["none", "full", "selective", "attention"]
Kind = Literal[BlockMode, "auto", "every", "fraction", "budget"]

_AMOUNT = re.compile(r"-?\d{1,9}/\d{1,9}|-?\d{0,9}\.?\d{1,9}")
_MODES: tuple[BlockMode, ...] = ("none", "full", "selective", "attention")
_EXAMPLES = ("auto", *_MODES, "every:2", "fraction:1/3", "attention:1/4+selective", "budget:0.5")


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which activations are recomputed in the backward pass instead of kept.

    `amount` is the K of every:K, the P of fraction:P and the B of budget:B, and 1 for the other kinds. A
    fraction of the blocks has the mode `mode`, the others have the mode `rest`.
    """

    kind: Kind = "none"
    amount: Fraction = Fraction(1)
    mode: BlockMode = "full"
    rest: BlockMode = "none"

    def __hash__(self) -> int:
        # a Fraction's own hash is slow, and the planner looks settings up in caches
        return hash((self.kind, self.amount.numerator, self.amount.denominator, self.mode, self.rest))

    def __str__(self) -> str:
        if self.kind == "budget":
            return f"budget:{float(self.amount)}"
        if self.kind == "fraction" and (self.mode, self.rest) != ("full", "none"):
            return f"{self.mode}:{self.amount}" + (f"+{self.rest}" if self.rest != "none" else "")
        return f"{self.kind}:{self.amount}" if self.kind in ("every", "fraction") else self.kind

    @classmethod
    def parse(cls, text: str) -> "ActivationCheckpointing":
        """Read a value of memory.activation_checkpointing."""
        kind, colon, written = text.strip().partition(":")
        if kind in ("auto", *_MODES) and not colon:
            return cls(cast(Kind, kind))
        if kind not in ("every", "fraction", "budget", *_MODES[1:]):
            examples = ", ".join(f"'{word}'" for word in _EXAMPLES)
            raise ValueError(f"'{text}' is not a kind of activation checkpointing; write it like {examples}")
        written, plus, rest = written.partition("+")
        amount, rest = _amount(written.strip()), rest.strip()
        if kind == "every" and (plus or amount is None or amount < 1 or amount.denominator != 1):
            raise ValueError(f"'{text}' does not say every how many blocks; write it like 'every:2'")
        if kind == "budget" and (plus or amount is None or not 0 <= amount <= 1):
            raise ValueError(f"'{text}' is no share of memory between 0 and 1; write it like 'budget:0.5'")
        if kind in ("every", "budget"):
            return cls(cast(Kind, kind), amount or Fraction(0))
        mode, example = "full" if kind == "fraction" else kind, "write it like 'attention:1/4+selective'"
        if amount is None or ((kind in _MODES or plus) and not 0 <= amount <= 1):
            raise ValueError(f"'{text}' is no share of the blocks; {example} or 'fraction:1/3'")
        if plus and (rest not in _MODES or rest == mode):
            raise ValueError(f"'{text}' does not name another mode for the other blocks; {example}")
        return cls("fraction", amount, cast(BlockMode, mode), cast(BlockMode, rest or "none"))

    @property
    def is_selective(self) -> bool:
        """Whether some blocks keep a part of their activations, instead of all or none."""
        modes = (self.mode, self.rest) if self.kind == "fraction" else (self.kind,)
        return "selective" in modes or "attention" in modes

    def modes(self, layers: int) -> tuple[BlockMode, ...]:
        """Return what each block of the whole model recomputes."""
        return _modes(self, layers)

    def shares(self, layers: int) -> dict[BlockMode, float]:
        """Return the share of the blocks that has each mode."""
        return {mode: count / layers for mode, count in Counter(self.modes(layers)).items()}

    def blocks(self, layers: int) -> frozenset[int]:
        """Return the blocks that are recomputed, wholly or in part, numbered over the whole model."""
        return frozenset(i for i, mode in enumerate(self.modes(layers)) if mode != "none")


@cache
def _modes(checkpointing: ActivationCheckpointing, layers: int) -> tuple[BlockMode, ...]:
    match checkpointing.kind:
        case "none" | "full" | "selective" | "attention" as mode:
            return (mode,) * layers
        case "every":
            step = int(checkpointing.amount)
            return tuple("full" if (i + 1) % step == 0 else "none" for i in range(layers))
        case "fraction":
            chosen = evenly(checkpointing.amount, layers)
            return tuple(checkpointing.mode if i in chosen else checkpointing.rest for i in range(layers))
        case "budget":
            return ("none",) * layers
        case _:
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


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their keys, like "train.batch"."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
