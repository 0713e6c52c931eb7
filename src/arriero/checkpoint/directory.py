"""The checkpoints of a run directory: `checkpoints/step-00001000/`, whole, or under a name with .tmp."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from arriero.checkpoint.manifest import Invalid, Manifest, Newer, make_durable, read_manifest
from arriero.errors import UserError

CHECKPOINTS = "checkpoints"
UNFINISHED = ".tmp"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Saved:
    """A checkpoint by its manifest; `problem` says why it cannot be used."""

    directory: Path
    step: int
    manifest: Manifest | None
    problem: str | None = None


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def saved_in(run_dir: Path) -> list[Saved]:
    """By step. Judged by the manifest alone: whether files are as it says is another question."""
    folder = run_dir / CHECKPOINTS
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            found.append(_look(path, int(match[1])))
    return sorted(found, key=lambda saved: saved.step)


def _look(path: Path, step: int) -> Saved:
    try:
        manifest = read_manifest(path)
    except Invalid as error:
        return Saved(path, step, None, str(error))
    if manifest.step != step:
        return Saved(path, step, manifest, f"is of step {manifest.step}, whatever its name says")
    return Saved(path, step, manifest)


def tidy(run_dir: Path) -> list[str]:
    """Remove what was never finished, and what has no manifest to be judged by. Returns what to tell."""
    folder = run_dir / CHECKPOINTS
    if not folder.is_dir():
        return []
    told = []
    for path in folder.glob(f"step-*{UNFINISHED}"):
        _remove(path)
        told.append(f"{path.name} was never finished: removed")
    for path in folder.iterdir():
        if not (_NAME.fullmatch(path.name) and path.is_dir()):
            continue
        try:
            read_manifest(path)
        except Newer:
            continue
        except Invalid as error:
            delete(path)
            told.append(f"{path.name} {error}: removed")
    return told


def delete(path: Path) -> None:
    """Out of sight first: half a deletion must not look like damage."""
    gone = path.with_name(f"{path.name}.old{UNFINISHED}")
    if gone.exists():
        _remove(gone)
    path.rename(gone)
    _remove(gone)


def publish(path: Path, final: Path) -> None:
    """The one step that makes a checkpoint; what stands in its place is damaged, or it would be in use."""
    make_durable(path)
    if final.exists():
        delete(final)
    path.rename(final)
    make_durable(final.parent)


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


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
