import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# tests fork, and a process that has asked CUDA itself for its devices cannot fork others that use them
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

REPOSITORY = Path(__file__).parents[1]
USERS_FOLDERS = [REPOSITORY / name for name in ("runs", "data")]
# Tests change the working directory; their subprocesses must still find what these relative paths name.
for name in ("PYTHONPATH", "ARRIERO_PEERS_PYTHON"):
    if name in os.environ:
        parts = filter(None, os.environ[name].split(os.pathsep))
        os.environ[name] = os.pathsep.join(os.path.abspath(part) for part in parts)  # noqa: PTH100


def users_files():
    return {path for folder in USERS_FOLDERS if folder.is_dir() for path in folder.iterdir()}


def pytest_sessionstart(session):
    session.config.users_files = users_files()


def pytest_sessionfinish(session):
    if users_files() - session.config.users_files:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    for path in sorted(users_files() - config.users_files):
        terminalreporter.write_line(f"FAILED: a test made {path}; tests may write to tmp_path only", red=True)


@pytest.fixture(scope="session", autouse=True)
def no_fixture_runs_in_the_repository(tmp_path_factory):
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("working-directory"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def no_test_runs_in_the_repository(tmp_path, monkeypatch):
    """Relative paths like runs/demo lead to an empty folder, never to the user's own runs and data."""
    monkeypatch.chdir(tmp_path)


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
        paths = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture
def arriero(python):
    """The command line as a user meets it."""
    return lambda *arguments, **options: python("-m", "arriero", *arguments, **options)


@pytest.fixture
def command(capsys, monkeypatch):
    """The command line in this process: quicker, for verbs that do not fork."""
    from arriero import cli

    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["arriero", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=stop.value.code or 0, stdout=printed.out, stderr=printed.err)

    return run


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of one MiB, and functions that fill it and empty it again."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
