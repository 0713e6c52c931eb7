"""Text to token ids and back, for a `tokenizer.json` or a Llama `tokenizer.model`."""

import errno
import json
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from arriero.data.store.store import TokenStore
from arriero.data.text.formats import declared_token
from arriero.data.tokens.llama_tokenizers import from_model_file
from arriero.errors import UserError
from arriero.files import publish_file, sha256_of, space_for

END = "<|end|>"
# `<|end|>` comes last: some families end a turn, not a text, with it
KNOWN_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", END)
ENDS_OF_TURNS = (END, "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|eot|>")
KNOWN_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
_GIVE = "give a tokenizer.json, or the tokenizer.model of a Llama checkpoint"


class Tokenizer:
    """Encodes and decodes text. `inner` is what `parsed` returns."""

    def __init__(self, inner: tokenizers.Tokenizer, path: Path, eos: str, eos_id: int, sha256: str) -> None:
        self._inner = inner
        self.path = path
        self.eos = eos
        self.eos_id = eos_id
        self.sha256 = sha256
        self.vocab_size = max(inner.get_vocab().values()) + 1

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)


def tokenizer_of(store: TokenStore) -> Tokenizer:
    """Load the tokenizer of a dataset. Its `eos_id` pads rows; `separators_of` tells if it ends documents."""
    store.check_tokenizer()
    definition = read_definition(store.tokenizer_path)
    inner = parsed(definition)
    eos = inner.id_to_token(store.eos_id) or ""
    return Tokenizer(inner, store.tokenizer_path, eos, store.eos_id, store.tokenizer_sha256)


def load_tokenizer(path: Path, eos: str | None = None) -> Tokenizer:
    """Load a tokenizer. `eos` names the token that ends a document; by default common names are tried."""
    definition = read_definition(path)
    inner = parsed(definition)
    names = (eos,) if eos else KNOWN_ENDS
    if (end := first_token(inner, names)) is None:
        what = f"{path} has no end-of-document token {', '.join(names)}"
        raise UserError(what, "name the token that ends a document")
    return Tokenizer(inner, Path(path), *end, sha256_of(definition.encode()))


def read_definition(path: Path) -> str:
    """Read a `tokenizer.json`, or convert a `tokenizer.model` to one; return its JSON text."""
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
    """Parse a definition so that special tokens in a text stay text. The result is shared and read-only."""
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


def chat_template_beside(path: Path) -> list[Path]:
    """Return the chat template beside a tokenizer file, if there is one."""
    chat = path.with_name("chat_template.jinja")
    return [chat] if chat.is_file() else []


# words, numbers, code, white space and several scripts, where pre-tokenizers and merges differ
_PROBE = """The quick brown fox can't jump over 1234567 lazy dogs, WON'T it?  3.14e-7 != 22/7
\tdef area(radius: float) -> float:\r\n        return 3.14159 * radius ** 2  # m\u00b2
<p class="x">http://example.org/a_b?c=1&d=%20</p> {"key": [1, 20, 300, 4000]} C++ naïve façade Straße
Быстрая лиса, 敏捷的狐狸, 素早い茶色の狐, الثعلب البني, तेज भूरी लोमड़ी, 빠른 갈색 여우 🦙🏽 e\u0301 \u200b"""


def same_ids(one: str, other: str) -> bool:
    """Test whether two definitions give the same ids: equal vocabularies, and equal ids for a varied text.

    Special tokens may differ, but those of the same name must have the same id.
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
    """List the special tokens that the tokenizer's own post-processor would add to a text."""
    inner = parsed(definition)
    bare, wrapped = (inner.encode("a", add_special_tokens=add).ids for add in (False, True))
    return [inner.id_to_token(i) or str(i) for i in wrapped if i not in bare]


def mark_special(definition: str, names: Sequence[str]) -> str:
    """Mark those of `names` that are added tokens as special, so that texts that spell them stay text."""
    document = json.loads(definition)
    changed = False
    for token in document.get("added_tokens") or []:
        if token["content"] in names and not token["special"]:
            token["special"] = changed = True
    return json.dumps(document, ensure_ascii=False) if changed else definition


class Encoded(NamedTuple):
    ids: np.ndarray
    lengths: np.ndarray


MANY = 0.5
_LOOKED_AT = 64


class SpecialToken(NamedTuple):
    token: str
    id: int


