"""The manifest of a dataset: plain JSON whose last key is `shards`, a table by column.

A million shards are parsed in a fraction of a second: their numbers are parsed directly into arrays, and
names of equal length are taken from the text when they are needed. Any other layout is read as ordinary JSON.
The checksums are in `checksums.sha256` (readable by `sha256sum -c`), whose own checksum is in the manifest.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationInfo, field_validator

from arriero.data.store.shards import DTYPES, Shard
from arriero.files import publish_file, sha256_of, sha256_of_file

MANIFEST = "manifest.json"
WORK = ".prepare"  # in a directory whose prepare is not finished
PLAN = "plan.json"
CHECKSUMS = "checksums.sha256"
VERSION = 1
_TABLE = re.compile(
    rb'"shards": \{"name": \[([^\[\]]*)\], "tokens": \[([-\d, ]*)\], "documents": \[([-\d, ]*)\], '
    rb'"text_bytes": \[([-\d, ]*)\]\}\n\}\n$'
)


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_FileName = Annotated[str, Field(pattern=r"^[^\x00]+$")]


class _NamedFile(BaseModel):
    file: _FileName
    sha256: str


class _Separator(BaseModel, extra="forbid"):
    token: str
    id: _Count


class _Separators(BaseModel):
    bos: _Separator | None
    eos: _Separator | None


class _Inputs(BaseModel):
    sha256: str


class _Backend(BaseModel):
    redone: list[str] = []


class _SourceCounts(BaseModel):
    source: str
    documents: _Count
    skipped: _Count
    skipped_examples: list[str]


class _About(BaseModel):
    """The keys that are read again; others may hold anything."""

    origin: list[Any] = Field([], alias="from")
    heldout_seed: int | None = None
    documents_without_eos: _Count = 0
    separators: _Separators | None = None
    settings: dict[str, Any] = {}
    inputs: _Inputs | None = None
    backend: _Backend = _Backend()
    spelled_out: dict[str, _Count] = {}
    empty_documents: _Count = 0
    per_source: list[_SourceCounts] = []


class Head(BaseModel):
    """The types and ranges of all keys of a manifest except `version` and `shards`."""

    about: _About
    tokenizer: _NamedFile
    vocab_size: Annotated[int, Field(ge=1, le=2**31)]
    eos_id: _Count
    dtype: str
    checksums: _NamedFile
    labels: _FileName | None = None

    @field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        if dtype not in DTYPES:
            raise ValueError(f"must be one of {', '.join(DTYPES)}")
        return dtype

    @field_validator("eos_id")
    @classmethod
    def _within(cls, eos_id: int, seen: ValidationInfo) -> int:
        if eos_id >= seen.data.get("vocab_size", eos_id + 1):
            raise ValueError(f"must be below vocab_size, {seen.data['vocab_size']}")
        return eos_id


class ShardColumns(NamedTuple):
    name: Callable[[int], str]
    tokens: np.ndarray
    documents: np.ndarray
    text_bytes: int


def parse_manifest(raw: bytes) -> tuple[dict[str, Any], ShardColumns]:
    """Parse a manifest; return it without its table of shards, and that table."""
    at = raw.rfind(b'"shards": {"name": [')
    table = _TABLE.match(raw, at) if at > 0 else None
    if table is None:
        return _parse_plainly(raw)
    manifest = json.loads(raw[:at].rstrip(b", \n") + b"}")
    tokens, documents, text_bytes = (_numbers(raw, *table.span(column)) for column in (2, 3, 4))
    return manifest, _checked(_names(table[1], len(tokens)), tokens, documents, text_bytes)


def _parse_plainly(raw: bytes) -> tuple[dict[str, Any], ShardColumns]:
    manifest = json.loads(raw)
    if not isinstance(manifest, dict):
        manifest: dict[str, Any] = {"version": None}
    empty = {"name": [], "tokens": [], "documents": [], "text_bytes": []}
    table: dict[str, Any] = manifest.pop("shards", empty)
    columns = (np.array(table[name], dtype=np.int64) for name in ("tokens", "documents", "text_bytes"))
    return manifest, _checked(_file_names(table["name"]), *columns)


def _checked(names: Any, tokens: np.ndarray, documents: np.ndarray, text_bytes: np.ndarray) -> ShardColumns:
    if not len(names) == len(tokens) == len(documents) == len(text_bytes):
        raise ValueError("the columns of 'shards' differ in length")
    if not tokens.ndim == documents.ndim == text_bytes.ndim == 1:
        raise ValueError("a column of 'shards' is not a list of numbers")
    if min(tokens.min(initial=0), documents.min(initial=0)) < 0:
        raise ValueError("a shard has a negative count")
    if max(tokens.sum(dtype=float), documents.sum(dtype=float)) >= 2**62:
        raise ValueError("a shard has an impossible count")
    return ShardColumns(names.__getitem__, tokens, documents, int(text_bytes.sum()))


def _numbers(raw: bytes, begin: int, end: int) -> np.ndarray:
    count = raw.count(b",", begin, end) + 1 if end > begin else 0
    numbers = np.fromstring(raw[begin:end], dtype=np.int64, sep=",") if count else np.empty(0, "i8")
    if len(numbers) != count:
        raise ValueError("a column of 'shards' holds something that is not a number")
    return numbers


class _EqualNames:
    """A sequence of quoted names of one length in the text of the manifest."""

    def __init__(self, text: bytes, stride: int) -> None:
        self._text, self._stride = text, stride

    def __len__(self) -> int:
        return (len(self._text) + 2) // self._stride

    def __getitem__(self, shard: int) -> str:
        begin = shard * self._stride
        return json.loads(self._text[begin : begin + self._stride - 2])


def _names(text: bytes, count: int) -> "list[str] | _EqualNames":
    stride, rest = divmod(len(text) + 2, count) if count else (0, 1)
    if rest == 0 and stride > 4 and b"\\" not in text and text.isascii():
        letters = np.frombuffer(text, dtype=np.uint8)
        is_quoted = letters.min() >= ord(" ") and text.count(b'"') == 2 * count
        is_quoted = is_quoted and all((letters[at::stride] == ord('"')).all() for at in (0, stride - 3))
        if is_quoted and text.count(b'", "') == count - 1:
            return _EqualNames(text, stride)
    return _file_names(json.loads(b"[" + text + b"]"))


def _file_names(names: Any) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
        raise ValueError("the names of 'shards' are not a list of strings")
    return names


def write_manifest(
    directory: Path,
    shards: list[Shard],
    *,
    tokenizer: str,
    vocab_size: int,
    eos_id: int,
    dtype: str,
    about: dict[str, Any],
    labels: tuple[str, Sequence[str]] | None = None,
) -> None:
    """Write the checksums and, last, the manifest. `tokenizer` is the name of a file in `directory`.

    `labels` are the suffix of the files with the loss mask and their checksums, one per shard.
    """
    tokenizer_sha256 = sha256_of_file(directory / tokenizer)
    sums = [(tokenizer_sha256, tokenizer)]
    for shard in shards:
        sums += [(shard.bin_sha256, f"{shard.name}.bin"), (shard.idx_sha256, f"{shard.name}.idx")]
    if labels is not None:
        sums += [(digest, f"{each.name}.{labels[0]}") for digest, each in zip(labels[1], shards, strict=True)]
    checksums = "".join(f"{digest}  {name}\n" for digest, name in sums).encode()
    publish_file(directory / CHECKSUMS, checksums)
    manifest = {
        "version": VERSION,
        "about": about,
        "tokenizer": {"file": tokenizer, "sha256": tokenizer_sha256},
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "dtype": dtype,
        "checksums": {"file": CHECKSUMS, "sha256": sha256_of(checksums)},
        **({"labels": labels[0]} if labels is not None else {}),
        "shards": {
            "name": [shard.name for shard in shards],
            "tokens": [shard.tokens for shard in shards],
            "documents": [shard.documents for shard in shards],
            "text_bytes": [shard.text_bytes for shard in shards],
        },
    }
    publish_file(directory / MANIFEST, manifest_text(manifest))


def manifest_text(manifest: dict[str, Any]) -> bytes:
    """Format a manifest with one key per line and `shards` last."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items())
    return f"{{\n{lines}\n}}\n".encode()


def fingerprint_of_manifest(manifest: dict[str, Any], tokens: np.ndarray) -> str:
    identity = {key: manifest[key] for key in ("version", "vocab_size", "eos_id", "dtype")}
    identity["tokenizer"] = manifest["tokenizer"]["sha256"]
    identity["checksums"] = manifest["checksums"]["sha256"]
    if manifest.get("labels"):
        identity["labels"] = manifest["labels"]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    digest.update(tokens.astype("<i8", copy=False).data)
    return digest.hexdigest()
