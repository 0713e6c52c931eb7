"""Files: atomic publication of files and directories, fsync, checksums, links, free space and locks.

Everything is written beside its final name, synced to disk, renamed, and the parent directory is synced. So a
file or directory under its final name is complete, also after a kill or a power failure.
"""

import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from arriero.errors import UserError
from arriero.events import warn
from arriero.units import human_bytes

Advance = Callable[[int], None]
"""Called with the number of bytes that were read or written since the last call."""
LinkKind = Literal["auto", "hard", "symbolic", "copy"]
Placed = Literal["hard link", "symbolic link", "copy"]

_CHUNK = 2**22
_ABANDONED_S = 3600
_POLL_S = 0.1
_NAME_GRACE_S = 1.0
_ATTEMPTS = 20
_LOCK_BUSY = (errno.EACCES, errno.EAGAIN)
# answers of file systems that do not support locks, such as Lustre mounted without -o flock
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_NO_HARD_LINK = (
    errno.EXDEV,  # another file system
    errno.EPERM,  # fs.protected_hardlinks: a file of another user
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.EMLINK,
    errno.ENOSYS,
)


def no_progress(_: int) -> None:
    pass


def sync(path: Path, drop_cache: bool = False) -> None:
    """Flush a file or directory to disk. `drop_cache` makes the next read come from the disk, not memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if drop_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Flush a directory and everything below it to disk; the targets of symbolic links are left alone."""
    for folder, _, names in os.walk(directory, topdown=False):
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                sync(path)
        sync(Path(folder))


def publish_file(path: Path, content: bytes, is_durable: bool = True) -> None:
    """Write a file atomically: readers see the old content or all of the new one.

    A file that need not survive a crash of the machine does not wait for the disk.
    """
    making = path.with_name(f"{path.name}.tmp")
    with making.open("wb") as file:
        file.write(content)
        file.flush()
        if is_durable:
            os.fsync(file.fileno())
    making.replace(path)
    if is_durable:
        sync(path.parent)


