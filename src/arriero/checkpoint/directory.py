"""The checkpoints of a run directory: manifest, publication, damage, retention and disk space.

A checkpoint is `checkpoints/step-00001000/`. It is published by one rename, after its last file,
`manifest.json`, was written.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from arriero.errors import UserError
from arriero.files import (
    Advance,
    check_free_space,
    check_quota,
    free_bytes,
    no_progress,
    publish_directory,
    reserve_bytes,
    sha256_of_file,
    sha256_of_json,
)
from arriero.units import counted, human_bytes

MANIFEST = "manifest.json"
FORMAT = 1
_THREADS = 8


class Invalid(Exception):
    """The content of a directory is not a valid checkpoint."""


class Newer(Invalid):
    """The checkpoint was written by a newer version of Arriero, and may be valid."""


def unreadable(path: Path, error: OSError) -> UserError:
    """Return the error for a file that cannot be read, which must not count as damage."""
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
    """The content of `manifest.json`. `tensors` has dtype and shape; `tokenizer` is a sha256."""

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


def find_damage(
    directory: Path,
    manifest: Manifest,
    only: Iterable[str] | None = None,
    progress: Advance = no_progress,
    report_unreadable: bool = False,
    sizes_only: bool = False,
) -> dict[str, str]:
    """Return the files whose content, or size, differs from what was written, each with its problem.

    A read error raises UserError, or is listed among the problems with `report_unreadable`.
    """
    names = list(manifest.files if only is None else only)

    def judge(name: str) -> str | None:
        try:
            return _problem(directory / name, manifest.files[name], progress, sizes_only)
        except OSError as error:
            if not report_unreadable:
                raise unreadable(directory / name, error) from None
            return f"cannot be read ({error.strerror or error})"

    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(judge, names))
    return {name: problem for name, problem in zip(names, found, strict=True) if problem}


def _problem(path: Path, file: File, progress: Advance, size_only: bool) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    if size != file.size:
        return f"has {size:,} bytes, not {file.size:,}"
    if size_only or sha256_of_file(path, progress) == file.sha256:
        return None
    return "has other bytes than were written"


CHECKPOINTS = "checkpoints"
UNFINISHED = ".tmp"
DAMAGED = ".damaged"
_REPLACED = ".replaced"
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(rf"step-(\d{{8,}})\.(?:{DAMAGED[1:]}|{_REPLACED[1:]})(?:-\d+)?")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint, judged by its manifest. `problem` says why it cannot be used; `damaged`: is it damage."""

    directory: Path
    step: int
    manifest: Manifest | None
    problem: str | None = None
    damaged: bool = False


def directory_name(step: int) -> str:
    return f"step-{step:08d}"


def find_checkpoints(run_dir: Path, report_unreadable: bool = False) -> list[SavedCheckpoint]:
    """Return the published checkpoints by step, judged by their manifests alone.

    A manifest that cannot be read raises UserError, or becomes a problem with `report_unreadable`.
    """
    found = []
    for path in _entries(run_dir):
        if match := _NAME.fullmatch(path.name):
            try:
                saved = _read_saved(path, int(match[1]))
            except UserError as error:
                if not report_unreadable:
                    raise
                saved = SavedCheckpoint(path, int(match[1]), None, error.what)
            if saved is not None:
                found.append(saved)
    return sorted(found, key=lambda saved: saved.step)


def find_renamed(run_dir: Path) -> list[tuple[int, Path]]:
    """Return step and directory of each checkpoint that was renamed because it was damaged or replaced."""
    found = [(_ASIDE.fullmatch(path.name), path) for path in _entries(run_dir)]
    return sorted((int(match[1]), path) for match, path in found if match)


def _entries(run_dir: Path) -> list[Path]:
    folder = run_dir / CHECKPOINTS
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(folder, error) from None


def _read_saved(path: Path, step: int) -> SavedCheckpoint | None:
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return None
    except OSError as error:
        # the target of a link may not be mounted, which is not damage
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            return None
        raise unreadable(path, error) from None
    try:
        manifest = read_manifest(path)
    except Invalid as error:
        return SavedCheckpoint(path, step, None, str(error), damaged=not isinstance(error, Newer))
    if manifest.step != step:
        return SavedCheckpoint(
            path, step, manifest, f"holds step {manifest.step} according to its manifest", True
        )
    return SavedCheckpoint(path, step, manifest)


