"""Where text comes from: what the user names becomes a list of input files, always in the same order."""

import json
import os
import sysconfig
from collections.abc import Sequence
from glob import iglob
from pathlib import Path
from typing import NamedTuple

from arriero.data.text.synthetic import DEFAULT_BYTES
from arriero.errors import UserError
from arriero.units import parse_bytes

STDLIB = "builtin:stdlib"
SYNTHETIC = "builtin:synthetic"
HUB = "hf://"
DANGLING = "dangling"

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


class Document(NamedTuple):
    name: str
    text: str


class Input(NamedTuple):
    """One file. `kind`: jsonl, parquet, arrow, text (one document a file), synthetic (size in bytes) or
    dangling (a link to nothing, left out by --skip-bad)."""

    kind: str
    compression: str
    path: str
    size: int
    mtime_ns: int


class _Found(NamedTuple):
    """`file` is the same for all names of one file."""

    input: Input
    file: tuple[int, int] | str


def find_inputs(sources: Sequence[str], skip_bad: bool = False) -> list[Input]:
    """Sources in the order given; the files of a folder or a pattern in the order of their paths.

    A file with several names in one folder or pattern is read once, by the first of them.
    """
    inputs: list[Input] = []
    seen: dict[tuple[int, int] | str, str] = {}
    for source in sources:
        once: dict[tuple[int, int] | str, Input] = {}
        for found in _inputs_of(source):
            once.setdefault(found.file, found.input)
        for file, found in once.items():
            if file in seen:
                raise UserError(*_twice(seen[file], found))
            if found.kind == DANGLING and not skip_bad:
                raise UserError(
                    f"{found.path} is a link to nothing",
                    "restore the file it names, or pass --skip-bad to leave it out and count it",
                )
            seen[file] = found.path
        inputs += once.values()
    return inputs


def _twice(first: str, second: Input) -> tuple[str, str]:
    if second.kind == "synthetic":
        return (
            f"{first} and {second.path} begin with the same documents",
            f"name {SYNTHETIC} once, with the whole size",
        )
    names = second.path if first == second.path else f"{first} and {second.path} are one file: it"
    return f"{names} is named twice", "its documents would be trained on twice; name it once"


def absolute(source: str) -> str:
    """The same source, whatever the working directory."""
    return source if source.startswith(("builtin:", HUB)) else str(Path(source).absolute())


def _inputs_of(source: str) -> list[_Found]:
    if source == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        return [_input(folder / document.name, "text") for document in stdlib_documents(folder)]
    if source.startswith(SYNTHETIC):
        return [_Found(_synthetic(source), SYNTHETIC)]
    if source.startswith("builtin:"):
        raise UserError(f"'{source}' is not a built-in source", f"choose {STDLIB} or {SYNTHETIC}")
    if source.startswith(HUB):
        from arriero.data.text.hub import download

        return [_input(path, "arrow") for path in download(source.removeprefix(HUB))]
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return [_input(path)]
    matches = sorted(map(Path, iglob(source, recursive=True)))  # noqa: PTH207 (a pattern may be absolute)
    found = [each for match in matches for each in (_folder(match) if match.is_dir() else [_input(match)])]
    if not found:
        raise UserError(
            f"source '{source}' does not exist",
            f"give files, folders, patterns, {STDLIB}, {SYNTHETIC} or {HUB}NAME",
        )
    return found


def _folder(folder: Path) -> list[_Found]:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        if len(splits) > 1:
            choices = ", ".join(str(folder / split) for split in splits)
            raise UserError(f"{folder} holds several splits", f"name the one to train on: {choices}")
        return _folder(folder / splits[0])
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved_dataset(folder)
    found: list[Path] = []
    visited: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        about = Path(parent).stat()
        if (about.st_dev, about.st_ino) in visited:
            folders.clear()
            continue
        visited.add((about.st_dev, about.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    if not found:
        raise UserError(f"{folder} has no files", "give a folder that holds text, JSONL or Parquet files")
    return [_input(path) for path in sorted(found, key=lambda path: path.relative_to(folder).as_posix())]


def _saved_dataset(folder: Path) -> list[_Found]:
    """A Hugging Face `save_to_disk` directory: its state file says which Arrow files hold it."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        return [_input(folder / file["filename"], "arrow") for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / 'state.json'} is damaged ({error!r})", "save the dataset again") from None


def _input(path: Path, kind: str | None = None) -> _Found:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = _COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    if compression:
        suffixes.pop()
    kind = kind or (_KINDS.get(suffixes[-1], "text") if suffixes else "text")
    if compression and kind in ("parquet", "arrow"):
        raise UserError(f"{path} is a compressed {kind} file", "unpack it: the format compresses by itself")
    try:
        about = path.stat()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            return _Found(Input(DANGLING, "", str(path.absolute()), 0, 0), str(path.absolute()))
        raise UserError(
            f"cannot read {path} ({error.strerror})", "check the path and its permissions"
        ) from None
    found = Input(kind, compression, str(path.absolute()), about.st_size, about.st_mtime_ns)
    return _Found(found, (about.st_dev, about.st_ino))


def _synthetic(source: str) -> Input:
    size = source.removeprefix(SYNTHETIC)
    try:
        amount = parse_bytes(size.removeprefix(":")) if size else DEFAULT_BYTES
    except ValueError:
        raise UserError(
            f"'{source}' has no size that can be read", f"write it like {SYNTHETIC}:50MB"
        ) from None
    return Input("synthetic", "", source, amount, 0)


def stdlib_documents(folder: Path | None = None) -> list[Document]:
    """The Python standard library's own source without its tests, one file a document, in order of path."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(_python_files(folder), key=lambda path: path.relative_to(folder).as_posix()):
        try:
            text = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text:
            documents.append(Document(path.relative_to(folder).as_posix(), text))
    if not documents:
        raise UserError(
            f"the Python standard library at {folder} has no source files",
            "use a Python that carries its sources, or name a prepared dataset",
        )
    return documents


def _python_files(folder: Path) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [Path(parent, name) for name in files if name.endswith(".py")]
    return found
