"""One run at a time in a run directory: two would delete each other's checkpoints."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from errno import EACCES, EAGAIN, ENOLCK, ENOSYS, ENOTSUP
from pathlib import Path

from arriero.errors import UserError

# one that was killed may take a while to be gone
_PATIENCE_S = 3.0
_POLL_S = 0.1
# what file systems say of a lock that another process has, and of one they do not know
_HELD, _NO_LOCKS = (EACCES, EAGAIN), (ENOLCK, ENOSYS, ENOTSUP)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """The directory for this process, from now on; freed also when it is killed.

    The lock lies beside the directory, which need not be there yet. It is one of the file system's own, which
    other nodes see; where there is none, nobody is refused.
    """
    path = directory.with_name(f".{directory.name}.lock")
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquired(path, directory)
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot be written ({error})", "set run.dir to a directory you may write"
        ) from None
    try:
        yield
    finally:
        # on a disk that has become read-only it stays, and holds nobody up
        with suppress(OSError):
            path.unlink()
            # a run that was refused leaves nothing behind
            for folder in missing:
                folder.rmdir()
        if descriptor is not None:
            os.close(descriptor)


def _acquired(path: Path, directory: Path) -> int | None:
    until = time.monotonic() + _PATIENCE_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace")
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return None
            if error.errno not in _HELD:
                raise
            if time.monotonic() > until:
                raise UserError(
                    f"{directory} is in use by {holder or 'another process'}",
                    "wait for it or stop it, or choose another run with --set run.name=NAME",
                ) from None
            time.sleep(_POLL_S)
            continue
        if _is_there(path, descriptor):
            break
        # its last holder has removed it since
        os.close(descriptor)
    words = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, words.encode(), 0)
    return descriptor


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
