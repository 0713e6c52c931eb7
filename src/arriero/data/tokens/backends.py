"""Encoders of many texts at once: the fastest one that agrees with `tokenizers` on the user's own text.

Texts become one flat array of ids and the number of ids of each. Special strings in a text stay text.
"""

import importlib.metadata
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers

from arriero.data.tokens.tokenizer import parsed

REFERENCE = "tokenizers"


class Encoded(NamedTuple):
    ids: np.ndarray
    lengths: np.ndarray


class Backend(Protocol):
    def encode(self, texts: Sequence[str]) -> Encoded: ...


class Choice(NamedTuple):
    used: str
    version: str
    tried: list[dict[str, str]]


class GigatokenBackend:
    def __init__(self, definition: str) -> None:
        import gigatoken

        self._inner = gigatoken.Tokenizer.from_json(_without_special_tokens(definition)).backend

    def encode(self, texts: Sequence[str]) -> Encoded:
        layout: Any = self._inner.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        return Encoded(np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets))


class FastokensBackend:
    def __init__(self, definition: str) -> None:
        import fastokens

        self._inner = fastokens.Tokenizer.from_json_str(_without_special_tokens(definition))

    def encode(self, texts: Sequence[str]) -> Encoded:
        ids, offsets = self._inner.encode_batch_flat(list(texts))
        return Encoded(np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<u8").astype(np.int64)))


class TokenizersBackend:
    def __init__(self, definition: str) -> None:
        self._inner = parsed(definition)

    def encode(self, texts: Sequence[str]) -> Encoded:
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        lengths = np.fromiter((len(each) for each in encodings), dtype=np.int64, count=len(encodings))
        ids = np.fromiter((i for each in encodings for i in each.ids), dtype=np.uint32, count=lengths.sum())
        return Encoded(ids, lengths)


CHAIN: dict[str, Callable[[str], Backend]] = {
    "gigatoken": GigatokenBackend,
    "fastokens": FastokensBackend,
    REFERENCE: TokenizersBackend,
}


def load_backend(name: str, definition: str) -> tuple[str, Backend]:
    """The backend chosen earlier; on a machine that lacks it the reference, whose ids are the same."""
    try:
        return name, _loaded(name, definition)
    except Exception:  # a native library may fail to load in any way
        return REFERENCE, _loaded(REFERENCE, definition)


@lru_cache(maxsize=1)
def _loaded(name: str, definition: str) -> Backend:
    return CHAIN[name](definition)


def choose_backend(definition: str, sample: Sequence[str], names: Sequence[str] = tuple(CHAIN)) -> Choice:
    """The first of `names` whose ids equal the reference's on `sample`; why each one before it was left."""
    texts = [*sample, *_probes(definition)]
    wanted = TokenizersBackend(definition).encode(texts)
    tried = []
    for name in names:
        if name == REFERENCE:
            break
        try:
            problem = _difference(_loaded(name, definition).encode(texts), wanted)
        except Exception as error:  # whatever a young library raises, the next one may work
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        tried.append({"name": name, "outcome": problem or "equal to tokenizers"})
        if not problem:
            return Choice(name, importlib.metadata.version(name), tried)
    return Choice(REFERENCE, tokenizers.__version__, tried)


def _difference(found: Encoded, wanted: Encoded) -> str:
    for number, (got, want) in enumerate(zip(_documents(found), _documents(wanted), strict=True)):
        if not np.array_equal(got, want):
            return f"document {number} of the check has other ids than tokenizers gives"
    return ""


def _documents(encoded: Encoded) -> list[np.ndarray]:
    return np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])


def _probes(definition: str) -> list[str]:
    """Texts that show whether special strings stay text and odd characters survive."""
    added = [token["content"] for token in json.loads(definition).get("added_tokens") or []][:16]
    spelled = [f"{name}a {name} {name}{name}" for name in added]
    return [
        *spelled,
        *added,
        " ",
        "\n\n \t",
        "a" * 5000,
        "é中🦙\u0000\ufeff\u200b e\u0301 ﬁ",
        "1234567 don't",
    ]


def _without_special_tokens(definition: str) -> str:
    document = json.loads(definition)
    document["added_tokens"] = [token for token in document.get("added_tokens") or [] if not token["special"]]
    document |= {"post_processor": None, "truncation": None, "padding": None}
    return json.dumps(document, ensure_ascii=False)
