"""Batch encoders: the fastest installed one that gives the same ids as `tokenizers` on the user's text.

gigatoken and fastokens are optional (extra `fast`). Texts become one flat array of ids and the number of ids
of each. Special tokens spelled out in a text stay plain text.
"""

import importlib.metadata
import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers

from arriero.data.tokens.tokenizer import Encoded, parsed
from arriero.errors import UserError

REFERENCE = "tokenizers"
CHECKED_CHARS = 150_000  # `tokenizers` needs about a second for 3 MB
LONG_CHARS = 2048
FEW_CHARS = 2**16


class Encoder(Protocol):
    def encode(self, texts: Sequence[str]) -> Encoded: ...


class EncoderChoice(NamedTuple):
    """The encoder used, its version, and the outcome for each encoder that was tried."""

    used: str
    version: str
    tried: list[dict[str, str]]

    @property
    def lacks_fast(self) -> bool:
        """Whether `tokenizers` is used only because no faster encoder is installed."""
        return bool(self.tried) and all(each["outcome"] == NOT_INSTALLED for each in self.tried)


class GigatokenEncoder:
    def __init__(self, definition: str) -> None:
        import gigatoken

        self._inner = gigatoken.Tokenizer.from_json(_without_special_tokens(definition)).backend

    def encode(self, texts: Sequence[str]) -> Encoded:
        chars = sum(map(len, texts))
        if texts and (chars < FEW_CHARS or chars >= LONG_CHARS * len(texts)):
            # one call per text is as fast for long texts and avoids the import of awkward
            return _joined([self._inner.encode(text) for text in texts])
        layout: Any = self._inner.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        return Encoded(np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets))


class FastokensEncoder:
    def __init__(self, definition: str) -> None:
        import fastokens

        self._inner = fastokens.Tokenizer.from_json_str(_without_special_tokens(definition))

    def encode(self, texts: Sequence[str]) -> Encoded:
        ids, offsets = self._inner.encode_batch_flat(list(texts))
        return Encoded(np.frombuffer(ids, "<u4"), np.diff(np.frombuffer(offsets, "<u8").astype(np.int64)))


class TokenizersEncoder:
    def __init__(self, definition: str) -> None:
        self._inner = parsed(definition)

    def encode(self, texts: Sequence[str]) -> Encoded:
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return _joined([np.array(each.ids, dtype=np.uint32) for each in encodings])


def _joined(documents: list[np.ndarray]) -> Encoded:
    lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
    return Encoded(np.concatenate(documents) if documents else np.empty(0, np.uint32), lengths)


AUTO = "auto"
NOT_INSTALLED = "not installed"
CHAIN: dict[str, Callable[[str], Encoder]] = {
    "gigatoken": GigatokenEncoder,
    "fastokens": FastokensEncoder,
    REFERENCE: TokenizersEncoder,
}


def load_encoder(name: str, definition: str) -> tuple[str, Encoder]:
    """Load an encoder; where it is not installed, the reference, whose ids are the same."""
    try:
        return name, cached_encoder(name, definition)
    except Exception:  # a native library may fail to load in any way
        return REFERENCE, cached_encoder(REFERENCE, definition)


@lru_cache(maxsize=2)
def cached_encoder(name: str, definition: str) -> Encoder:
    return CHAIN[name](definition)


def choose_encoder(definition: str, sample: Sequence[str], encoder: str = AUTO) -> EncoderChoice:
    """Choose the first encoder that gives the reference's ids on a part of `sample`.

    An encoder named by the user is used, or rejected if its ids differ.
    """
    if encoder == REFERENCE:
        return EncoderChoice(REFERENCE, tokenizers.__version__, [])
    every = max(1, sum(map(len, sample)) // CHECKED_CHARS)
    checks = [sample[::every], _probes(definition)]
    wanted = [cached_encoder(REFERENCE, definition).encode(texts) for texts in checks]
    tried = []
    for name in CHAIN if encoder == AUTO else (encoder,):
        if name == REFERENCE:
            break
        try:
            fast = cached_encoder(name, definition)
            found = [_difference(fast.encode(a), b) for a, b in zip(checks, wanted, strict=True)]
            problem = "".join(found[:1]) or "".join(found)
        except ModuleNotFoundError as error:
            problem = NOT_INSTALLED if error.name == name else f"ModuleNotFoundError: {error}"
        except Exception as error:  # whatever a native library raises, the next one may work
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if problem and encoder != AUTO:
            raise UserError(
                f"--encoder {encoder} cannot be used ({problem})",
                "pip install 'arriero[fast]' if it is missing, or pass --encoder auto",
            )
        tried.append({"name": name, "outcome": problem or "equal to tokenizers"})
        if not problem:
            return EncoderChoice(name, importlib.metadata.version(name), tried)
    return EncoderChoice(REFERENCE, tokenizers.__version__, tried)


def _difference(found: Encoded, wanted: Encoded) -> str:
    for number, (got, want) in enumerate(zip(_documents(found), _documents(wanted), strict=True)):
        if not np.array_equal(got, want):
            return f"its ids for document {number} of the check differ from those of tokenizers"
    return ""


def _documents(encoded: Encoded) -> list[np.ndarray]:
    return np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])


class IdsDiffer(Exception):
    """The ids of an encoder differ from those of `tokenizers`."""


class CheckedEncoder:
    """Compares the ids of some texts of a shard with the reference, the same ones in each repetition.

    In each sampled batch it takes one text of any kind and one that is not ASCII.
    """

    BUDGET = 2**19
    SHORT = 2**14

    def __init__(self, inner: Encoder, definition: str, seed: list[int]) -> None:
        self._inner, self._definition = inner, definition
        self._random = random.Random(str(seed))
        self._batches = 0
        self._left = self.BUDGET

    def encode(self, texts: Sequence[str]) -> Encoded:
        encoded = self._inner.encode(texts)
        if texts:
            self._check(texts, encoded)
        return encoded

    def _check(self, texts: Sequence[str], encoded: Encoded) -> None:
        number, self._batches = self._batches, self._batches + 1
        if number % 16 and number & (number - 1):
            return
        most = min(self.SHORT, self._left)
        short = [i for i, text in enumerate(texts) if len(text) <= most]
        if not short:
            shortest = min(range(len(texts)), key=lambda i: len(texts[i]))
            short = [shortest] if len(texts[shortest]) <= self._left else []
        non_ascii = [i for i in short if not texts[i].isascii()]
        chosen = sorted({self._random.choice(some) for some in (short, non_ascii) if some})
        self._left -= sum(len(texts[i]) for i in chosen)
        ends = np.cumsum(encoded.lengths)
        wanted = _documents(cached_encoder(REFERENCE, self._definition).encode([texts[i] for i in chosen]))
        for i, ids in zip(chosen, wanted, strict=False):
            if not np.array_equal(encoded.ids[ends[i] - encoded.lengths[i] : ends[i]], ids):
                raise IdsDiffer(f"ids that differ from those of tokenizers for the text {texts[i][:40]!r}...")


def _probes(definition: str) -> list[str]:
    """Return texts that show whether special tokens stay text and unusual characters survive."""
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
