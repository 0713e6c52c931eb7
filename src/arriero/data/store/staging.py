"""A directory that appears whole or not at all."""

import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arriero.data.store.shards import sync_directory
from arriero.errors import UserError

ABANDONED_S = 3600


@contextmanager
def staged_directory(target: Path, elsewhere: str = "choose another place") -> Iterator[Path]:
    """Work in the directory given; when the block ends without an error it becomes `target`.

    `elsewhere` tells a user how to name a place that can be written.
    """
    target = Path(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists already", "choose another place, or remove it first")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        making = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".making", dir=target.parent))
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror})", elsewhere) from None
    lock = os.open(making, os.O_RDONLY)
    try:
        _lock(lock)
        yield making
        making.chmod(0o755)
        making.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
        os.close(lock)


def _sweep(target: Path) -> None:
    """Remove what killed processes left. A living one holds a lock on its directory."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.making"):
        try:
            if time.time() - left.stat().st_mtime < ABANDONED_S:
                continue
            fd = os.open(left, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            if _lock(fd):
                shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