def remove_unfinished(run_dir: Path) -> list[str]:
    """Remove checkpoints that were never published; return remarks, also on those that cannot be removed."""
    remarks = []
    for path in _entries(run_dir):
        if path.name.startswith("step-") and path.name.endswith(UNFINISHED):
            problem = remove(path)
            done = "removed" if problem is None else f"it cannot be removed ({problem})"
            remarks.append(f"checkpoint {path.name} was never finished: {done}")
    return remarks


def delete(path: Path) -> str | None:
    """Delete a checkpoint; return the problem if not all of it could be deleted.

    It is renamed first, so that a half-deleted checkpoint does not look like a damaged one.
    """
    gone = free_name(path.with_name(f"{path.name}.old"), UNFINISHED)
    try:
        path.rename(gone)
    except OSError as error:
        return str(error)
    return remove(gone)


def remove(path: Path) -> str | None:
    """Remove a file or directory as far as possible; return the first problem."""
    problems: list[BaseException] = []
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=lambda _call, _path, info: problems.append(info[1]))
    else:
        try:
            path.unlink()
        except OSError as error:
            problems.append(error)
    serious = [problem for problem in problems if not isinstance(problem, FileNotFoundError)]
    return str(serious[0]) if serious else None


def rename_aside(path: Path, suffix: str = DAMAGED) -> Path:
    """Rename a checkpoint so that it is neither used nor deleted; raise OSError if that fails."""
    aside = free_name(path.with_name(path.name + suffix))
    path.rename(aside)
    return aside


def free_name(path: Path, suffix: str = "") -> Path:
    """Return path + suffix, or the first of path-2, path-3, ... that does not exist."""
    candidate, number = path.with_name(path.name + suffix), 2
    while os.path.lexists(candidate):
        candidate, number = path.with_name(f"{path.name}-{number}{suffix}"), number + 1
    return candidate


def publish(path: Path, final: Path) -> None:
    """Publish a checkpoint by one rename. An unusable one with the same name is renamed, not deleted."""
    if os.path.lexists(final):
        rename_aside(final, _REPLACED)
    publish_directory(path, final)


def resolve_checkpoint(path: Path) -> Path:
    """Return a checkpoint given by its own path, or the newest of a run directory."""
    if (path / CHECKPOINTS).is_dir():
        usable = [saved for saved in find_checkpoints(path) if saved.problem is None]
        if not usable:
            raise UserError(f"{path} has no checkpoint that can be used", "see `arriero ckpt list`")
        return usable[-1].directory
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}", "give a checkpoint, or the directory of a run")
    return path


class SavedStep(NamedTuple):
    step: int
    tokens: int


def expired_steps(saved: Sequence[SavedStep], keep: int, period: int | None) -> list[int]:
    """Return the steps to delete: all but the newest `keep` and the first after each `period` of tokens."""
    ordered = sorted(saved)
    gone, before = [], 0
    for number, mark in enumerate(ordered):
        is_permanent = period is not None and mark.tokens // period > before // period
        if number < len(ordered) - keep and not is_permanent:
            gone.append(mark.step)
        before = mark.tokens
    return gone


@dataclass(frozen=True)
class DiskSpace:
    """Free bytes, and how many checkpoints of `each` bytes fit."""

    free: int
    each: int

    @property
    def fits(self) -> int:
        return self.free // max(1, self.each)

    def __str__(self) -> str:
        which = f"{counted(self.fits, 'checkpoint')} of {human_bytes(self.each)}"
        return f"{which} still fit{'s' if self.fits == 1 else ''} ({human_bytes(self.free)} free)"


def disk_space(path: Path, each: int) -> DiskSpace:
    return DiskSpace(free_bytes(path), each)


def require_space(path: Path, each: int) -> DiskSpace:
    todo = "free some space, or set run.dir to a larger disk"
    check_free_space(path, each, "a checkpoint", todo)
    check_quota(path, each, "a checkpoint", todo, reserve_bytes)
    return disk_space(path, each)