class Separators(NamedTuple):
    bos: SpecialToken | None
    eos: SpecialToken | None

    def about(self) -> dict[str, Any]:
        return {name: mark and mark._asdict() for name, mark in self._asdict().items()}

    def token_ids(self) -> dict[str, Any]:
        """Return the ids under Hugging Face's names, and whether documents begin with the BOS."""
        named = {"bos_token_id": self.bos, "eos_token_id": self.eos}
        ids = {name: mark.id for name, mark in named.items() if mark is not None}
        return ids | {"add_bos_token": self.bos is not None}

    def __str__(self) -> str:
        bos, eos = (mark.token if mark else "none" for mark in self)
        return f"BOS {bos}, EOS {eos}"

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text as they are at the beginning of a document."""
        return [self.bos.id, *ids] if self.bos else list(ids)

    def around(self, encoded: Encoded) -> Encoded:
        """Add the separators around each document."""
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
        """Count the texts that begin or end with the spelling of a separator."""
        bos, eos = self.bos, self.eos
        return {
            "bos": sum(text.lstrip().startswith(bos.token) for text in texts) if bos else 0,
            "eos": sum(text.rstrip().endswith(eos.token) for text in texts) if eos else 0,
        }

    def check_not_doubled(self, encoded: Encoded) -> None:
        """Raise UserError if documents already begin or end with the separator that would be added."""
        full = encoded.lengths > 0
        ends = np.cumsum(encoded.lengths)[full]
        starts = ends - encoded.lengths[full]
        for mark, places, word in ((self.bos, starts, "begin"), (self.eos, ends - 1, "end")):
            if mark is not None and (encoded.ids[places] == mark.id).any():
                raise UserError(
                    f"documents already {word} with {mark.token} (id {mark.id}) after encoding",
                    f"the separator would be doubled; pass --{'bos' if word == 'begin' else 'eos'} none",
                )


def choose_separators(definition: str, bos: str, eos: str, path: Path | None = None) -> Separators:
    """Choose separators; `bos` and `eos` are 'none', 'auto' (the tokenizer's usual one) or a token."""
    inner = parsed(definition)
    return Separators(
        _mark(inner, bos, _beginnings(path), "--bos", "begins"),
        _mark(inner, eos, _ends(path), "--eos", "ends"),
    )


def separators_of(store: TokenStore) -> Separators:
    """Return the separators of a dataset as `prepare` recorded them, else as its tokens show."""
    recorded = store.about.get("separators")
    if recorded is not None:
        return Separators(*(recorded[name] and SpecialToken(**recorded[name]) for name in ("bos", "eos")))
    inner = parsed(read_definition(store.tokenizer_path))
    unended = store.documents and store.about.get("documents_without_eos") == store.documents
    eos = None if unended else SpecialToken(inner.id_to_token(store.eos_id) or "", store.eos_id)
    return Separators(_common_beginning(store, inner), eos)


def _common_beginning(store: TokenStore, inner: tokenizers.Tokenizer) -> SpecialToken | None:
    """Return the special token that all of the first documents begin with, if there is one."""
    starts = store.document_starts(0, min(store.tokens, 2**20))[:_LOOKED_AT]
    first = {int(store.read(int(start), 1)[0]) for start in starts}
    if len(first) != 1:
        return None
    number = first.pop()
    token = inner.get_added_tokens_decoder().get(number)
    return SpecialToken(token.content, number) if token is not None and token.special else None


def first_token(inner: tokenizers.Tokenizer, names: Iterable[str]) -> SpecialToken | None:
    """Return the first of these tokens that the tokenizer has."""
    found = ((name, inner.token_to_id(name)) for name in names)
    return next((SpecialToken(name, number) for name, number in found if number is not None), None)


def usual_end(definition: str, path: Path | None = None) -> SpecialToken | None:
    return first_token(parsed(definition), _ends(path))


def _beginnings(path: Path | None) -> tuple[str, ...]:
    declared = declared_token(path, "bos_token") if path else None
    return (declared, *KNOWN_BEGINNINGS) if declared else KNOWN_BEGINNINGS


def _ends(path: Path | None) -> tuple[str, ...]:
    """List end tokens, best first. A declared one that ends chat turns comes after an end of text."""
    declared = declared_token(path, "eos_token") if path else None
    if not declared:
        return KNOWN_ENDS
    return (*KNOWN_ENDS, declared) if declared in ENDS_OF_TURNS else (declared, *KNOWN_ENDS)


def _mark(
    inner: tokenizers.Tokenizer, wanted: str, known: Sequence[str], option: str, does: str
) -> SpecialToken | None:
    if wanted == "none":
        return None
    names = known if wanted == "auto" else (wanted,)
    if (found := first_token(inner, names)) is not None:
        return found
    raise UserError(
        f"the tokenizer has no token {' or '.join(names)}",
        f"name the token that {does} a document with {option} TOKEN, or pass {option} none",
    )


def check_spelled_out(separators: Separators, texts: Sequence[str]) -> None:
    """Raise UserError if many texts end with the spelled-out end token: they were separated already."""
    if separators.eos is None or not texts:
        return
    spelled = separators.spelled_out(texts)["eos"]
    if spelled >= MANY * len(texts):
        raise UserError(
            f"{spelled} of the first {len(texts)} documents end with the text {separators.eos.token}, "
            "and prepare adds that token after each document",
            "take it out of the text, or pass --literal-eos to keep it there as plain text",
        )


SMALLEST_VOCAB = 257
LARGEST_VOCAB = 2**24


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: Path, *, split: str | None = None, end: str = END
) -> Tokenizer:
    """Train a byte-level BPE with `end` as the end of a document and write it to `path`.

    `split` is the pattern that splits text into words before merging; by default GPT-2's.
    """
    if not SMALLEST_VOCAB <= vocab_size <= LARGEST_VOCAB:
        is_small = vocab_size < SMALLEST_VOCAB
        todo = f"{SMALLEST_VOCAB} holds every byte and the end token; the largest is {LARGEST_VOCAB:,}"
        raise UserError(f"a vocabulary of {vocab_size:,} is too {'small' if is_small else 'large'}", todo)
    _check_writable(path, 40 * vocab_size)
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=split is not None))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        words = pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = filter(None, texts)
    if (first := next(texts, None)) is None:
        raise UserError("there is no text to train a tokenizer on", "check the sources and --column")
    inner.train_from_iterator(chain([first], texts), trainer)
    with space_for(path):
        publish_file(path, inner.to_str(pretty=True).encode())
    return load_tokenizer(path, end)


def _check_writable(path: Path, size: int) -> None:
    """Raise UserError if `size` bytes cannot be written; a quota shows only on writing."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(size))
            return
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})", "choose another place") from None
