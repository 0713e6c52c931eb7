"""Publication, checksums, links and locks of `arriero.files`."""

import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from arriero import files
from arriero.errors import UserError
from arriero.files import (
    check_quota,
    is_locked,
    locked,
    publish_file,
    replaced_directory,
    reserve_bytes,
    sha256_of_file,
    staged_directory,
)


def lock_of(directory, **more):
    return locked(directory / ".lock", directory, unwritable="choose another place", **more)


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path until it is killed, or ended by a byte."""
    ready, say_ready = os.pipe()
    ended, end = os.pipe()
    if (pid := os.fork()) == 0:
        with lock_of(tmp_path):
            os.write(say_ready, b".")
            os.read(ended, 1)
        os._exit(0)
    assert os.read(ready, 1) == b"."
    yield pid, end
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    os.waitpid(pid, 0)


def test_a_busy_lock_names_its_holder(holder, tmp_path):
    pid, _ = holder
    with (
        pytest.raises(UserError, match=f"in use by process {pid} on .*, since 20.*; wait for it"),
        lock_of(tmp_path),
    ):
        pass
    with lock_of(tmp_path / "other") as supported:
        assert supported


def test_a_killed_process_frees_its_lock(holder, tmp_path):
    pid, _ = holder
    os.kill(pid, signal.SIGKILL)
    with lock_of(tmp_path, wait_s=3.0):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()


@pytest.mark.parametrize("wait_s", [10.0, None])
def test_a_waiting_process_gets_the_lock_and_the_file_is_removed(holder, tmp_path, wait_s):
    pid, end = holder
    if (waiting := os.fork()) == 0:
        with lock_of(tmp_path, wait_s=wait_s):
            os._exit(0 if str(os.getpid()) in (tmp_path / ".lock").read_text() else 1)
    os.write(end, b".")
    assert os.waitpid(pid, 0)[1] == 0
    assert os.waitpid(waiting, 0)[1] == 0
    with lock_of(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_says_nothing_about_a_holder(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    path = tmp_path / ".lock"
    with lock_of(tmp_path) as supported:
        assert not supported and is_locked(path, unknown=True) and not is_locked(path)
    assert not is_locked(path, unknown=True)


def test_shared_locks_exclude_only_exclusive_ones(tmp_path):
    with (
        lock_of(tmp_path, shared=True),
        lock_of(tmp_path, shared=True),
        pytest.raises(UserError, match="in use by process"),
        lock_of(tmp_path),
    ):
        pass
    with lock_of(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_directories_created_for_a_lock_are_removed_if_they_stay_empty(tmp_path):
    with lock_of(tmp_path / "new" / "runs"):
        assert (tmp_path / "new" / "runs" / ".lock").exists()
    assert list(tmp_path.iterdir()) == []
    with lock_of(tmp_path / "new" / "runs"):
        (tmp_path / "new" / "runs" / "mine").mkdir()
    assert [path.name for path in (tmp_path / "new" / "runs").iterdir()] == ["mine"]


def test_a_lock_survives_the_removal_of_its_directory_by_another_process(tmp_path, monkeypatch):
    original, removed = Path.mkdir, []

    def mkdir(path, *arguments, **options):
        original(path, *arguments, **options)
        if not removed:
            removed.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with lock_of(tmp_path / "plans"):
        assert (tmp_path / "plans" / ".lock").exists()
    assert len(removed) == 1


@pytest.mark.parametrize(("number", "works"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_a_file_system_without_locks_is_accepted_and_a_broken_one_is_reported(
    number, works, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "flock", fail)
    with (
        nullcontext() if works else pytest.raises(UserError, match=os.strerror(number)),
        lock_of(tmp_path / "run") as supported,
    ):
        assert not supported


def test_a_published_file_replaces_the_old_one_and_leaves_no_other(tmp_path):
    for content in (b"old", b"new"):
        publish_file(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == content
        assert sha256_of_file(tmp_path / "a") == hashlib.sha256(content).hexdigest()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_abandoned_staging_directories_are_removed_but_not_those_of_living_processes(tmp_path):
    target = tmp_path / "set[1]"
    script = (
        "import sys; from pathlib import Path; from arriero.files import staged_directory\n"
        f"with staged_directory(Path({str(target)!r})) as making: print(making, flush=True); sys.stdin.read()"
    )
    source = Path(__file__).parents[1] / "src"
    living, killed = (
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(source)},
        )
        for _ in range(2)
    )
    places = [Path(process.stdout.readline().strip()) for process in (living, killed)]
    killed.kill()
    killed.wait()
    for place in places:
        os.utime(place, (1, 1))
    with staged_directory(target) as making:
        assert sorted(tmp_path.iterdir()) == sorted([places[0], making])
    living.kill()
    living.wait()
    assert target.is_dir()


def test_a_failed_replacement_keeps_the_old_directory(tmp_path):
    target = tmp_path / "model"
    for content, fails in (("old", False), ("half", True)):
        with pytest.raises(OSError) if fails else nullcontext(), replaced_directory(target) as making:
            (making / "weights").write_text(content)
            if fails:
                raise OSError(errno.EIO, "broken")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "weights").read_text() == "old"
    with replaced_directory(target) as making:
        (making / "weights").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "weights").read_text() == "new"


def test_a_quota_is_found_by_reserving_space_and_other_errors_are_not_quotas(tmp_path):
    def check(reserve, needed=2**30):
        check_quota(tmp_path / "new" / "run", needed, "a checkpoint", "free some space", reserve)

    with pytest.raises(UserError, match=r"a checkpoint needs at least 1.0 GiB, and your quota on"):
        check(lambda *_: errno.EDQUOT)
    check(lambda *_: errno.ENOSPC)
    check(reserve_bytes, needed=2**20)
    assert list(tmp_path.iterdir()) == []
