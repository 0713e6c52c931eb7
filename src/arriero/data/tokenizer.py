"""Text to token ids and back, for a `tokenizer.json`."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from arriero.errors import UserError

END = "<|end|>"
KNOWN_ENDS = (END, "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")


class Tokenizer:
    """Encoding treats special strings as plain text: a document cannot smuggle in a control token."""

    def __init__(self, inner: tokenizers.Tokenizer, path: Path, eos: str, eos_id: int, sha256: str) -> None:
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.path = path
        self.eos = eos
        self.eos_id = eos_id
        self.sha256 = sha256
        self.vocab_size = max(inner.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(path: Path, eos: str | None = None) -> Tokenizer:
    """`eos` names the token that ends a document; without it the usual names are tried."""
    try:
        raw = Path(path).read_bytes()
        inner = tokenizers.Tokenizer.from_str(raw.decode())
    except OSError as error:
        raise UserError(
            f"cannot read tokenizer {path} ({error.strerror})", "give the path of a tokenizer.json"
        ) from None
    except Exception as error:
        raise UserError(
            f"{path} is not a tokenizer.json ({error})", "give the path of a tokenizer.json"
        ) from None
    for name in (eos,) if eos else KNOWN_ENDS:
        if (eos_id := inner.token_to_id(name)) is not None:
            return Tokenizer(inner, Path(path), name, eos_id, hashlib.sha256(raw).hexdigest())
    tried = ", ".join((eos,) if eos else KNOWN_ENDS)
    raise UserError(f"{path} has no end-of-document token {tried}", "name the token that ends a document")
