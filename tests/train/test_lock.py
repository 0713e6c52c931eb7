"""One run at a time uses a run directory."""

import os
import threading

from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.train.rundir import lock_run, run_directory


def test_a_second_run_in_a_run_directory_is_rejected_with_the_holder(arriero, tmp_path):
    with lock_run(load_run(None, ["run.name=mine"], expand).config):
        refused = arriero("train", "--set", "run.name=mine", "--set", "run.device=cpu")
    assert refused.returncode == 2
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert "run.name" in refused.stderr
    assert not (tmp_path / "runs" / "mine").exists()


def test_a_run_waits_for_the_lock_of_a_process_on_another_host_and_says_so(tmp_path, capfd, monkeypatch):
    """A file server keeps the lock of a node that died for the length of a lease."""
    config = load_run(None, ["run.name=mine", f"run.dir='{tmp_path}'"], expand).config
    monkeypatch.setattr("arriero.train.rundir.LOCK_WAIT_S", 0.0)
    directory = run_directory(config)
    with lock_run(config) as held:
        assert held
        path = directory.with_name(f".{directory.name}.lock")
        path.write_text("process 1 on some-other-node, since 2026-01-01 00:00:00")
        release = threading.Event()
        waiting = threading.Thread(target=lambda: release.set() if wait_for_lock(config) else None)
        waiting.start()
        assert not release.wait(1.5)
        assert "waiting up to 95 s" in capfd.readouterr().err
    waiting.join(60)
    assert release.is_set()


def wait_for_lock(config):
    with lock_run(config) as held:
        return held
