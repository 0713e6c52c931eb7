"""Sources of text: what the user names becomes a list of input files, always in the same order."""

import errno
import json
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import has_magic, iglob
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from arriero.data.text.builtin import DEFAULT_BYTES, stdlib_documents
from arriero.data.text.formats import ChatTemplate, PromptTemplate, RecordFormat
from arriero.errors import UserError
from arriero.units import parse_bytes

STDLIB = "builtin:stdlib"
SYNTHETIC = "builtin:synthetic"
HUB = "hf://"
NAMED = ("builtin:", HUB)
DANGLING = "dangling"

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_TABLES = {".csv", ".tsv"}
_UNFINISHED = (".tmp", ".part", ".partial", ".incomplete", ".crdownload", ".bak", "~")
SHOWN_NAMES = 5


class Input(NamedTuple):
    """One file. `kind` is jsonl, parquet, arrow, text (one document per file), synthetic (`size` in bytes) or
    dangling (a broken link, skipped by --skip-bad). `source` is the number of the source that names it."""

    kind: str
    compression: str
    path: str
    size: int
    mtime_ns: int
    source: int = 0


class Select(NamedTuple):
    """Which files are read, by patterns of file names or of paths below the folder, and as what.

    `read_as` is auto (by suffix; a folder that mixes record files with others is rejected), mixed (by suffix)
    or one kind for all files.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    read_as: str = "auto"

    def takes(self, path: Path, folder: Path) -> bool:
        relative = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()

        def fits(pattern: str) -> bool:
            return fnmatchcase(relative if "/" in pattern else path.name, pattern)

        return (not self.include or any(map(fits, self.include))) and not any(map(fits, self.exclude))

    @property
    def kind(self) -> str | None:
        return None if self.read_as in ("auto", "mixed") else self.read_as


ALL_FILES = Select()


@dataclass(frozen=True)
class TextSources:
    """The sources a user named and how to read them.

    `columns` are pairs of a source, folder, file or pattern and the column of its text, `templates` pairs of
    such a place, or "" for all sources, and a template. `chat` reads messages from all sources.
    """

    names: tuple[str, ...]
    column: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    select: Select = ALL_FILES
    skip_bad: bool = False
    templates: tuple[tuple[str, PromptTemplate], ...] = ()
    chat: ChatTemplate | None = None

    def find(self) -> list[Input]:
        """List the inputs; raise UserError where it is not clear how to read a file."""
        inputs = find_inputs(self.names, self.skip_bad, self.select)
        for number, group in groupby(inputs, key=lambda each: each.source):
            name, files = self.names[number], list(group)
            if self.select.read_as == "auto" and not name.startswith(NAMED):
                _check_suffixes(name, files)
                if not self.select.include:
                    _check_one_kind(name, files)
        given = [("--column", "COLUMN", *each) for each in self.columns]
        given += [("--template", "TEMPLATE", place, each.template) for place, each in self.templates if place]
        for option, word, place, value in given:
            if not any(self._covers(place, each) for each in inputs):
                raise UserError(
                    f"{option} {place}={value} matches no input",
                    f"write SOURCE={word} with a source, a folder, a file or a pattern of this command",
                )
        return inputs

    def left_out(self) -> list[str]:
        """List the files that the user named and that --include or --exclude leave out."""
        files = [Path(name) for name in self.names if not name.startswith(NAMED) and Path(name).is_file()]
        return [str(path) for path in files if not self.select.takes(path, path.parent)]

    @property
    def masks_loss(self) -> bool:
        """Whether documents have parts that the loss excludes."""
        return bool(self.templates) or self.chat is not None

    def format_of(self, each: Input) -> "str | RecordFormat":
        """Return what makes a text of a record of this input: a template, or a column."""
        if self.chat is not None:
            return self.chat
        matching = [made for place, made in self.templates if not place or self._covers(place, each)]
        return matching[-1] if matching else self.column_of(each)

    def column_of(self, each: Input) -> str:
        """Return the last matching SOURCE=COLUMN, else the plain column, else the source's usual one."""
        for place, column in reversed(self.columns):
            if self._covers(place, each):
                return column
        return self.column or _usual_column(self.names[each.source])

    @property
    def plain_column(self) -> str:
        return self.column or _usual_column(self.names[0])

    def _covers(self, place: str, each: Input) -> bool:
        if place == self.names[each.source]:
            return True
        whole = os.path.abspath(place)  # noqa: PTH100 (also removes a trailing slash)
        return each.path == whole or each.path.startswith(f"{whole}/") or fnmatchcase(each.path, whole)


