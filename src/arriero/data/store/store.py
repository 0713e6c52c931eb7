"""Read a prepared dataset: Megatron v1 `.bin/.idx` shards and one `manifest.json`."""

import errno
import itertools
import json
import resource
import shlex
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from arriero.data.store.manifest import (
    MANIFEST,
    PLAN,
    VERSION,
    WORK,
    Head,
    ShardColumns,
    fingerprint_of_manifest,
    parse_manifest,
)
from arriero.data.store.shards import DTYPES, REMAKE, SMALL_INDEX, DocumentIndex, TokenFile, index_size
from arriero.errors import UserError, first_problem
from arriero.files import sha256_of_file

MOST_FILES = 2**14
INDEX_BYTES = 2**28


class Cache:
    """A thread-safe LRU cache with a total weight, shared by all datasets of a process.

    An item is closed when its last reference is gone, so evicting one that is in use does no harm.
    """

    def __init__(self, capacity: Callable[[], int], weigh: Callable[[Any], int] = lambda _: 1) -> None:
        self._items: OrderedDict[tuple[int, Hashable], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._make_capacity, self._weigh = capacity, weigh
        self._capacity: int | None = None
        self._held = 0
        self._gone: deque[int] = deque()

    def limit(self, capacity: int | None) -> None:
        """Set the capacity; None derives it again."""
        with self._lock:
            self._capacity = capacity
            self._shrink()

    def get(self, owner: int, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return an item of an owner; make it if it is not cached.

        When the system has no file descriptors left, fewer files are kept open from then on.
        """
        with self._lock:
            while self._gone:
                self._drop(self._gone.popleft())
            if (owner, key) in self._items:
                self._items.move_to_end((owner, key))
                return self._items[owner, key]
        while True:
            try:
                item = make()
                break
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not FILES.halve():
                    raise
        with self._lock:
            if (owner, key) not in self._items:
                self._items[owner, key] = item
                self._held += self._weigh(item)
                self._shrink()
        return item

    def halve(self) -> bool:
        """Halve the capacity; return False if there was nothing to evict."""
        with self._lock:
            if not self._items:
                return False
            self._capacity = len(self._items) // 2
            self._shrink()
            return True

    def forget(self, owner: int) -> None:
        with self._lock:
            self._drop(owner)

    def forget_later(self, owner: int) -> None:
        """Forget an owner at the next `get`: a finalizer may run while this thread holds the lock."""
        self._gone.append(owner)

    def _drop(self, owner: int) -> None:
        for key in [key for key in self._items if key[0] == owner]:
            self._held -= self._weigh(self._items.pop(key))

    def _shrink(self) -> None:
        if self._capacity is None:
            self._capacity = self._make_capacity()
        while self._items and self._held > self._capacity:
            self._held -= self._weigh(self._items.popitem(last=False)[1])


def _files_allowed() -> int:
    """Raise the soft limit of open files as far as needed and allowed; return half of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = 2 * MOST_FILES if hard == unlimited else min(hard, 2 * MOST_FILES)
    if soft not in (unlimited, wanted) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_FILES if soft == unlimited else max(1, min(soft // 2, MOST_FILES))


FILES = Cache(_files_allowed)
INDEXES = Cache(lambda: INDEX_BYTES, len)


_OWNERS = itertools.count()


def check_finished(directory: Path) -> None:
    """Raise UserError if a prepare into this directory was interrupted."""
    plan = directory / WORK / PLAN
    if not plan.is_file():
        return
    try:
        command = shlex.join(["arriero", *json.loads(plan.read_bytes())["command"]])
    except (OSError, ValueError, KeyError, TypeError):  # written by an earlier version
        command = "the `arriero data prepare` command that began it"
    raise UserError(f"{directory} is not finished: its prepare was interrupted", f"resume it with {command}")


class TokenStore:
    """All shards as one sequence of tokens. Opening reads only the manifest; shards open when first read.

    `heldout_tokens` is the argument of `move_heldout_last` that made a view of the dataset.
    """

    heldout_tokens = 0

    def __init__(self, directory: Path, manifest: dict[str, Any], columns: ShardColumns) -> None:
        self.directory = directory
        self.vocab_size: int = manifest["vocab_size"]
        self.eos_id: int = manifest["eos_id"]
        self.dtype = DTYPES[manifest["dtype"]].numpy
        self.tokenizer_path = directory / manifest["tokenizer"]["file"]
        self.tokenizer_sha256: str = manifest["tokenizer"]["sha256"]
        self.about: dict[str, Any] = manifest["about"]
        self.labels: str | None = manifest.get("labels")
        tokens, documents = columns.tokens, columns.documents
        self._ends = np.cumsum(tokens)
        self._documents = documents
        self._name = columns.name
        self.shards = len(tokens)
        self.tokens = int(tokens.sum())
        self.documents = int(documents.sum())
        self.text_bytes = columns.text_bytes
        self.fingerprint = fingerprint_of_manifest(manifest, tokens)
        self._owner = next(_OWNERS)
        for cache in (FILES, INDEXES):
            weakref.finalize(self, cache.forget_later, self._owner)

    @classmethod
    def open(cls, directory: Path) -> "TokenStore":
        path = Path(directory) / MANIFEST
        try:
            manifest, columns = parse_manifest(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            check_finished(Path(directory))
            todo = "give a directory that `arriero data prepare` wrote"
            raise UserError(f"{directory} is not a prepared dataset: {path} does not exist", todo) from None
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})", "make it readable") from None
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is not valid JSON ({error})", REMAKE) from None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error})", REMAKE) from None
        version = manifest.get("version")
        if version != VERSION:
            raise UserError(
                f"{path} has format version {version!r}, this Arriero reads version {VERSION}",
                "prepare the dataset with this version, or use the Arriero that wrote it",
            )
        try:
            Head.model_validate(manifest, strict=True)
        except ValidationError as error:
            raise UserError(f"{path} is damaged ({first_problem(error.errors())})", REMAKE) from None
        return cls(Path(directory), manifest, columns)

    def check_tokenizer(self) -> None:
        """Raise UserError unless the tokenizer file is the one the dataset was made with."""
        path = self.tokenizer_path
        try:
            found = sha256_of_file(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})", REMAKE) from None
        if found != self.tokenizer_sha256:
            raise UserError(
                f"{path} is not the tokenizer this dataset was made with (sha256 {found[:12]}, the manifest "
                f"says {self.tokenizer_sha256[:12]}): its ids mean other text",
                "restore the file from a copy, or prepare the dataset again",
            )

    def read(self, start: int, n: int) -> np.ndarray:
        out = np.empty(n, dtype=self.dtype)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill `out` (contiguous, of this store's dtype) with the tokens from `start` on."""
        self._check_range(start, len(out))
        filled = 0
        for shard, first, count in self.shard_ranges(start, len(out)):
            self._shard(shard).read_into(first, out[filled : filled + count])
            filled += count

    def document_starts(self, start: int, n: int) -> np.ndarray:
        """Return the positions in [start, start + n) at which a document begins, ascending."""
        self._check_range(start, n)
        found = []
        for shard, first, count in self.shard_ranges(start, n):
            starts = self._index(shard).document_starts(first, count)
            found.append(starts + (start - first))
            start += count
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def document_start_before(self, position: int) -> int:
        """Return the position of the first token of the document at `position`."""
        self._check_range(position, 1)
        shard, first, _ = self.shard_ranges(position, 1)[0]
        return position - first + self._index(shard).touching(first, 1)[1][0].item()

    def document_edges(self, shard: int, first: int, end: int) -> np.ndarray:
        """Return the positions at which documents [first, end) of a shard begin and the last one ends."""
        edges = self._index(shard).starts(first, min(end + 1, self.shard_documents(shard)))
        if end == self.shard_documents(shard):
            edges = np.append(edges, self.shard_tokens(shard))
        if first == 0:
            edges[0] = 0
        return edges + (self._ends[shard] - self.shard_tokens(shard))

    def documents_touching(self, shard: int, first: int, count: int) -> tuple[int, np.ndarray]:
        """Return the document of a shard that holds token `first`, and where it and its successors up to
        `first + count` begin."""
        return self._index(shard).touching(first, count)

    def documents_of(self, start: int, n: int) -> np.ndarray:
        """Return the numbers of the documents, counted over the whole dataset, that hold these tokens."""
        found = []
        for shard, first, count in self.shard_ranges(start, n):
            document, starts = self.documents_touching(shard, first, count)
            before = int(self._document_ends[shard]) - self.shard_documents(shard)
            found.append(before + document + np.arange(len(starts)))
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def document_span(self, number: int) -> tuple[int, int]:
        """Return the position of document `number`, counted over the whole dataset, and its length."""
        shard, first, length = self.locate_document(number)
        return int(self._ends[shard]) - self.shard_tokens(shard) + first, length

    def place_of(self, position: int) -> int:
        """Return where a stored token is in this view of the dataset."""
        return position

    def locate_document(self, number: int) -> tuple[int, int, int]:
        """Return the shard of a document, its first token in the shard and its length."""
        shard = int(self._document_ends.searchsorted(number, side="right"))
        inside = number - int(self._document_ends[shard]) + self.shard_documents(shard)
        return shard, *self._index(shard).document_span(inside)

    @cached_property
    def _document_ends(self) -> np.ndarray:
        return np.cumsum(self._documents)

    def shard_tokens(self, shard: int) -> int:
        return int(self._ends[shard] - (self._ends[shard - 1] if shard else 0))

    def shard_documents(self, shard: int) -> int:
        return int(self._documents[shard])

    def shard_path(self, shard: int, suffix: str = "") -> Path:
        return self.directory / f"{self._name(shard)}{suffix}"

    def shard_size_problems(self) -> Iterator[str]:
        """Yield shards that are missing or whose size differs from the manifest."""
        for shard in range(self.shards):
            path = self.shard_path(shard, ".bin")
            expected = self.shard_tokens(shard) * self.dtype.itemsize
            try:
                size = path.stat().st_size
            except OSError as error:
                yield f"{path}: {error.strerror}"
                continue
            if size != expected:
                yield f"{path} has {size} bytes, the manifest says {expected}"

    def close(self) -> None:
        for cache in (FILES, INDEXES):
            cache.forget(self._owner)

    def open_file(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return a file of this dataset from the cache of open files."""
        return FILES.get(self._owner, key, make)

    def _shard(self, shard: int) -> TokenFile:
        return self.open_file(shard, partial(self._open_shard, shard))

    def _open_shard(self, shard: int) -> TokenFile:
        return TokenFile(self.shard_path(shard, ".bin"), self.shard_tokens(shard), self.dtype.itemsize)

    def _index(self, shard: int) -> DocumentIndex:
        """Return an index; small ones are kept in memory, so that their files are not opened again."""
        if index_size(self.shard_documents(shard)) <= SMALL_INDEX:
            return INDEXES.get(self._owner, shard, partial(self._open_index, shard))
        return self.open_file(("index", shard), partial(self._open_index, shard))

    def _open_index(self, shard: int) -> DocumentIndex:
        path = self.shard_path(shard, ".idx")
        return DocumentIndex(path, self.shard_documents(shard), self.dtype.itemsize)

    def _check_range(self, start: int, n: int) -> None:
        if start < 0 or n < 0 or start + n > self.tokens:
            raise IndexError(f"tokens [{start}, {start + n}) of {self.directory}, which has {self.tokens}")

    def shard_ranges(self, start: int, n: int) -> list[tuple[int, int, int]]:
        """Return (shard, first token in it, tokens) of the parts of a range."""
        ranges = []
        shard = int(self._ends.searchsorted(start, side="right"))
        while n > 0:
            begin = int(self._ends[shard - 1]) if shard else 0
            count = min(n, int(self._ends[shard]) - start)
            if count:
                ranges.append((shard, start - begin, count))
            start, n, shard = start + count, n - count, shard + 1
        return ranges
