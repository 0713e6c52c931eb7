import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# tests fork, and a process that has asked CUDA itself for its devices cannot fork others that use them
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

REPOSITORY = Path(__file__).parents[1]


def pytest_collection_modifyitems(items):
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not gpu_here():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {item.originalname}"))


def gpu_here():
    import torch

    from arriero.parallel.spawn import run_ranks

    return run_ranks(torch.cuda.is_available, 1, leader_prints=False)


@pytest.fixture(scope="session")
def corpus_cache(tmp_path_factory):
    """One prepared built-in corpus for the whole suite."""
    from arriero.data.prepare.builtin import prepare_builtin

    cache = tmp_path_factory.mktemp("data")
    prepare_builtin("builtin:stdlib", cache)
    return cache


@pytest.fixture(scope="session")
def synthetic_cache(tmp_path_factory):
    """The corpus of all parity cases, prepared once."""
    from arriero.data.prepare.builtin import prepare_builtin

    cache = tmp_path_factory.mktemp("synthetic")
    prepare_builtin("builtin:synthetic", cache)
    return cache


@pytest.fixture
def python(tmp_path):
    """A fresh interpreter in an empty directory that finds this checkout."""

    def run(*arguments, cwd=tmp_path):
        paths = [str(REPOSITORY / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        absolute = os.pathsep.join(str(Path(path).resolve()) for path in paths)
        environment = {**os.environ, "PYTHONPATH": absolute, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture
def arriero(python):
    """The command line as a user meets it."""
    return lambda *arguments, **options: python("-m", "arriero", *arguments, **options)