class _Found(NamedTuple):
    """An input and the identity of its file, which is the same for all its names."""

    input: Input
    file: tuple[int, int] | str


def _usual_column(source: str) -> str:
    if source.startswith(HUB):
        from arriero.data.text.hub import hub_corpus

        return hub_corpus(source.removeprefix(HUB)).column
    return "text"


def find_inputs(sources: Sequence[str], skip_bad: bool = False, select: Select = ALL_FILES) -> list[Input]:
    """List inputs in the order of the sources; the files of a folder or pattern in the order of their paths.

    A file with several names in one folder or pattern is read once, by the first of them.
    """
    inputs: list[Input] = []
    seen: dict[tuple[int, int] | str, str] = {}
    for number, source in enumerate(sources):
        once: dict[tuple[int, int] | str, Input] = {}
        for found in _inputs_of(source, select):
            once.setdefault(found.file, found.input._replace(source=number))
        for file, found in once.items():
            if file in seen:
                raise UserError(*_named_twice(seen[file], found))
            if found.kind == DANGLING and not skip_bad:
                raise UserError(
                    f"{found.path} is a broken link",
                    "restore the file it names, or pass --skip-bad to skip and count it",
                )
            seen[file] = found.path
        inputs += once.values()
    if not inputs:
        raise UserError("no input matches --include and --exclude", "check the patterns and their quotes")
    return inputs


def _named_twice(first: str, second: Input) -> tuple[str, str]:
    if second.kind == "synthetic":
        return (
            f"{first} and {second.path} begin with the same documents",
            f"name {SYNTHETIC} once, with the whole size",
        )
    names = second.path if first == second.path else f"{first} and {second.path} are one file: it"
    return f"{names} is named twice", "its documents would be trained on twice; name it once"


def check_output_outside(
    sources: Sequence[str],
    directory: Path,
    what: str = "the output",
    todo: str = "write it outside the folders it is made from",
) -> None:
    """Raise UserError for an output inside a source, which the next prepare would read as text."""
    target = _resolved(directory)
    for source in sources:
        if source.startswith(NAMED) or (path := Path(source)).is_file():
            continue
        if path.is_dir():
            inside = target.is_relative_to(_resolved(path))
        else:
            names = ("manifest.json", "tokenizer.json", "inputs.jsonl", "checksums.sha256", "0.bin", "0.idx")
            places = [target, *target.parents, *(target / name for name in names)]
            pattern = _resolved_pattern(path.absolute())
            inside = any(_matches(place.parts, pattern) for place in places)
        if inside:
            raise UserError(f"{what} {directory} lies in the source {source}", todo)


def _resolved(path: Path) -> Path:
    """Resolve links; unlike Path.resolve before Python 3.13, a link loop raises no RuntimeError."""
    return Path(os.path.realpath(path))


def _resolved_pattern(pattern: Path) -> tuple[str, ...]:
    """Return the parts of a pattern with the links of its leading folders resolved."""
    parts = pattern.parts
    fixed = next((i for i, part in enumerate(parts) if has_magic(part)), len(parts))
    return (*_resolved(Path(*parts[:fixed])).parts, *parts[fixed:])


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    visible = pattern[0].startswith(".") or not parts[0].startswith(".")
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (visible and _matches(parts[1:], pattern))
    return visible and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def absolute(source: str) -> str:
    """Return the source in a form that does not depend on the working directory."""
    return source if source.startswith(NAMED) else str(Path(source).absolute())


def _inputs_of(source: str, select: Select) -> list[_Found]:
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
        if not (found := _folder(path, select)):
            raise UserError(f"no file in {path} matches --include and --exclude", "check the patterns")
        return found
    # iglob drops a path that exists but looks like a pattern, such as "a[1].txt"
    matches = [path] if path.is_file() else sorted(map(Path, iglob(source, recursive=True)))  # noqa: PTH207
    if not matches:
        raise UserError(
            f"source '{source}' does not exist",
            f"give files, folders, patterns, {STDLIB}, {SYNTHETIC} or {HUB}NAME",
        )
    found = []
    for match in matches:
        if match.is_dir():
            found += _folder(match, select)
        elif select.takes(match, match.parent):
            found.append(_input(match, select.kind))
    return found


