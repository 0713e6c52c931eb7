"""The loss mask of a dataset: which tokens are included in the loss.

A dataset may have one of two files beside each shard: `NAME.plen`, one int32 per document, the number of
prompt tokens, which are excluded; or `NAME.mask`, one bit per token (the first token in the lowest bit), 1
where the token is included. The manifest names the kind; the checksums are part of the dataset's fingerprint.
"""

import json
import mmap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from arriero.data.store.manifest import CHECKSUMS, MANIFEST, manifest_text
from arriero.data.store.store import TokenStore
from arriero.errors import UserError
from arriero.files import publish_file, sha256_of, sha256_of_file

PROMPT_LENGTHS, MASK = "plen", "mask"


def attach_prompt_lengths(directory: Path, lengths: Sequence[Sequence[int]]) -> TokenStore:
    """Add the prompt length of each document, shard by shard, to a dataset."""
    return _attach(directory, PROMPT_LENGTHS, [np.asarray(column, dtype="<i4") for column in lengths])


def attach_loss_masks(directory: Path, included: Sequence[Sequence[bool]]) -> TokenStore:
    """Add a loss mask, one truth value per token, shard by shard, to a dataset."""
    return _attach(directory, MASK, [np.asarray(column, dtype=bool) for column in included])


def _attach(directory: Path, kind: str, columns: Sequence[np.ndarray]) -> TokenStore:
    store = TokenStore.open(directory)
    per, count = ("token", store.shard_tokens) if kind == MASK else ("document", store.shard_documents)
    if len(columns) != store.shards:
        what = f"{directory} has {store.shards} shards, {len(columns)} were given"
        raise UserError(what, "give one per shard")
    for shard, values in enumerate(columns):
        if len(values) != count(shard) or values.min(initial=0) < 0:
            what = f"{store.shard_path(shard)} has {count(shard)} {per}s, and {len(values)} values were given"
            raise UserError(what, f"give one value of 0 or more per {per}")
    for shard, values in enumerate(columns):
        packed = np.packbits(values, bitorder="little") if kind == MASK else values
        publish_file(store.shard_path(shard, f".{kind}"), packed.tobytes())
    return _register(store, kind)


def _register(store: TokenStore, kind: str) -> TokenStore:
    sums = (store.directory / CHECKSUMS).read_text().splitlines(keepends=True)
    sums = [line for line in sums if not line.rstrip().endswith((f".{PROMPT_LENGTHS}", f".{MASK}"))]
    for shard in range(store.shards):
        path = store.shard_path(shard, f".{kind}")
        sums.append(f"{sha256_of_file(path)}  {path.name}\n")
    checksums = "".join(sums).encode()
    manifest = json.loads((store.directory / MANIFEST).read_bytes())
    manifest["checksums"]["sha256"] = sha256_of(checksums)
    shards = manifest.pop("shards")
    publish_file(store.directory / CHECKSUMS, checksums)
    publish_file(store.directory / MANIFEST, manifest_text({**manifest, "labels": kind, "shards": shards}))
    return TokenStore.open(store.directory)


class LossMask:
    """Reads the loss mask of a dataset; the file of a shard is mapped when it is first needed."""

    def __init__(self, store: TokenStore) -> None:
        self._store = store

    def read(self, start: int, n: int) -> np.ndarray:
        """Return True for each token of [start, start + n) that is included in the loss."""
        included = np.ones(n, dtype=bool)
        filled = 0
        for shard, first, count in self._store.shard_ranges(start, n):
            part = included[filled : filled + count]
            (self._read_bits if self._store.labels == MASK else self._read_prompts)(shard, first, part)
            filled += count
        return included

    def _read_bits(self, shard: int, first: int, included: np.ndarray) -> None:
        begin, end = first // 8, (first + len(included) + 7) // 8
        raw = np.frombuffer(self._file(shard), dtype=np.uint8, count=end - begin, offset=begin)
        bits = np.unpackbits(raw, bitorder="little")
        included[:] = bits[first - 8 * begin :][: len(included)]

    def _read_prompts(self, shard: int, first: int, included: np.ndarray) -> None:
        number, begins = self._store.documents_touching(shard, first, len(included))
        lengths = np.frombuffer(self._file(shard), dtype="<i4", count=len(begins), offset=4 * number)
        for begin, end in zip(begins - first, begins - first + lengths, strict=True):
            included[max(begin, 0) : max(end, 0)] = False

    def _file(self, shard: int) -> mmap.mmap:
        return self._store.open_file(("labels", shard), partial(self._open, shard))

    def _open(self, shard: int) -> mmap.mmap:
        store = self._store
        path = store.shard_path(shard, f".{store.labels}")
        bits = (store.shard_tokens(shard) + 7) // 8
        size = bits if store.labels == MASK else 4 * store.shard_documents(shard)
        try:
            with path.open("rb") as file:
                found = file.seek(0, 2)
                if found != size:
                    raise UserError(f"{path} has {found} bytes, not {size}", "restore it from a copy")
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise UserError(f"{path} is missing", "restore it from a copy") from None
