"""The frozen model that a stored speculator was trained for: where it is, and whether it is still the same.

Checkpoints of a speculator do not hold it. `base.json` has its path, the name that the user gave, its
checksum, and size and time of its files, which save reading a whole model to see that nothing has changed.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from arriero.checkpoint.directory import MANIFEST, find_checkpoints, unreadable
from arriero.data.text.hub import local_model
from arriero.errors import UserError
from arriero.files import link_tree, sha256_of, sha256_of_file, space_for, staged_directory
from arriero.model.description import read_json
from arriero.model.speculator.settings import BASE_FILE, KEPT

_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".distcp", "config.json", "params.json", "model.toml")


def describe_base(path: Path, where: str) -> dict[str, Any]:
    """Return the content of `base.json` for a model at `path`, which the user named `where`."""
    if (path / BASE_FILE).is_file():
        return find_base(path)
    return {"path": str(path.resolve()), "where": where, "sha256": _checksum(path), "files": _stamps(path)}


def keep_base(base: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Give a run its own base model by hard links, else by copies, where another run may delete the files.

    Retention deletes checkpoints, and a run that is continued replaces its exported model.
    """
    path, target = Path(base["path"]), run_dir / KEPT / base["sha256"][:16]
    is_export = path.name == "model" and (path.parent / "run.toml").is_file()
    if not (is_export or (path / MANIFEST).is_file() or path.parent.name == KEPT):
        return dict(base)
    if not target.exists():
        with space_for(target), staged_directory(target) as making:
            link_tree(path, making)
    return {**base, "path": str(target.resolve()), "files": _stamps(target)}


def find_base(directory: Path, start_from: str | None = None, checked: bool = True) -> dict[str, Any]:
    """Return what `base.json` of a checkpoint says, with the path where the base model is now.

    A model that moved is looked for in the run directory, under the name the user gave, and at `start_from`.
    Without `checked` the first one that exists is taken: another rank has compared checksums.
    """
    file = directory / BASE_FILE
    record = read_json(file)
    named, wanted = record.get("path"), record.get("sha256")
    if not (isinstance(named, str) and isinstance(wanted, str)):
        what = f"{file} is damaged: it has no path and checksum of the base model of the speculator"
        raise UserError(what, "copy it from another checkpoint of the run, or give another checkpoint")
    notes: list[str] = []
    for path in _places(directory, record, start_from, notes):
        if not path.exists():
            continue
        stamps = _stamps(path)
        known = stamps == record.get("files") and path == Path(named)
        if known or not checked or _checksum(path) == wanted:
            if (path / BASE_FILE).is_file():
                return find_base(path, start_from, checked)
            return {**record, "path": str(path.resolve()), "files": stamps}
        notes.append(f"{path} holds another model")
    if Path(named).exists():
        what = f"the base model {named} is not the one that the speculator in {directory} is for"
        raise UserError(what, "restore the base model, or train a new speculator")
    what = f"{directory} holds a speculator, and its base model {named} does not exist"
    raise UserError(
        what + (f" ({'; '.join(notes)})" if notes else ""),
        "copy the base model there, or name it with checkpoint.start_from",
    )


def _places(
    directory: Path, record: Mapping[str, Any], start_from: str | None, notes: list[str]
) -> Iterator[Path]:
    """Yield where a base model may be; a name that cannot be loaded is noted."""
    yield Path(record["path"])
    # of a run directory that moved
    yield directory.resolve().parent.parent / KEPT / record["sha256"][:16]
    for name in dict.fromkeys((record.get("where"), start_from)):
        if isinstance(name, str):
            try:
                path = local_model(name)
            except UserError as error:
                notes.append(error.what)
                continue
            saved = find_checkpoints(path, report_unreadable=True)
            yield from (each.directory for each in saved if each.manifest)
            if not saved:
                yield path


def _files(path: Path) -> list[Path]:
    """Return the files that identify a stored model: its manifest, or all with weights and settings."""
    if (path / MANIFEST).is_file():
        return [path / MANIFEST]
    try:
        return sorted(f for f in path.iterdir() if f.name.endswith(_WEIGHTS)) if path.is_dir() else [path]
    except OSError as error:
        raise unreadable(path, error) from None


def _stamps(path: Path) -> dict[str, list[int]]:
    return {file.name: [(stat := file.stat()).st_size, stat.st_mtime_ns] for file in _files(path)}


def _checksum(path: Path) -> str:
    files = _files(path)
    try:
        with ThreadPoolExecutor(8) as pool:
            sums = list(pool.map(sha256_of_file, files))
    except OSError as error:
        raise unreadable(path, error) from None
    if [file.name for file in files] == [MANIFEST]:
        return sums[0]
    return sha256_of("".join(f"{file.name} {each}" for file, each in zip(files, sums, strict=True)).encode())