def publish_directory(making: Path, target: Path) -> None:
    """Rename a directory, whose files are synced already, to its final name."""
    sync(making)
    making.rename(target)
    sync(target.parent)


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `target` when the block ends without an error.

    `target` must not exist, or be an empty directory.
    """
    target = Path(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} exists already", "choose another place, or remove it first")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        making = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".making", dir=target.parent))
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror})", "choose another place") from None
    descriptor = os.open(making, os.O_RDONLY)
    try:
        _try_lock(descriptor)
        yield making
        making.chmod(0o755)
        sync_tree(making)
        publish_directory(making, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(target: Path) -> None:
    """Delete staging directories of killed processes. A living process holds a lock on its own."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.making"):
        try:
            if time.time() - left.stat().st_mtime < _ABANDONED_S:
                continue
            descriptor = os.open(left, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            if _try_lock(descriptor):
                shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


@contextmanager
def replaced_directory(target: Path) -> Iterator[Path]:
    """Yield a directory that replaces `target` when the block ends without an error.

    The caller is the only writer. A replacement that was killed between its two renames is undone first.
    """
    making, old = (target.with_name(f"{target.name}{suffix}") for suffix in (".tmp", ".old.tmp"))
    if old.exists() and not target.exists():
        old.rename(target)
    for left in (making, old):
        shutil.rmtree(left, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        yield making
        sync_tree(making)
        if target.exists():
            target.rename(old)
        publish_directory(making, target)
    finally:
        for left in (making, old) if target.exists() else (making,):
            shutil.rmtree(left, ignore_errors=True)


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of_json(value: Any) -> str:
    """Return the checksum of a JSON value, whatever the order of its keys."""
    return sha256_of(json.dumps(value, sort_keys=True).encode())


def sha256_of_file(path: Path, progress: Advance = no_progress) -> str:
    """Read a file and return its checksum."""
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            progress(count)
    return digest.hexdigest()


def link_or_copy(source: Path, target: Path, kind: LinkKind) -> Placed:
    """Give a file a second name; `auto` makes a hard link, or a symbolic link where that is impossible."""
    source = source.resolve()
    if kind == "copy":
        shutil.copyfile(source, target)
        return "copy"
    if kind != "symbolic":
        try:
            os.link(source, target)
            return "hard link"
        except OSError as error:
            if error.errno not in _NO_HARD_LINK:
                raise
            if kind == "hard":
                raise UserError(
                    f"{source} cannot be hard-linked ({error.strerror})", "use --link symbolic or --link copy"
                ) from None
    target.symlink_to(source)
    return "symbolic link"


def link_tree(source: Path, target: Path, leave_out: str | None = None) -> None:
    """Give the files of a directory a second name below `target`; copy them to another file system.

    `leave_out` is the name of a directory in `source` that is not taken.
    """
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.relative_to(source).parts[0] != leave_out:
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path.resolve(), place)
            except OSError as error:
                if error.errno not in _NO_HARD_LINK:
                    raise
                shutil.copyfile(path, place)


def nearest_directory(path: Path) -> Path:
    """Return the path itself or its nearest ancestor that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def free_bytes(path: Path) -> int:
    """Return the free space of the file system that holds, or will hold, `path`."""
    return shutil.disk_usage(nearest_directory(path)).free


def quota_left(path: Path) -> int | None:
    """Return the bytes that the user's quota leaves at `path`; None without a quota or a tool that tells it.

    Lustre is asked through `lfs quota`, other file systems through `quota`. Project quotas that statvfs
    reports are part of `free_bytes`.
    """
    there, user = str(nearest_directory(path)), str(os.getuid())
    for command in (["lfs", "quota", "-q", "-u", user, there], ["quota", "-w", "-p", "-f", there]):
        if shutil.which(command[0]) is None:
            continue
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
        except subprocess.TimeoutExpired:
            continue
        # name of the file system, KiB used (with * when over), soft limit, hard limit; 0 is no limit
        for line in said.splitlines():
            found = re.fullmatch(r"\s*(\S+\s+)?(\d+)\*?\s+(\d+)\s+(\d+)\s.*", line + " ")
            if found and (limit := int(found[4]) or int(found[3])):
                return max(0, limit - int(found[2])) * 1024
    return None


def check_free_space(path: Path, needed: int, what: str, todo: str) -> None:
    """Raise UserError unless the disk of `path` has `needed` bytes for `what`."""
    there = nearest_directory(path)
    usage = shutil.disk_usage(there)
    # a total of 0 means that the file system does not report its size
    if usage.total and usage.free < needed:
        size, free = human_bytes(needed), human_bytes(usage.free)
        raise UserError(f"{what} needs at least {size}, and {there} has {free} free", todo)


def check_quota(path: Path, needed: int, what: str, todo: str, reserve: Callable[[int, int], int]) -> None:
    """Raise UserError if a quota does not allow `needed` more bytes, which are reserved for a moment.

    The free space that a file system reports does not consider quotas. `reserve` is `reserve_bytes`.
    """
    there = nearest_directory(path)
    try:
        descriptor, name = tempfile.mkstemp(prefix=".space-", dir=there)
    except OSError:
        return
    try:
        code = reserve(descriptor, needed)
    finally:
        os.close(descriptor)
        Path(name).unlink(missing_ok=True)
    # a single file may be limited to one storage target of a parallel file system: other errors say nothing
    if code == errno.EDQUOT:
        size = human_bytes(needed)
        raise UserError(f"{what} needs at least {size}, and your quota on {there} does not allow it", todo)


def reserve_bytes(descriptor: int, size: int) -> int:
    """Reserve space for a file without writing it; return the error number, 0 if unsupported."""
    # not os.posix_fallocate, which writes every block where the file system cannot reserve
    reserve = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if reserve is None:
        return 0
    reserve.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return ctypes.get_errno() if reserve(descriptor, 0, 0, size) else 0


@contextmanager
def space_for(target: Path, at_least: int = 0) -> Iterator[None]:
    """Raise UserError when the disk of `target` lacks `at_least` bytes, or when it is full in the block."""
    check_free_space(target, at_least, str(target), "free some space, or choose another place")
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"no space left for {target} ({error})", "free some space, then repeat the command"
        ) from None


@contextmanager
def locked(
    path: Path,
    what: object,
    *,
    unwritable: str,
    busy: str = "wait for it",
    wait_s: float | None = 0.0,
    shared: bool = False,
    lease_s: float = 0.0,
) -> Iterator[bool]:
    """Hold an advisory lock on the file `path`; yield False where the file system does not support locks.

    A lock that another process holds raises a UserError that names `what` and the holder, after `wait_s`
    seconds (None: wait for ever), or `lease_s` if the holder is not a living process of this host. `busy`
    and `unwritable` are the advice in the two errors. The kernel frees the lock when its holder dies. Linux
    passes flock on to NFS, so other nodes see it. Directories created for the lock file are removed with it
    if they stay empty.
    """
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    try:
        descriptor = _acquire(path, what, busy, wait_s, shared, lease_s)
    except OSError as error:
        raise UserError(f"{path.parent} cannot be written ({error})", unwritable) from None
    try:
        yield descriptor is not None
    finally:
        # a lock file that stays, as on a disk that became read-only, blocks nobody
        with suppress(OSError):
            if not shared:
                path.unlink()
            for folder in missing:
                folder.rmdir()
        if descriptor is not None:
            os.close(descriptor)


def is_locked(path: Path, unknown: bool = False) -> bool:
    """Return whether a process holds the lock on this file; `unknown` where locks are not supported."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return unknown and error.errno in _NO_LOCKS
    finally:
        os.close(descriptor)
    return False


def _acquire(
    path: Path, what: object, busy: str, wait_s: float | None, shared: bool, lease_s: float
) -> int | None:
    begin, announced = time.monotonic(), False
    until = None if wait_s is None else begin + wait_s
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if until is None else fcntl.LOCK_NB)
    while True:
        descriptor = _open_lock(path)
        try:
            fcntl.flock(descriptor, how)
        except OSError as error:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace")
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return None
            if error.errno not in _LOCK_BUSY:
                raise
            # a holder that has just taken the lock may not have written its name yet
            grace = 0.0 if holder else _NAME_GRACE_S
            may_be_dead = bool(holder) and lease_s > 0 and not _lives_here(holder)
            if may_be_dead and time.monotonic() > begin + 1 and not announced:
                announced = True
                warn(
                    f"{what} is in use by {holder}; waiting up to {lease_s:.0f} s, the time for which a file "
                    "server keeps the lock of a node that died"
                )
            end = max(until or 0.0, begin + lease_s) if may_be_dead else until
            if end is None or time.monotonic() > end + grace:
                raise UserError(f"{what} is in use by {holder or 'another process'}", busy) from None
            time.sleep(_POLL_S)
            continue
        if _is_same_file(path, descriptor):
            break
        # the last holder has removed the file since it was opened
        os.close(descriptor)
    holder = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
    with suppress(OSError):  # a full disk must not prevent the lock
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
    return descriptor


def _lives_here(holder: str) -> bool:
    """Return whether the holder that a lock file names is a living process of this host."""
    found = re.match(r"process (\d+) on (\S+),", holder)
    if found is None or found[2] != socket.gethostname():
        return False
    try:
        # a process of another user may not be signalled
        with suppress(PermissionError):
            os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    return True


def _open_lock(path: Path) -> int:
    for attempt in range(_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            # another process may have removed the directory; /proc always answers so
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
