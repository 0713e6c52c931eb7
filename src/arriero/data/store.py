"""A prepared dataset at rest: Megatron v1 `.bin/.idx` shards and one `manifest.json`.

The manifest lists shards by column, so that a million of them parse in a fraction of a second. Checksums lie
beside it in `checksums.sha256` (readable by `sha256sum -c`), and the manifest holds that file's checksum.
"""

import bisect
import hashlib
import json
import mmap
import os
import struct
from functools import _lru_cache_wrapper, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from arriero.data.shards import DTYPES, IDX_HEADER, IDX_MAGIC, IDX_VERSION, Shard, write_durably
from arriero.errors import UserError

MANIFEST = "manifest.json"
CHECKSUMS = "checksums.sha256"
VERSION = 1
OPEN_SHARDS = 64

_REMAKE = "prepare the dataset again, or restore the file from a copy"


def write_manifest(
    directory: Path,
    shards: list[Shard],
    *,
    tokenizer: str,
    vocab_size: int,
    eos_id: int,
    dtype: str,
    about: dict[str, Any],
) -> None:
    """Call last: a directory without a manifest is not a dataset. `tokenizer` names a file in `directory`."""
    tokenizer_sha256 = hashlib.sha256((directory / tokenizer).read_bytes()).hexdigest()
    sums = [(tokenizer_sha256, tokenizer)]
    for shard in shards:
        sums += [(shard.bin_sha256, f"{shard.name}.bin"), (shard.idx_sha256, f"{shard.name}.idx")]
    checksums = "".join(f"{digest}  {name}\n" for digest, name in sums).encode()
    write_durably(directory / CHECKSUMS, checksums)
    manifest = {
        "version": VERSION,
        "about": about,
        "tokenizer": {"file": tokenizer, "sha256": tokenizer_sha256},
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "dtype": dtype,
        "checksums": {"file": CHECKSUMS, "sha256": hashlib.sha256(checksums).hexdigest()},
        "shards": {
            "name": [shard.name for shard in shards],
            "tokens": [shard.tokens for shard in shards],
            "documents": [shard.documents for shard in shards],
            "text_bytes": [shard.text_bytes for shard in shards],
        },
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items())
    write_durably(directory / MANIFEST, f"{{\n{lines}\n}}\n".encode())


