"""A run directory is one run's at a time, whatever becomes of its process."""

import errno
import os
import signal
from contextlib import nullcontext

import pytest

from arriero.errors import UserError
from arriero.train import lock


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path/run until it is killed, or told to end by a byte."""
    ready, tell = os.pipe()
    told, end = os.pipe()
    if (pid := os.fork()) == 0:
        with lock.held(tmp_path / "run"):
            os.write(tell, b".")
            os.read(told, 1)
        os._exit(0)
    assert os.read(ready, 1) == b"."
    yield pid, end
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    os.waitpid(pid, 0)


def test_another_process_is_refused_and_told_who_is_there(holder, tmp_path, monkeypatch):
    pid, _ = holder
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.0)
    with (
        pytest.raises(UserError, match=f"in use by process {pid} on .*, since 20"),
        lock.held(tmp_path / "run"),
    ):
        pass
    with lock.held(tmp_path / "other"):
        pass


def test_a_killed_process_holds_nothing(holder, tmp_path):
    pid, _ = holder
    os.kill(pid, signal.SIGKILL)
    with lock.held(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / ".run.lock").read_text()


def test_one_that_ends_while_another_waits_lets_it_in_and_nothing_is_left_behind(holder, tmp_path):
    pid, end = holder
    if (waiting := os.fork()) == 0:
        with lock.held(tmp_path / "run"):
            os._exit(0 if str(os.getpid()) in (tmp_path / ".run.lock").read_text() else 1)
    os.write(end, b".")
    assert os.waitpid(pid, 0)[1] == 0
    assert os.waitpid(waiting, 0)[1] == 0
    with lock.held(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_folders_made_for_a_lock_go_with_it_if_nothing_else_came(tmp_path):
    with lock.held(tmp_path / "new" / "runs" / "mine"):
        assert (tmp_path / "new" / "runs" / ".mine.lock").exists()
    assert list(tmp_path.iterdir()) == []
    with lock.held(tmp_path / "new" / "runs" / "mine"):
        (tmp_path / "new" / "runs" / "mine").mkdir()
    assert [path.name for path in (tmp_path / "new" / "runs").iterdir()] == ["mine"]


def test_training_is_refused_in_a_directory_where_somebody_trains(arriero, tmp_path):
    with lock.held(tmp_path / "runs" / "mine"):
        refused = arriero("train", "--set", "run.name=mine", "--set", "run.device=cpu")
    assert refused.returncode == 2
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert "run.name" in refused.stderr
    assert not (tmp_path / "runs" / "mine").exists()


@pytest.mark.parametrize(("number", "goes_on"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_a_file_system_without_locks_refuses_nobody_and_a_broken_one_is_named(
    number, goes_on, tmp_path, monkeypatch
):
    def failing(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "lockf", failing)
    with (
        nullcontext() if goes_on else pytest.raises(UserError, match=os.strerror(number)),
        lock.held(tmp_path / "run"),
    ):
        pass
