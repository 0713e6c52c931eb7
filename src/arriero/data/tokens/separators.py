"""What stands before and after each document: explicit, recorded, and never twice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from arriero.data.store.store import TokenStore
from arriero.data.tokens.backends import Encoded
from arriero.data.tokens.tokenizer import (
    ENDS_OF_TURNS,
    KNOWN_BEGINNINGS,
    KNOWN_ENDS,
    declared_token,
    parsed,
    read_definition,
)
from arriero.errors import UserError

MANY = 0.5
_LOOKED_AT = 64


class Mark(NamedTuple):
    token: str
    id: int


class Separators(NamedTuple):
    bos: Mark | None
    eos: Mark | None

    def about(self) -> dict[str, Any]:
        return {name: mark and mark._asdict() for name, mark in self._asdict().items()}

    def token_ids(self) -> dict[str, Any]:
        """Token ids under Hugging Face's names. `add_bos_token`: whether documents begin with the BOS."""
        named = {"bos_token_id": self.bos, "eos_token_id": self.eos}
        ids = {name: mark.id for name, mark in named.items() if mark is not None}
        return ids | {"add_bos_token": self.bos is not None}

    def __str__(self) -> str:
        return " and ".join(mark.token if mark else "nothing" for mark in self)

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """A text as it stands at the beginning of a document."""
        return [self.bos.id, *ids] if self.bos else list(ids)

    def around(self, encoded: Encoded) -> Encoded:
        """The ids with the marks around each document."""
        extra = sum(mark is not None for mark in self)
        if not extra:
            return encoded
        lengths = encoded.lengths + extra
        ends = np.cumsum(lengths)
        ids = np.empty(ends[-1] if len(ends) else 0, dtype=encoded.ids.dtype)
        text = np.ones(len(ids), dtype=bool)
        for mark, places in ((self.bos, ends - lengths), (self.eos, ends - 1)):
            if mark is not None:
                ids[places] = mark.id
                text[places] = False
        ids[text] = encoded.ids
        return Encoded(ids, lengths)

    def spelled_out(self, texts: Sequence[str]) -> dict[str, int]:
        """How many texts begin and end with the marks' own spelling."""
        bos, eos = self.bos, self.eos
        return {
            "bos": sum(text.lstrip().startswith(bos.token) for text in texts) if bos else 0,
            "eos": sum(text.rstrip().endswith(eos.token) for text in texts) if eos else 0,
        }

    def refuse_doubled(self, encoded: Encoded) -> None:
        """The ids of a document must not already carry the mark that is about to be added."""
        full = encoded.lengths > 0
        ends = np.cumsum(encoded.lengths)[full]
        starts = ends - encoded.lengths[full]
        for mark, places, word in ((self.bos, starts, "begin"), (self.eos, ends - 1, "end")):
            if mark is not None and (encoded.ids[places] == mark.id).any():
                raise UserError(
                    f"documents already {word} with {mark.token} (id {mark.id}) after encoding",
                    f"it would stand there twice; pass --{'bos' if word == 'begin' else 'eos'} none",
                )


def choose_separators(definition: str, bos: str, eos: str, path: Path | None = None) -> Separators:
    """Each is 'none', 'auto' (the tokenizer's usual one) or the token itself. `path` is the tokenizer's."""
    inner = parsed(definition)
    return Separators(
        _mark(inner, bos, _beginnings(path), "--bos", "begins"),
        _mark(inner, eos, _ends(path), "--eos", "ends"),
    )


def separators_of(store: TokenStore) -> Separators:
    """What stands around each document of a dataset: as `prepare` recorded it, else as the tokens show."""
    recorded = store.about.get("separators")
    if recorded is not None:
        return Separators(*(recorded[name] and Mark(**recorded[name]) for name in ("bos", "eos")))
    inner = parsed(read_definition(store.tokenizer_path))
    unended = store.documents and store.about.get("documents_without_eos") == store.documents
    eos = None if unended else Mark(inner.id_to_token(store.eos_id) or "", store.eos_id)
    return Separators(_common_beginning(store, inner), eos)


def _common_beginning(store: TokenStore, inner: tokenizers.Tokenizer) -> Mark | None:
    """The special token that the first documents begin with, if all of them do."""
    starts = store.document_starts(0, min(store.tokens, 2**20))[:_LOOKED_AT]
    first = {int(store.read(int(start), 1)[0]) for start in starts}
    if len(first) != 1:
        return None
    number = first.pop()
    token = inner.get_added_tokens_decoder().get(number)
    return Mark(token.content, number) if token is not None and token.special else None


def usual_end(definition: str, path: Path | None = None) -> Mark | None:
    inner = parsed(definition)
    return next(
        (Mark(name, found) for name in _ends(path) if (found := inner.token_to_id(name)) is not None), None
    )


def _beginnings(path: Path | None) -> tuple[str, ...]:
    declared = declared_token(path, "bos_token") if path else None
    return (declared, *KNOWN_BEGINNINGS) if declared else KNOWN_BEGINNINGS


def _ends(path: Path | None) -> tuple[str, ...]:
    """Best first: the declared one, unless it ends turns of a chat and the tokenizer has an end of text."""
    declared = declared_token(path, "eos_token") if path else None
    if not declared:
        return KNOWN_ENDS
    return (*KNOWN_ENDS, declared) if declared in ENDS_OF_TURNS else (declared, *KNOWN_ENDS)


def _mark(
    inner: tokenizers.Tokenizer, wanted: str, known: Sequence[str], option: str, does: str
) -> Mark | None:
    if wanted == "none":
        return None
    names = known if wanted == "auto" else (wanted,)
    for name in names:
        if (found := inner.token_to_id(name)) is not None:
            return Mark(name, found)
    raise UserError(
        f"the tokenizer has no token {' or '.join(names)}",
        f"name the token that {does} a document with {option} TOKEN, or pass {option} none",
    )


def refuse_spelled_out(separators: Separators, texts: Sequence[str]) -> None:
    """Texts that spell the end token at their own end: the sign of a corpus that was already separated."""
    if separators.eos is None or not texts:
        return
    spelled = separators.spelled_out(texts)["eos"]
    if spelled >= MANY * len(texts):
        raise UserError(
            f"{spelled} of the first {len(texts)} documents end with the text {separators.eos.token}, "
            "and prepare adds that token after each document",
            "take it out of the text, or pass --literal-eos to keep it there as plain text",
        )
