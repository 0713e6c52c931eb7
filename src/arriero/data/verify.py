"""Is a prepared dataset what its manifest says, byte for byte? All problems are reported."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arriero.data.index import index_problems, read_index
from arriero.data.inspect import tokenizer_of
from arriero.data.scan import Advance, Scan, scan_tokens, unseen
from arriero.data.shards import DTYPES, sha256_of
from arriero.data.store import MANIFEST, TokenStore
from arriero.errors import UserError


class Problem(NamedTuple):
    file: str
    what: str


@dataclass
class Verified:
    """`remarks` are worth knowing and not wrong."""

    problems: list[Problem] = field(default_factory=list)
    remarks: list[Problem] = field(default_factory=list)
    shards: int = 0
    tokens: int = 0
    documents: int = 0
    empty: int = 0
    only_eos: int = 0
    without_eos: int = 0


def verify_dataset(store: TokenStore, workers: int = 1, advance: Advance = unseen) -> Verified:
    """Reads every byte once. Threads are enough: hashing and comparing release the interpreter."""
    manifest = json.loads((store.directory / MANIFEST).read_bytes())
    found = Verified()
    sums = _checksums(store.directory, manifest["checksums"], found)
    found.problems += _tokenizer_problems(store)
    dtype = manifest["dtype"]
    with ThreadPoolExecutor(max_workers=workers) as pool:
        checks = pool.map(lambda k: _check_shard(store, k, dtype, sums, advance), range(store.shards))
        for check in checks:
            _add(found, check)
    allowed = int(store.about.get("documents_without_eos", 0))
    if found.without_eos:
        words = f"{found.without_eos} documents do not end with the end-of-document token {store.eos_id}"
        known = found.without_eos == allowed
        kind = found.remarks if known else found.problems
        kind.append(Problem(MANIFEST, words + (", as when imported" if known else "")))
    found.remarks += _strays(store)
    return found


class _ShardCheck(NamedTuple):
    problems: list[Problem]
    remarks: list[Problem]
    scan: Scan | None


def _check_shard(
    store: TokenStore, number: int, dtype: str, sums: dict[str, str], advance: Advance
) -> _ShardCheck:
    name = store.shard_names[number]
    bin_name, idx_name = f"{name}.bin", f"{name}.idx"
    problems: list[Problem] = []
    lengths, doubts = _check_index(store, number, dtype, sums)
    problems += [Problem(idx_name, doubt) for doubt in doubts]
    path = store.directory / bin_name
    tokens = int(store.shard_tokens[number])
    try:
        size = path.stat().st_size
    except OSError as error:
        return _ShardCheck([*problems, Problem(bin_name, error.strerror or "cannot be read")], [], None)
    itemsize = np.dtype(DTYPES[dtype].numpy).itemsize
    if size != tokens * itemsize:
        problems.append(Problem(bin_name, f"has {size} bytes, the manifest says {tokens * itemsize}"))
    if lengths is None or int(lengths.sum(dtype=np.int64)) * itemsize != size:
        lengths = np.array([size // itemsize])
        without_index = True
    else:
        without_index = False
    try:
        scan = scan_tokens(path, dtype, lengths, store.vocab_size, store.eos_id, advance)
    except OSError as error:
        return _ShardCheck([*problems, Problem(bin_name, error.strerror or "cannot be read")], [], None)
    problems += [
        Problem(bin_name, what) for what in _token_problems(store, bin_name, scan, sums, without_index)
    ]
    remarks = []
    if scan.inner_eos and not without_index:
        remarks.append(Problem(bin_name, f"{scan.inner_eos} end-of-document tokens lie inside documents"))
    return _ShardCheck(problems, remarks, None if without_index else scan)


def _check_index(
    store: TokenStore, number: int, dtype: str, sums: dict[str, str]
) -> tuple[np.ndarray | None, list[str]]:
    """The documents' lengths if they can be trusted, and what is wrong."""
    path = store.directory / f"{store.shard_names[number]}.idx"
    try:
        index = read_index(path)
    except UserError as error:
        return None, [error.what.replace(f"{path} ", "", 1)]
    problems = index_problems(index)
    usable = not problems
    documents = int(store.shard_documents[number])
    if len(index.table) != len(index.lengths) + 1 or (index.table != np.arange(len(index.table))).any():
        problems.append("its documents are not one sequence each")
    if len(index.lengths) != documents:
        problems.append(f"has {len(index.lengths)} documents, the manifest says {documents}")
    if (tokens := int(store.shard_tokens[number])) != index.tokens:
        problems.append(f"has {index.tokens} tokens, the manifest says {tokens}")
    if index.dtype != dtype:
        problems.append(f"is of {index.dtype} tokens, the manifest says {dtype}")
    if (expected := sums.get(path.name)) is None or sha256_of(path.read_bytes()) != expected:
        problems.append(_sum_words(expected))
    return (index.lengths if usable else None), problems


def _token_problems(
    store: TokenStore, name: str, scan: Scan, sums: dict[str, str], without_index: bool
) -> Iterable[str]:
    if scan.sha256 != sums.get(name):
        yield _sum_words(sums.get(name))
    if scan.beyond:
        position, bad = scan.beyond
        yield f"token {position} has id {bad}, the vocabulary has {store.vocab_size}"
    if without_index:
        return
    if scan.doubled is not None:
        yield f"the end-of-document token is doubled at tokens {scan.doubled - 1} and {scan.doubled}"
    if scan.mostly_eos:
        yield (
            f"{scan.only_eos} of {scan.documents} documents hold the end-of-document token alone: "
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
        return [Problem(path.name, "differs from the tokenizer the manifest names: the ids mean other text")]
    try:
        tokenizer = tokenizer_of(store)
    except UserError as error:
        return [Problem(path.name, error.what)]
    if tokenizer.vocab_size > store.vocab_size:
        words = f"has {tokenizer.vocab_size} ids, the manifest says {store.vocab_size}"
        return [Problem(path.name, words)]
    return []


def _strays(store: TokenStore) -> list[Problem]:
    known = set(store.shard_names)
    paths = sorted(p for p in store.directory.iterdir() if p.suffix in (".bin", ".idx", ".tmp"))
    return [Problem(p.name, "is not part of the dataset") for p in paths if p.stem not in known]


def _add(found: Verified, check: _ShardCheck) -> None:
    found.shards += 1
    found.problems += check.problems
    found.remarks += check.remarks
    if check.scan:
        found.tokens += check.scan.tokens
        found.documents += check.scan.documents
        found.empty += check.scan.empty
        found.only_eos += check.scan.only_eos
        found.without_eos += check.scan.without_eos
