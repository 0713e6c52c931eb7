"""`manifest.json`, the last file of a checkpoint: what makes a directory one, and how damage is noticed."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1
_CHUNK = 2**22
_THREADS = 8


class Invalid(Exception):
    """Why a directory is not a checkpoint that can be used."""


class Newer(Invalid):
    """It may well be sound, for a later version than this one."""


@dataclass(frozen=True)
class File:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`tensors`: the type and shape of each; `tokenizer`: the sha256 of its definition."""

    step: int
    tokens: int
    time: float
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    tokenizer: str
    tensors: Mapping[str, tuple[str, list[int]]]
    files: Mapping[str, File]
    format: int = field(default=FORMAT)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    def to_json(self) -> bytes:
        content = asdict(self)
        return (json.dumps(content | {"sha256": _seal(content)}, indent=1) + "\n").encode()


def read_manifest(directory: Path) -> Manifest:
    try:
        raw = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise Invalid(f"has no {MANIFEST}") from None
    except OSError as error:
        raise Invalid(f"{MANIFEST} cannot be read ({error.strerror})") from None
    try:
        content = json.loads(raw)
        if content["format"] > FORMAT:
            made_by = content.get("versions", {}).get("arriero", "a later version")
            raise Newer(f"was written by a newer version (format {content['format']}, arriero {made_by})")
        if content.pop("sha256") != _seal(content):
            raise Invalid(f"{MANIFEST} is damaged (its checksum differs)")
        files = {name: File(**file) for name, file in content.pop("files").items()}
        return Manifest(files=files, **content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Invalid(f"{MANIFEST} is damaged ({type(error).__name__})") from None


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damaged_files(
    directory: Path,
    manifest: Manifest,
    only: Iterable[str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, str]:
    """What is wrong with each file that is not as it was written; several are read at a time."""
    names = list(manifest.files if only is None else only)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: _problem(directory / name, manifest.files[name], progress), names)
    return {name: problem for name, problem in zip(names, found, strict=True) if problem}


def wrong_sizes(directory: Path, manifest: Manifest) -> dict[str, str]:
    """The quick look: reads nothing."""
    found = {name: _size_problem(directory / name, file) for name, file in manifest.files.items()}
    return {name: problem for name, problem in found.items() if problem}


def _size_problem(path: Path, file: File) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    return None if size == file.size else f"has {size:,} bytes, not {file.size:,}"


def _problem(path: Path, file: File, progress: Callable[[int], None]) -> str | None:
    try:
        if problem := _size_problem(path, file):
            return problem
        return None if sha256_of_file(path, progress) == file.sha256 else "has other bytes than were written"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def sha256_of_file(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            progress(count)
    return digest.hexdigest()


def make_durable(path: Path, drop: bool = False) -> None:
    """On the disk, not only on its way; `drop` lets the next reader meet the disk, not the memory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        if drop and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
