"""Prompts to token ids and generated ids back to text, with the tokenizer of a stored model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from arriero.data.text.formats import BadRecord, declared_token, json_beside, read_chat_template
from arriero.data.tokens.marked import chat_tokenizer, special_tokens
from arriero.data.tokens.tokenizer import (
    ENDS_OF_TURNS,
    KNOWN_BEGINNINGS,
    added_by_template,
    first_token,
    parsed,
    read_definition,
    usual_end,
)
from arriero.errors import UserError

_INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class PromptTokenizer:
    """`bos_id` begins a prompt unless it is None or the tokenizer adds it; `eos_ids` end a text."""

    inner: tokenizers.Tokenizer
    path: Path
    bos_id: int | None
    adds_special_tokens: bool
    eos_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text at the beginning of a document; special tokens in it stay text."""
        ids = self.inner.encode(text, add_special_tokens=self.adds_special_tokens).ids
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def chat(self, text: str, system: str | None = None, template_file: Path | None = None) -> list[int]:
        """Return the ids of a user's turn, up to where the assistant's begins, by the chat template."""
        definition = read_definition(self.path)
        template = read_chat_template(self.path, template_file, special=special_tokens(definition))
        messages = [{"role": "system", "content": system}] if system is not None else []
        try:
            whole = template.prompt([*messages, {"role": "user", "content": text}])
        except BadRecord as error:
            raise UserError(f"the prompt is not a chat: {error}", "change the prompt") from None
        return chat_tokenizer(definition).encode(whole, add_special_tokens=False).ids

    @property
    def ends_of_turns(self) -> frozenset[int]:
        """Return the ids of tokens that end a turn of a chat."""
        found = (self.inner.token_to_id(name) for name in ENDS_OF_TURNS)
        return frozenset(each for each in found if each is not None)

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int]) -> "TextStream":
        return TextStream(self, prompt)


class TextStream:
    """Turns ids into text one at a time; characters of several tokens come with the last of them.

    The text before an id decides on spaces, so each piece is what an id adds to the text of those before it.
    """

    def __init__(self, tokenizer: PromptTokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._begin, self._shown = 0, len(self._ids)

    def add(self, token: int) -> str:
        self._ids.append(token)
        text = self._new_text()
        if text.endswith(_INCOMPLETE):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return text

    def finish(self) -> str:
        """Return what is left of a character that was never completed."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[self._begin : self._shown])
        return self._tokenizer.decode(self._ids[self._begin :])[len(before) :]


def prompt_tokenizer(path: Path, tokens: Mapping[str, Any]) -> PromptTokenizer:
    """Load the tokenizer of a model.

    `tokens` are the model's token ids under Hugging Face's names, and `add_bos_token` if it is known whether
    training texts began with the BOS. Else the tokenizer decides, as in transformers; Meta's adds the BOS.
    """
    definition = read_definition(path)
    inner = parsed(definition)
    adds, bos_id = False, None
    if tokens.get("add_bos_token"):
        bos_id = _id(tokens.get("bos_token_id"))
    elif "add_bos_token" not in tokens:
        adds = bool(added_by_template(definition))
        # Meta's code adds the BOS to every text
        is_meta = path.suffix == ".model"
        if not adds and (is_meta or json_beside(path, "tokenizer_config.json").get("add_bos_token")):
            bos = first_token(inner, (declared_token(path, "bos_token") or "", *KNOWN_BEGINNINGS))
            bos_id = bos.id if bos else None
    eos_ids = _ids(tokens) | _ids(json_beside(path, "generation_config.json"))
    if not eos_ids and (end := usual_end(definition, path)) is not None:
        eos_ids = {end.id}
    return PromptTokenizer(inner, path, bos_id, adds, frozenset(eos_ids))


def find_tokenizer(files: Mapping[str, Path], given: Path | None, where: str) -> Path:
    """Return the tokenizer file that was given, or that of a stored model."""
    if given is not None:
        return given
    for name in ("tokenizer.json", "tokenizer.model"):
        if name in files:
            return files[name]
    raise UserError(f"{where} has no tokenizer", "give a tokenizer.json or tokenizer.model with --tokenizer")


def _id(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _ids(config: Mapping[str, Any]) -> set[int]:
    """Return the EOS ids of a config, which has one or a list of them."""
    found = config.get("eos_token_id")
    return {each for each in (found if isinstance(found, list) else [found]) if _id(each) is not None}
