"""Records with several fields as text: prompt templates and chats, with the parts that the loss includes."""

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from arriero.errors import UserError

Span = tuple[int, int]
MESSAGES = "messages"
ASSISTANT = "assistant"


class BadRecord(ValueError):
    """A record that cannot become a document; the text says why."""


class MarkedText(str):
    """A document; the loss includes its characters in `included`.

    Special tokens that a `is_chat` text spells are special tokens; in other texts they stay text.
    """

    included: tuple[Span, ...]
    is_chat: bool

    @classmethod
    def of(cls, text: str, included: Sequence[Span], is_chat: bool = False) -> "MarkedText":
        made = cls(text)
        made.included, made.is_chat = tuple(included), is_chat
        return made

    def parts(self) -> Iterator[tuple[str, bool]]:
        """Yield the pieces of the text in order, each with whether the loss includes it."""
        at = 0
        for begin, end in self.included:
            if begin > at:
                yield self[at:begin], False
            yield self[begin:end], True
            at = end
        if at < len(self):
            yield self[at:], False


@dataclass(frozen=True)
class PromptTemplate:
    """A text with fields of a record in braces: "Question: {question}\\nAnswer: {answer}".

    The loss includes the last field and what follows it; what precedes it is the prompt.
    """

    template: str

    @cached_property
    def _parsed(self) -> list[tuple[str, str | None]]:
        try:
            found = [(text, name) for text, name, *_ in string.Formatter().parse(self.template)]
        except ValueError as error:
            raise UserError(f"the template {self.template!r} cannot be read ({error})", _FIELDS) from None
        if not any(name for _, name in found) or any(name == "" for _, name in found):
            raise UserError(f"the template {self.template!r} names no field", _FIELDS)
        return found

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, name in self._parsed if name))

    def text(self, record: Any) -> MarkedText:
        """Fill in a record; a record whose last field is empty gives an empty document."""
        last = max(i for i, (_, name) in enumerate(self._parsed) if name)
        made, begin, is_empty = "", 0, False
        for i, (text, name) in enumerate(self._parsed):
            made += text
            if name is None:
                continue
            value = _field(record, name)
            if i == last:
                begin, is_empty = len(made), not value
            made += value
        return MarkedText.of("" if is_empty else made, [] if is_empty else [(begin, len(made))])


_FIELDS = "write fields in braces, as in 'Question: {question} Answer: {answer}'; {{ is a brace"


def _field(record: Any, name: str) -> str:
    if not isinstance(record, Mapping):
        raise BadRecord("it is not an object")
    if name not in record:
        raise BadRecord(f"no field '{name}'; there are {', '.join(map(repr, record)) or 'none'}")
    if not isinstance(record[name], str):
        raise BadRecord(f"field '{name}' is not a string")
    return record[name]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template that turns messages into text, as in a tokenizer's `chat_template`.

    The loss includes the assistant's turns: what the template adds to a chat that ends where the assistant
    begins. `special` are the special tokens of the tokenizer, which the messages must not spell.
    """

    template: str
    bos: str = ""
    eos: str = ""
    special: tuple[str, ...] = ()
    column: str = MESSAGES

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def text(self, record: Any) -> MarkedText:
        if not isinstance(record, Mapping) or self.column not in record:
            raise BadRecord(f"no field '{self.column}' with the messages")
        messages = record[self.column]
        self._check(messages)
        if all(message["role"] != ASSISTANT for message in messages):
            raise BadRecord("no message has the role 'assistant'")
        included, made = [], self.render(messages)
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before = self.render(messages[:number], prompts=True)
                after = self.render(messages[: number + 1])
                if not (after.startswith(before) and made.startswith(after)):
                    raise BadRecord("the chat template changes earlier turns when a later one is added")
                included.append((len(before), len(after)))
        return MarkedText.of(made, included, is_chat=True)

    def prompt(self, messages: list[dict[str, str]]) -> str:
        """Return the text of a chat up to where the assistant's next turn begins, after a check."""
        self._check(messages)
        return self.render(messages, prompts=True)

    def render(self, messages: Sequence[Mapping[str, Any]], prompts: bool = False) -> str:
        """Return the text of a chat; with `prompts`, up to where the assistant's next turn begins."""
        from jinja2 import TemplateError

        settings = {"bos_token": self.bos, "eos_token": self.eos, "add_generation_prompt": prompts}
        try:
            return _compiled(self.template).render(messages=list(messages), **settings)
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise BadRecord(f"the chat template rejects it ({error})") from None

    def _check(self, messages: Any) -> None:
        if not isinstance(messages, list) or not messages:
            raise BadRecord(f"'{self.column}' is not a list of messages")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise BadRecord("a message has no 'role'")
            content = message.get("content")
            if not isinstance(content, str):
                raise BadRecord("a message has no 'content' that is a string")
            spelled = next((token for token in self.special if token in content), None)
            if spelled is not None:
                raise BadRecord(f"a message spells the special token {spelled}")


RecordFormat = PromptTemplate | ChatTemplate


@lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    """Compile a chat template as transformers does, in a sandbox and without access to the clock."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Accept `{% generation %}` around an assistant's turn; the turns are found without it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def fail(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=fail)
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template cannot be read ({error})", "correct the template") from None


def read_chat_template(
    tokenizer: Path, given: Path | None = None, special: Sequence[str] = ()
) -> ChatTemplate:
    """Return the chat template beside a tokenizer, or the one in a file, with the tokenizer's BOS and EOS."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    template = _text_of(given) if given is not None else _own_template(folder)
    if template is None:
        raise UserError(
            f"{folder} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json",
            "give one with --chat-template FILE",
        )
    _compiled(template)
    bos, eos = (declared_token(tokenizer, name) or "" for name in ("bos_token", "eos_token"))
    return ChatTemplate(template, bos, eos, tuple(special))


def json_beside(tokenizer: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file beside a tokenizer; an empty one if there is none or it is damaged."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        content = json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def declared_token(tokenizer: Path, name: str) -> str | None:
    """Return the `eos_token` or `bos_token` that `tokenizer_config.json` beside the tokenizer declares."""
    token = json_beside(tokenizer, "tokenizer_config.json").get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _own_template(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return _text_of(folder / "chat_template.jinja")
    found = json_beside(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", "give a Jinja template") from None
