"""The checkpoints of a run directory: `checkpoints/step-00001000/`, published by one rename."""

import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from arriero.checkpoint.manifest import Invalid, Manifest, Newer, read_manifest, unreadable
from arriero.errors import UserError
from arriero.files import publish_directory

CHECKPOINTS = "checkpoints"
UNFINISHED = ".tmp"
DAMAGED = ".damaged"
_REPLACED = ".replaced"
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(rf"step-(\d{{8,}})\.(?:{DAMAGED[1:]}|{_REPLACED[1:]})(?:-\d+)?")


@dataclass(frozen=True)
class Saved:
    """A checkpoint by its manifest. `problem`: why it cannot be used; `damaged`: its content proves that."""

    directory: Path
    step: int
    manifest: Manifest | None
    problem: str | None = None
    damaged: bool = False


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def saved_in(run_dir: Path, report_unreadable: bool = False) -> list[Saved]:
    """The published checkpoints by step, judged by their manifests alone.

    A manifest that cannot be read raises UserError, or becomes a problem with `report_unreadable`.
    """
    found = []
    for path in _entries(run_dir):
        if match := _NAME.fullmatch(path.name):
            try:
                saved = _look(path, int(match[1]))
            except UserError as error:
                if not report_unreadable:
                    raise
                saved = Saved(path, int(match[1]), None, error.what)
            if saved is not None:
                found.append(saved)
    return sorted(found, key=lambda saved: saved.step)


def aside_in(run_dir: Path) -> list[tuple[int, Path]]:
    """Step and directory of each checkpoint that was renamed aside."""
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


def _look(path: Path, step: int) -> Saved | None:
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return None
    except OSError as error:
        # a link whose target is not mounted is no proof of damage
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            return None
        raise unreadable(path, error) from None
    try:
        manifest = read_manifest(path)
    except Invalid as error:
        return Saved(path, step, None, str(error), damaged=not isinstance(error, Newer))
    if manifest.step != step:
        return Saved(path, step, manifest, f"holds step {manifest.step} according to its manifest", True)
    return Saved(path, step, manifest)


def tidy(run_dir: Path) -> list[str]:
    """Remove what was never published. Returns remarks; a leftover that cannot be removed is only one."""
    remarks = []
    for path in _entries(run_dir):
        if path.name.startswith("step-") and path.name.endswith(UNFINISHED):
            problem = remove(path)
            done = "removed" if problem is None else f"it cannot be removed ({problem})"
            remarks.append(f"checkpoint {path.name} was never finished: {done}")
    return remarks


def delete(path: Path) -> str | None:
    """Delete a checkpoint; returns why not all of it could be deleted.

    It is renamed first, so that a half-deleted checkpoint does not look like a damaged one.
    """
    gone = free_name(path.with_name(f"{path.name}.old"), UNFINISHED)
    try:
        path.rename(gone)
    except OSError as error:
        return str(error)
    return remove(gone)


def remove(path: Path) -> str | None:
    """Remove a file or directory as far as possible; returns the first problem."""
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


def set_aside(path: Path, suffix: str = DAMAGED) -> Path:
    """Rename a checkpoint so that it is neither used nor deleted; raises OSError where that fails."""
    aside = free_name(path.with_name(path.name + suffix))
    path.rename(aside)
    return aside


def free_name(path: Path, suffix: str = "") -> Path:
    """`path` + `suffix`, or the first of path-2, path-3, ... that does not exist yet."""
    candidate, number = path.with_name(path.name + suffix), 2
    while os.path.lexists(candidate):
        candidate, number = path.with_name(f"{path.name}-{number}{suffix}"), number + 1
    return candidate


def publish(path: Path, final: Path) -> None:
    """The one rename that makes a checkpoint. What has its name cannot be used here, but is not deleted."""
    if os.path.lexists(final):
        set_aside(final, _REPLACED)
    publish_directory(path, final)


def checkpoint_at(path: Path) -> Path:
    """A checkpoint by its own path, or the newest of a run."""
    if (path / CHECKPOINTS).is_dir():
        usable = [saved for saved in saved_in(path) if saved.problem is None]
        if not usable:
            raise UserError(f"{path} has no checkpoint that can be used", "see `arriero ckpt list`")
        return usable[-1].directory
    if not path.is_dir():
        raise UserError(f"{path} does not exist", "give a checkpoint, or the directory of a run")
    return path