class TokenStore:
    """All shards as one sequence of tokens. Opening reads the manifest alone; shards open when first read."""

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        shards = manifest["shards"]
        self.directory = directory
        self.vocab_size: int = int(manifest["vocab_size"])
        self.eos_id: int = int(manifest["eos_id"])
        self.dtype = np.dtype(DTYPES[manifest["dtype"]].numpy)
        self.tokenizer_path = directory / manifest["tokenizer"]["file"]
        self.tokenizer_sha256: str = manifest["tokenizer"]["sha256"]
        self.about: dict[str, Any] = manifest["about"]
        tokens, documents, text_bytes = (
            np.array(shards[column], dtype=np.int64) for column in ("tokens", "documents", "text_bytes")
        )
        if not len(shards["name"]) == len(tokens) == len(documents) == len(text_bytes):
            raise ValueError("the columns of 'shards' differ in length")
        if min(tokens.min(initial=0), documents.min(initial=0)) < 0:
            raise ValueError("a shard has a negative count")
        self._ends = np.cumsum(tokens)
        self._names: list[str] = shards["name"]
        self._documents = documents
        self.shards = len(tokens)
        self.tokens = int(tokens.sum())
        self.documents = int(documents.sum())
        self.text_bytes = int(text_bytes.sum())
        self.fingerprint = _fingerprint(manifest, tokens)
        self._shard = _shard_opener(directory, shards["name"], tokens, documents, self.dtype)

    @classmethod
    def open(cls, directory: Path) -> "TokenStore":
        path = Path(directory) / MANIFEST
        try:
            manifest = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{path} does not exist", "give the directory of a prepared dataset") from None
        except ValueError as error:
            raise UserError(f"{path} is not valid JSON ({error})", _REMAKE) from None
        version = manifest.get("version") if isinstance(manifest, dict) else None
        if version != VERSION:
            raise UserError(
                f"{path} has format version {version!r}, this Arriero reads version {VERSION}",
                "prepare the dataset with this version, or use the Arriero that wrote it",
            )
        try:
            return cls(Path(directory), manifest)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error})", _REMAKE) from None

    def read(self, start: int, n: int) -> np.ndarray:
        out = np.empty(n, dtype=self.dtype)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill `out` (contiguous, of this store's dtype) with the tokens from `start` on."""
        self._check_range(start, len(out))
        filled = 0
        for shard, first, count in self._pieces(start, len(out)):
            self._shard(shard).read_into(first, out[filled : filled + count])
            filled += count

    def document_starts(self, start: int, n: int) -> np.ndarray:
        """Positions in [start, start + n) at which a document begins, ascending."""
        self._check_range(start, n)
        found = []
        for shard, first, count in self._pieces(start, n):
            starts = self._shard(shard).document_starts(first, count)
            found.append(starts + (start - first))
            start += count
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def document_start_before(self, position: int) -> int:
        """Where the document that holds the token at `position` begins."""
        self._check_range(position, 1)
        shard, first, _ = self._pieces(position, 1)[0]
        return position - first + self._shard(shard).document_start_before(first)

    def shard_tokens(self, shard: int) -> int:
        return int(self._ends[shard] - (self._ends[shard - 1] if shard else 0))

    def shard_documents(self, shard: int) -> int:
        return int(self._documents[shard])

    def shard_path(self, shard: int, suffix: str = "") -> Path:
        return self.directory / f"{self._names[shard]}{suffix}"

    def close(self) -> None:
        self._shard.cache_clear()

    def _check_range(self, start: int, n: int) -> None:
        if start < 0 or n < 0 or start + n > self.tokens:
            raise IndexError(f"tokens [{start}, {start + n}) of {self.directory}, which has {self.tokens}")

    def _pieces(self, start: int, n: int) -> list[tuple[int, int, int]]:
        pieces = []
        shard = int(self._ends.searchsorted(start, side="right"))
        while n > 0:
            begin = int(self._ends[shard - 1]) if shard else 0
            count = min(n, int(self._ends[shard]) - start)
            if count:
                pieces.append((shard, start - begin, count))
            start, n, shard = start + count, n - count, shard + 1
        return pieces


def _fingerprint(manifest: dict[str, Any], tokens: np.ndarray) -> str:
    identity = {key: manifest[key] for key in ("version", "vocab_size", "eos_id", "dtype")}
    identity["tokenizer"] = manifest["tokenizer"]["sha256"]
    identity["checksums"] = manifest["checksums"]["sha256"]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    digest.update(tokens.astype("<i8").tobytes())
    return digest.hexdigest()


def _shard_opener(
    directory: Path, names: list[str], tokens: np.ndarray, documents: np.ndarray, dtype: np.dtype
) -> "_lru_cache_wrapper[_OpenShard]":
    @lru_cache(maxsize=OPEN_SHARDS)
    def open_shard(shard: int) -> _OpenShard:
        return _OpenShard(directory / names[shard], int(tokens[shard]), int(documents[shard]), dtype)

    return open_shard


class _OpenShard:
    """Files close when the last reader lets go, so one thread cannot close a shard another is reading."""

    def __init__(self, stem: Path, tokens: int, documents: int, dtype: np.dtype) -> None:
        self._path = stem.with_name(stem.name + ".bin")
        self._fd = _open_sized(self._path, tokens * dtype.itemsize)
        self._itemsize = dtype.itemsize
        self._documents = documents
        self._idx_path = stem.with_name(stem.name + ".idx")
        self._idx: mmap.mmap | None = None

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", None)) is not None:
            os.close(fd)

    def read_into(self, first: int, out: np.ndarray) -> None:
        view = out.view(np.uint8).data
        offset = first * self._itemsize
        while len(view):
            got = os.preadv(self._fd, [view], offset)
            if not got:
                raise UserError(f"{self._path} ends before byte {offset + len(view)}", _REMAKE)
            view, offset = view[got:], offset + got

    def document_starts(self, first: int, count: int) -> np.ndarray:
        lo = self._search(first, 0, self._documents)
        hi = self._search(first + count, lo, min(self._documents, lo + count + 1))
        if hi < self._documents and self._pointer(hi) < (first + count) * self._itemsize:
            hi = self._search(first + count, hi, self._documents)
        if hi == lo:
            return np.empty(0, dtype=np.int64)
        pointers = np.frombuffer(self._index(), dtype="<i8", count=hi - lo, offset=self._pointer_offset(lo))
        starts = pointers // self._itemsize
        return starts if (starts[1:] > starts[:-1]).all() else np.unique(starts)

    def document_start_before(self, first: int) -> int:
        return self._pointer(self._search(first + 1, 0, self._documents) - 1) // self._itemsize

    def _search(self, token: int, lo: int, hi: int) -> int:
        return bisect.bisect_left(range(hi), token * self._itemsize, lo, hi, key=self._pointer)

    def _pointer(self, document: int) -> int:
        return struct.unpack_from("<q", self._index(), self._pointer_offset(document))[0]

    def _pointer_offset(self, document: int) -> int:
        return IDX_HEADER.size + 4 * self._documents + 8 * document

    def _index(self) -> mmap.mmap:
        if self._idx is None:
            n = self._documents
            fd = _open_sized(self._idx_path, IDX_HEADER.size + 4 * n + 8 * n + 8 * (n + 1))
            try:
                index = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(fd)
            magic, version, code, sequences, documents = IDX_HEADER.unpack_from(index)
            codes = {
                layout.code for layout in DTYPES.values() if np.dtype(layout.numpy).itemsize == self._itemsize
            }
            if (magic, version, sequences, documents) != (
                IDX_MAGIC,
                IDX_VERSION,
                n,
                n + 1,
            ) or code not in codes:
                raise UserError(f"{self._idx_path} is not the index of this dataset", _REMAKE)
            self._idx = index
        return self._idx


def _open_sized(path: Path, size: int) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UserError(f"{path} is missing", _REMAKE) from None
    if (found := os.fstat(fd).st_size) != size:
        os.close(fd)
        raise UserError(f"{path} has {found} bytes, the manifest says {size}", _REMAKE)
    return fd