def _folder(folder: Path, select: Select) -> list[_Found]:
    if (folder / "dataset_dict.json").is_file():
        splits = _splits(folder / "dataset_dict.json")
        if len(splits) > 1:
            choices = ", ".join(str(folder / split) for split in splits)
            raise UserError(f"{folder} holds several splits", f"name the one to train on: {choices}")
        return _folder(folder / splits[0], select)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved_dataset(folder / "state.json")
    paths: list[Path] = []
    visited: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        about = Path(parent).stat()
        if (about.st_dev, about.st_ino) in visited:
            folders.clear()
            continue
        visited.add((about.st_dev, about.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += [Path(parent, name) for name in files if not name.startswith(".")]
    if not paths:
        raise UserError(f"{folder} has no files", "give a folder that holds text, JSONL or Parquet files")
    paths.sort(key=lambda path: path.relative_to(folder).as_posix())
    return [_input(path, select.kind) for path in paths if select.takes(path, folder)]


def _parse_saved(path: Path, parse: Callable[[dict], list]) -> list:
    """Read a JSON file of a Hugging Face `save_to_disk` directory."""
    try:
        return parse(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error!r})", "save the dataset again") from None


def _splits(path: Path) -> list[str]:
    splits = _parse_saved(path, lambda saved: saved["splits"])
    if not isinstance(splits, list) or not splits or not all(_is_name(split) for split in splits):
        raise UserError(f"{path} is damaged (splits: {splits!r})", "save the dataset again")
    return splits


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and not set(value) & {"/", "\0"}


def _saved_dataset(state: Path) -> list[_Found]:
    """List the Arrow files of a `save_to_disk` directory."""
    names = _parse_saved(
        state, lambda saved: [state.parent / file["filename"] for file in saved["_data_files"]]
    )
    return [_input(path, "arrow") for path in names]


def _check_one_kind(source: str, inputs: Sequence[Input]) -> None:
    """Reject record files beside other files: a README.md must not become a document by accident."""
    records = [each.path for each in inputs if each.kind in _KINDS.values()]
    others = [each.path for each in inputs if each.kind == "text"]
    if records and others:
        endings = sorted({"".join(_ending(Path(path))) for path in records})[:3]
        choice = " ".join(f"--include '*{ending}'" for ending in endings)
        raise UserError(
            f"{source} mixes record files ({names_of(records)}) with other files ({names_of(others)})",
            f"pass {choice} to read only those, --as mixed to read each other file as one document too, or "
            "--as text to read every file as one document",
        )


def _check_suffixes(source: str, inputs: Sequence[Input]) -> None:
    """Reject tables, and names that look like an unfinished or renamed record file."""
    unclear = [each.path for each in inputs if each.kind == "text" and _is_unclear(Path(each.path))]
    if unclear:
        raise UserError(
            f"{source}: the suffix does not say how to read {names_of(unclear)}",
            "pass --exclude PATTERN to leave such files out, --as jsonl if they hold JSON lines, or --as "
            "mixed to make each of them one document",
        )


def _is_unclear(path: Path) -> bool:
    suffixes, _ = _suffixes(path)
    looks_like_records = any(suffix in _KINDS for suffix in suffixes)
    return looks_like_records or path.name.endswith(_UNFINISHED) or bool(_TABLES & set(suffixes[-1:]))


def _ending(path: Path) -> list[str]:
    return path.suffixes[-2 if _suffixes(path)[1] else -1 :]


def names_of(paths: Sequence[str]) -> str:
    shown = ", ".join(Path(path).name for path in paths[:SHOWN_NAMES])
    return shown + (f" and {len(paths) - SHOWN_NAMES:,} more" if len(paths) > SHOWN_NAMES else "")


def _input(path: Path, kind: str | None = None) -> _Found:
    suffixes, compression = _suffixes(path)
    kind = kind or (_KINDS.get(suffixes[-1], "text") if suffixes else "text")
    if compression and kind in ("parquet", "arrow"):
        raise UserError(f"{path} is a compressed {kind} file", "unpack it: the format compresses by itself")
    try:
        about = path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink():
            return _Found(Input(DANGLING, "", str(path.absolute()), 0, 0), str(path.absolute()))
        raise UserError(
            f"cannot read {path} ({error.strerror})", "check the path and its permissions"
        ) from None
    found = Input(kind, compression, str(path.absolute()), about.st_size, about.st_mtime_ns)
    return _Found(found, (about.st_dev, about.st_ino))


def _suffixes(path: Path) -> tuple[list[str], str]:
    """Return the suffixes in lower case without that of the compression, and the compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = _COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    return (suffixes[:-1] if compression else suffixes), compression


def _synthetic(source: str) -> Input:
    size = source.removeprefix(SYNTHETIC)
    try:
        amount = parse_bytes(size.removeprefix(":")) if size else DEFAULT_BYTES
    except ValueError:
        raise UserError(f"'{source}' has no valid size", f"write it like {SYNTHETIC}:50MB") from None
    return Input("synthetic", "", source, amount, 0)
