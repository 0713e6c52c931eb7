"""One run at a time uses a run directory."""

import os

from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.train.rundir import lock_run


def test_a_second_run_in_a_run_directory_is_rejected_with_the_holder(arriero, tmp_path):
    with lock_run(load_run(None, ["run.name=mine"], expand).config):
        refused = arriero("train", "--set", "run.name=mine", "--set", "run.device=cpu")
    assert refused.returncode == 2
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert "run.name" in refused.stderr
    assert not (tmp_path / "runs" / "mine").exists()
