"""`manifest.json`, the last file of a checkpoint: what makes a directory one, and how damage is noticed."""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from arriero.errors import UserError
from arriero.files import sha256_of_file, sha256_of_json

MANIFEST = "manifest.json"
FORMAT = 1
_THREADS = 8


class Invalid(Exception):
    """Why a directory is not a checkpoint that can be used: its content, once read, proves it damaged."""


class Newer(Invalid):
    """Possibly valid, but written by a later version than this one."""


def unreadable(path: Path, error: OSError) -> UserError:
    """A read error says nothing about the content, so it must never count as damage."""
    return UserError(
        f"{path} cannot be read ({error.strerror or error})",
        "check its permissions and the file system, then run the same command again; nothing was changed",
    )


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
        return (json.dumps(content | {"sha256": sha256_of_json(content)}, indent=1) + "\n").encode()


def read_manifest(directory: Path) -> Manifest:
    try:
        raw = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise Invalid(f"has no {MANIFEST}") from None
    except OSError as error:
        raise unreadable(directory / MANIFEST, error) from None
    try:
        content = json.loads(raw)
        if content["format"] > FORMAT:
            made_by = content.get("versions", {}).get("arriero", "a later version")
            raise Newer(f"was written by a newer version (format {content['format']}, arriero {made_by})")
        if content.pop("sha256") != sha256_of_json(content):
            raise Invalid(f"{MANIFEST} is damaged (its checksum differs)")
        files = {name: File(**file) for name, file in content.pop("files").items()}
        return Manifest(files=files, **content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Invalid(f"{MANIFEST} is damaged ({type(error).__name__})") from None


def damaged_files(
    directory: Path,
    manifest: Manifest,
    only: Iterable[str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
    report_unreadable: bool = False,
) -> dict[str, str]:
    """Names of the files whose content differs from what was written, each with its problem.

    A read error raises UserError, or is listed among the problems with `report_unreadable`.
    """
    names = list(manifest.files if only is None else only)

    def judge(name: str) -> str | None:
        try:
            return _problem(directory / name, manifest.files[name], progress)
        except OSError as error:
            if not report_unreadable:
                raise unreadable(directory / name, error) from None
            return f"cannot be read ({error.strerror or error})"

    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(judge, names))
    return {name: problem for name, problem in zip(names, found, strict=True) if problem}


def wrong_sizes(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Compare sizes only, without reading the files."""
    problems = {}
    for name, file in manifest.files.items():
        try:
            problem = _size_problem(directory / name, file)
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})"
        if problem:
            problems[name] = problem
    return problems


def _size_problem(path: Path, file: File) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    return None if size == file.size else f"has {size:,} bytes, not {file.size:,}"


def _problem(path: Path, file: File, progress: Callable[[int], None]) -> str | None:
    if problem := _size_problem(path, file):
        return problem
    return None if sha256_of_file(path, progress) == file.sha256 else "has other bytes than were written"
