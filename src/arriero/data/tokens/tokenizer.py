"""Text to token ids and back, for a `tokenizer.json` or a Llama `tokenizer.model`."""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import tokenizers

from arriero.data.store.store import TokenStore
from arriero.data.tokens.llama_tokenizers import from_model_file
from arriero.errors import UserError

END = "<|end|>"
# `<|end|>` comes last: some families end a turn, not a text, with it
KNOWN_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", END)
ENDS_OF_TURNS = (END, "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|eot|>")
KNOWN_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
_GIVE = "give a tokenizer.json, or the tokenizer.model of a Llama checkpoint"


class Tokenizer:
    """`inner` as `parsed` gives it."""

    def __init__(self, inner: tokenizers.Tokenizer, path: Path, eos: str, eos_id: int, sha256: str) -> None:
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


def tokenizer_of(store: TokenStore) -> Tokenizer:
    """The tokenizer of a dataset. Its `eos_id` pads rows; `separators_of` says whether it ends documents."""
    store.check_tokenizer()
    definition = read_definition(store.tokenizer_path)
    inner = parsed(definition)
    eos = inner.id_to_token(store.eos_id) or ""
    return Tokenizer(inner, store.tokenizer_path, eos, store.eos_id, store.tokenizer_sha256)


def load_tokenizer(path: Path, eos: str | None = None) -> Tokenizer:
    """`eos` names the token that ends a document; without it the usual names are tried."""
    definition = read_definition(path)
    inner = parsed(definition)
    for name in (eos,) if eos else KNOWN_ENDS:
        if (found := inner.token_to_id(name)) is not None:
            return Tokenizer(inner, Path(path), name, found, hashlib.sha256(definition.encode()).hexdigest())
    tried = ", ".join((eos,) if eos else KNOWN_ENDS)
    raise UserError(f"{path} has no end-of-document token {tried}", "name the token that ends a document")


def read_definition(path: Path) -> str:
    """The text of a `tokenizer.json`, converted where the file is a `tokenizer.model`."""
    path = _file_of(Path(path))
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read tokenizer {path} ({error.strerror})", _GIVE) from None
    if path.suffix == ".json" or raw.startswith(b"{"):
        try:
            definition = raw.decode()
            parsed(definition)
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"{path} is not a tokenizer.json ({error})", _GIVE) from None
        return definition
    try:
        return _converted(raw)
    except ValueError as error:
        raise UserError(f"cannot use tokenizer {path}: {error}", _GIVE) from None


@lru_cache(maxsize=1)
def _converted(raw: bytes) -> str:
    return from_model_file(raw).to_str()


@lru_cache(maxsize=2)
def parsed(definition: str) -> tokenizers.Tokenizer:
    """Shared: not to be changed. Special strings are plain text; no document smuggles in a control token."""
    inner = tokenizers.Tokenizer.from_str(definition)
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    return inner


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path / name).is_file():
            return path / name
    raise UserError(f"{path} has neither tokenizer.json nor tokenizer.model", _GIVE)


def declared_token(path: Path, name: str) -> str | None:
    """What `tokenizer_config.json` beside the tokenizer calls its `eos_token` or `bos_token`."""
    config = _file_of(Path(path)).parent / "tokenizer_config.json"
    try:
        token = json.loads(config.read_bytes()).get(name)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


# words, numbers, code, white space and several scripts: where pre-tokenizers and merges differ
_PROBE = """The quick brown fox can't jump over 1234567 lazy dogs, WON'T it?  3.14e-7 != 22/7
\tdef area(radius: float) -> float:\r\n        return 3.14159 * radius ** 2  # m\u00b2
<p class="x">http://example.org/a_b?c=1&d=%20</p> {"key": [1, 20, 300, 4000]} C++ naïve façade Straße
Быстрая лиса, 敏捷的狐狸, 素早い茶色の狐, الثعلب البني, तेज भूरी लोमड़ी, 빠른 갈색 여우 🦙🏽 e\u0301 \u200b"""


def same_ids(one: str, other: str) -> bool:
    """Whether two definitions give text the same ids: one vocabulary, and equal ids for a varied text.

    Special tokens may be there or not, but one of the same name has the same id.
    """
    if one == other:
        return True
    first, second = parsed(one), parsed(other)
    if first.get_vocab(with_added_tokens=False) != second.get_vocab(with_added_tokens=False):
        return False
    names, others = first.get_vocab(), second.get_vocab()
    if any(others.get(name, number) != number for name, number in names.items()):
        return False
    lines = [_PROBE, *_PROBE.splitlines()]
    return all(
        first.encode(text, add_special_tokens=False).ids == second.encode(text, add_special_tokens=False).ids
        for text in lines
    )


def added_by_template(definition: str) -> list[str]:
    """The special tokens that the tokenizer's own post-processor would put around a text."""
    inner = parsed(definition)
    bare, wrapped = (inner.encode("a", add_special_tokens=add).ids for add in (False, True))
    return [inner.id_to_token(i) or str(i) for i in wrapped if i not in bare]


def with_special(definition: str, names: Sequence[str]) -> str:
    """The same tokenizer in which `names`, if they are added tokens, are special, so that text stays text."""
    document = json.loads(definition)
    changed = False
    for token in document.get("added_tokens") or []:
        if token["content"] in names and not token["special"]:
            token["special"] = changed = True
    return json.dumps(document, ensure_ascii=False) if changed else definition
