"""The short part of launches.py; `make reliability` and `make scaling` run all of it."""

import pytest

from launch.launches import launch_often


@pytest.mark.slow
def test_a_launched_job_takes_its_steps(slurm, tmp_path, corpus_cache):
    (tmp_path / "data").symlink_to(corpus_cache)
    results = launch_often(slurm, tmp_path, launches=1, nodes=2)
    assert [each["started"] for each in results] == [True], results
