"""Compare every byte of a dataset with its manifest and report all problems."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arriero.data.store.manifest import MANIFEST
from arriero.data.store.shards import DTYPES, index_problems, read_index
from arriero.data.store.store import TokenStore
from arriero.data.tokens.tokenizer import tokenizer_of
from arriero.errors import UserError
from arriero.files import Advance, no_progress, sha256_of, sha256_of_file

CHUNK_BYTES = 2**22


class Scan:
    """The result of one pass over a token file.

    `beyond` is the position and id of the first token outside the vocabulary, `doubled` the position of the
    first end-of-document token that follows another within a document.
    """

    def __init__(self, lengths: np.ndarray, vocab_size: int, eos_id: int) -> None:
        ends = np.cumsum(lengths, dtype=np.int64)
        self._last, self._single = ends[lengths > 0] - 1, ends[lengths == 1] - 1
        self._vocab_size, self._eos_id = vocab_size, eos_id
        self._eos = self._with_eos = 0
        self._ends_with_eos = False
        self.sha256 = ""
        self.documents, self.empty = len(lengths), int((lengths == 0).sum())
        self.tokens = self.only_eos = 0
        self.beyond: tuple[int, int] | None = None
        self.doubled: int | None = None

    @property
    def without_eos(self) -> int:
        return len(self._last) - self._with_eos

    @property
    def inner_eos(self) -> int:
        return self._eos - self._with_eos

    @property
    def mostly_eos(self) -> bool:
        """Whether at least every second document is only a separator, as if it had been written twice."""
        return self.documents >= 4 and 2 * self.only_eos >= self.documents

    def add(self, ids: np.ndarray) -> None:
        if self.beyond is None and (ids.max() >= self._vocab_size or ids.min() < 0):
            where = int(np.flatnonzero((ids >= self._vocab_size) | (ids < 0))[0])
            self.beyond = self.tokens + where, int(ids[where]) % 2**32
        is_eos = ids == self._eos_id
        self._eos += int(is_eos.sum())
        self._with_eos += int(is_eos[self._here(self._last, len(ids))].sum())
        self.only_eos += int(is_eos[self._here(self._single, len(ids))].sum())
        if self.doubled is None:
            self._find_doubled(is_eos)
        self._ends_with_eos = bool(is_eos[-1])
        self.tokens += len(ids)

    def _here(self, positions: np.ndarray, n: int) -> np.ndarray:
        lo, hi = np.searchsorted(positions, (self.tokens, self.tokens + n))
        return positions[lo:hi] - self.tokens

    def _find_doubled(self, is_eos: np.ndarray) -> None:
        second = is_eos.copy()
        second[1:] &= is_eos[:-1]
        second[0] &= self._ends_with_eos
        where = np.flatnonzero(second) + self.tokens
        found = np.searchsorted(self._last, where - 1)
        inside = where[self._last[found] != where - 1]
        if len(inside):
            self.doubled = int(inside[0])


def scan_tokens(
    path: Path, dtype: str, lengths: np.ndarray, vocab_size: int, eos_id: int, advance: Advance = no_progress
) -> Scan:
    """Read a token file; `lengths` are the tokens of its documents and add up to the file."""
    layout = DTYPES[dtype].numpy
    scan, digest, buffer = Scan(lengths, vocab_size, eos_id), hashlib.sha256(), bytearray(CHUNK_BYTES)
    with path.open("rb") as file:
        while (got := file.readinto(buffer)) >= layout.itemsize:
            view = memoryview(buffer)[:got]
            digest.update(view)
            scan.add(np.frombuffer(view, dtype=layout, count=got // layout.itemsize))
            advance(got)
    scan.sha256 = digest.hexdigest()
    return scan


_SHARDS_AT_ONCE = 4096


class Problem(NamedTuple):
    file: str
    what: str


@dataclass
class Verified:
    """Problems, remarks (which are not errors) and counts of a verified dataset."""

    problems: list[Problem] = field(default_factory=list)
    remarks: list[Problem] = field(default_factory=list)
    shards: int = 0
    tokens: int = 0
    documents: int = 0
    empty: int = 0
    only_eos: int = 0
    without_eos: int = 0


def verify_dataset(store: TokenStore, workers: int = 1, advance: Advance = no_progress) -> Verified:
    """Read every byte once, with threads, because hashing and comparing release the GIL."""
    manifest = json.loads((store.directory / MANIFEST).read_bytes())
    found = Verified()
    sums = _checksums(store.directory, manifest["checksums"], found)
    found.problems += _tokenizer_problems(store)
    checks = _check_all(store, manifest["dtype"], sums, workers, advance)
    unended = [_add(found, store.shard_path(k, ".bin").name, check) for k, check in enumerate(checks)]
    if found.without_eos == int(store.about.get("documents_without_eos", 0)) or not _ends_documents(store):
        found.remarks += [problem for problem in unended if problem]
    else:
        found.problems += [problem for problem in unended if problem]
    found.problems += _companion_problems(store, sums)
    found.remarks += _strays(store)
    return found


def _ends_documents(store: TokenStore) -> bool:
    """Return whether the dataset was made with a token after each document; a chat template may add more."""
    if "chat_template" in store.about.get("settings", {}):
        return False
    return store.about.get("separators", {}).get("eos", "unknown") is not None


class _ShardCheck(NamedTuple):
    problems: list[Problem]
    remarks: list[Problem]
    scan: Scan | None


def _check_all(
    store: TokenStore, dtype: str, sums: dict[str, str], workers: int, advance: Advance
) -> Iterator[_ShardCheck]:
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for begin in range(0, store.shards, _SHARDS_AT_ONCE):
            numbers = range(begin, min(begin + _SHARDS_AT_ONCE, store.shards))
            yield from pool.map(lambda k: _check_shard(store, k, dtype, sums, advance), numbers)


def _check_shard(
    store: TokenStore, number: int, dtype: str, sums: dict[str, str], advance: Advance
) -> _ShardCheck:
    path = store.shard_path(number, ".bin")
    name = path.name
    lengths, doubts = _check_index(store, number, dtype, sums)
    problems = [Problem(path.with_suffix(".idx").name, doubt) for doubt in doubts]
    itemsize = DTYPES[dtype].numpy.itemsize
    expected = store.shard_tokens(number) * itemsize
    try:
        size = path.stat().st_size
        indexed = lengths is not None and int(lengths.sum(dtype=np.int64)) * itemsize == size
        spans = lengths if lengths is not None and indexed else np.array([size // itemsize])
        scan = scan_tokens(path, dtype, spans, store.vocab_size, store.eos_id, advance)
    except OSError as error:
        return _ShardCheck([*problems, Problem(name, error.strerror or "cannot be read")], [], None)
    if size != expected:
        problems.append(Problem(name, f"has {size} bytes, the manifest says {expected}"))
    problems += [Problem(name, what) for what in _token_problems(store, name, scan, sums, indexed)]
    if not indexed:
        return _ShardCheck(problems, [], None)
    inner = f"{scan.inner_eos} end-of-document tokens are inside documents"
    return _ShardCheck(problems, [Problem(name, inner)] if scan.inner_eos else [], scan)


def _check_index(
    store: TokenStore, number: int, dtype: str, sums: dict[str, str]
) -> tuple[np.ndarray | None, list[str]]:
    """Return the document lengths, or None if the index is unusable, and its problems."""
    path = store.shard_path(number, ".idx")
    try:
        index = read_index(path)
    except UserError as error:
        return None, [error.what.replace(f"{path} ", "", 1)]
    problems = index_problems(index)
    usable = not problems
    documents = store.shard_documents(number)
    if len(index.table) != len(index.lengths) + 1 or (index.table != np.arange(len(index.table))).any():
        problems.append("its documents are not one sequence each")
    if len(index.lengths) != documents:
        problems.append(f"has {len(index.lengths)} documents, the manifest says {documents}")
    if (tokens := store.shard_tokens(number)) != index.tokens:
        problems.append(f"has {index.tokens} tokens, the manifest says {tokens}")
    if index.dtype != dtype:
        problems.append(f"is of {index.dtype} tokens, the manifest says {dtype}")
    if (expected := sums.get(path.name)) is None or sha256_of(path.read_bytes()) != expected:
        problems.append(_sum_words(expected))
    return (index.lengths if usable else None), problems


def _token_problems(
    store: TokenStore, name: str, scan: Scan, sums: dict[str, str], indexed: bool
) -> Iterable[str]:
    if scan.sha256 != sums.get(name):
        yield _sum_words(sums.get(name))
    if scan.beyond:
        position, bad = scan.beyond
        yield f"token {position} has id {bad}, the vocabulary has {store.vocab_size}"
    if not indexed:
        return
    if scan.doubled is not None:
        yield f"the end-of-document token is doubled at tokens {scan.doubled - 1} and {scan.doubled}"
    if scan.mostly_eos:
        yield (
            f"{scan.only_eos} of {scan.documents} documents are only the end-of-document token: "
            "it was written twice"
        )


def _sum_words(expected: str | None) -> str:
    return "its checksum is not listed" if expected is None else "its checksum differs: the file was changed"


def _checksums(directory: Path, entry: dict[str, str], found: Verified) -> dict[str, str]:
    path = directory / entry["file"]
    try:
        content = path.read_bytes()
    except OSError as error:
        found.problems.append(Problem(entry["file"], error.strerror or "cannot be read"))
        return {}
    if sha256_of(content) != entry["sha256"]:
        found.problems.append(Problem(entry["file"], "differs from the checksum in the manifest"))
    lines = (line.split("  ", 1) for line in content.decode(errors="replace").splitlines())
    return {parts[1]: parts[0] for parts in lines if len(parts) == 2}


def _tokenizer_problems(store: TokenStore) -> list[Problem]:
    path = store.tokenizer_path
    try:
        content = path.read_bytes()
    except OSError as error:
        return [Problem(path.name, error.strerror or "cannot be read")]
    if sha256_of(content) != store.tokenizer_sha256:
        return [Problem(path.name, "is not the tokenizer that the manifest names: the ids mean other text")]
    try:
        tokenizer = tokenizer_of(store)
    except UserError as error:
        return [Problem(path.name, error.what)]
    if tokenizer.vocab_size != store.vocab_size:
        words = f"has {tokenizer.vocab_size} ids, the manifest says {store.vocab_size}"
        return [Problem(path.name, words)]
    return []


def _companion_problems(store: TokenStore, sums: dict[str, str]) -> Iterator[Problem]:
    """Check listed files other than tokens, index and tokenizer, such as loss masks."""
    for name, expected in sums.items():
        if name == store.tokenizer_path.name or Path(name).suffix in (".bin", ".idx"):
            continue
        try:
            if sha256_of_file(store.directory / name) != expected:
                yield Problem(name, _sum_words(expected))
        except OSError as error:
            yield Problem(name, error.strerror or "cannot be read")


def _strays(store: TokenStore) -> list[Problem]:
    known = {store.shard_path(shard).name for shard in range(store.shards)}
    paths = sorted(p for p in store.directory.iterdir() if p.suffix in (".bin", ".idx", ".tmp"))
    return [Problem(p.name, "is not part of the dataset") for p in paths if p.stem not in known]


def _add(found: Verified, name: str, check: _ShardCheck) -> Problem | None:
    """Add the counts of a shard; return its documents without an end token, which are judged over all."""
    found.shards += 1
    found.problems += check.problems
    found.remarks += check.remarks
    if (scan := check.scan) is None:
        return None
    for count in ("tokens", "documents", "empty", "only_eos", "without_eos"):
        setattr(found, count, getattr(found, count) + getattr(scan, count))
    unended = scan.without_eos
    return Problem(name, f"{unended} documents do not end with the end token") if unended else None
