import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def corpus_cache(tmp_path_factory):
    """One prepared built-in corpus for the whole suite."""
    from arriero.data.builtin import prepare_builtin

    cache = tmp_path_factory.mktemp("data")
    prepare_builtin("builtin:stdlib", cache)
    return cache


@pytest.fixture
def arriero(tmp_path):
    """The command line as a user meets it: a real process in an empty directory."""

    def run(*arguments, cwd=tmp_path):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "200"}
        command = [sys.executable, "-m", "arriero", *map(str, arguments)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)

    return run
