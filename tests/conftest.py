import contextlib
import gc
import multiprocessing
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from forked import run_command_line
from slurm import slurm  # noqa: F401  a fixture

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# tests fork, and after a CUDA call a process cannot fork others that use CUDA
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# the table of all verbs, which a process builds for each command line, is the same every time
typer.main.get_command = cache(typer.main.get_command)

REPOSITORY = Path(__file__).parents[1]
USER_FOLDERS = [REPOSITORY / name for name in ("runs", "data")]
# Tests change the working directory; relative paths in these variables must stay valid in their subprocesses.
for name in ("PYTHONPATH", "ARRIERO_PEERS_PYTHON"):
    if name in os.environ:
        parts = filter(None, os.environ[name].split(os.pathsep))
        os.environ[name] = os.pathsep.join(os.path.abspath(part) for part in parts)  # noqa: PTH100


def user_files():
    return {path for folder in USER_FOLDERS if folder.is_dir() for path in folder.iterdir()}


def pytest_sessionstart(session):
    session.config.user_files = user_files()


def pytest_sessionfinish(session):
    if user_files() - session.config.user_files:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    for path in sorted(user_files() - config.user_files):
        terminalreporter.write_line(f"FAILED: a test made {path}; tests may write to tmp_path only", red=True)


@pytest.fixture(scope="session", autouse=True)
def working_directory_of_fixtures(tmp_path_factory):
    before = Path.cwd()
    os.environ["ARRIERO_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.chdir(tmp_path_factory.mktemp("working-directory"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def working_directory_of_tests(tmp_path, monkeypatch):
    """Run each test in an empty folder, so that runs/demo is never a run of the user."""
    monkeypatch.chdir(tmp_path)


# Files that take longest run first, so that the workers of `make test` finish at about the same time.
LONGEST_FIRST = (
    "federate/test_two_clusters.py",
    "bench/test_parity.py",
    "launch/test_doctor_allocation.py",
    "launch/test_supervise.py",
    "launch/test_jobs.py",
    "test_docs.py",
    "train/test_model_state.py",
    "checkpoint/test_resume.py",
    "bench/",
    "plan/test_search.py",
    "plan/test_new_run.py",
    "train/",
    "checkpoint/",
    "parallel/",
    "federate/",
    "model/",
    "evaluate/",
)


def order_of(item):
    path = item.path.relative_to(REPOSITORY / "tests").as_posix()
    return next((i for i, each in enumerate(LONGEST_FIRST) if path.startswith(each)), len(LONGEST_FIRST))


def pytest_collection_modifyitems(items):
    items.sort(key=order_of)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {item.originalname}"))


def pytest_collection_finish():
    """Let collections pass over what imports left: half a second of each, and every run starts with one."""
    gc.collect()
    gc.freeze()


def has_gpu():
    import torch

    from arriero.parallel.spawn import run_ranks

    return run_ranks(torch.cuda.is_available, 1, leader_prints=False)


@pytest.fixture(scope="session")
def corpus_cache(tmp_path_factory):
    """The built-in corpus, prepared once for the whole suite."""
    return prepared("builtin:stdlib", tmp_path_factory)


@pytest.fixture(scope="session")
def synthetic_cache(tmp_path_factory):
    """The corpus of the parity cases, prepared once."""
    return prepared("builtin:synthetic", tmp_path_factory)


def prepared(source, tmp_path_factory):
    from arriero.data.prepare.builtin import prepare_builtin

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # of all test processes; one prepares, and the others wait
        folder = folder.parent
    cache = folder / source.replace(":", "-")
    prepare_builtin(source, cache)
    return cache


@pytest.fixture(scope="session")
def run_python():
    """Run a new interpreter in a directory, with this checkout on its path."""

    def run(*arguments, cwd):
        paths = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture
def python(run_python, tmp_path):
    """Run a new interpreter in an empty directory."""
    return lambda *arguments, cwd=tmp_path: run_python(*arguments, cwd=cwd)


# Verbs that neither fork nor change the state of the process.
IN_PROCESS = {("config",), ("ckpt",), ("bench", "compare")} | {
    ("data", verb) for verb in ("audit", "export", "import", "inspect", "pack", "show", "verify")
}


PRELOADED = ["arriero.cli", "arriero.train.build", "arriero.train.run", "torch.utils.tensorboard", "numpy.ma"]


@pytest.fixture(scope="session")
def start_arriero(tmp_path_factory):
    """Start the command line in a process forked from one with its modules loaded: 4 CPU-seconds less.

    `more` are environment variables; `code` is run instead of the command line, as by `python -c`. What is
    started has `wait` and `pid`; `wait` returns its result.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)

    def start(*arguments, cwd, code=None, **more):
        environment = {**os.environ, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", **more}
        files = [tmp_path_factory.mktemp("printed") / name for name in ("stdout", "stderr")]
        given = (list(map(str, arguments)), cwd, environment, files, code)
        process = server.Process(target=run_command_line, args=given)
        process.start()

        def wait(seconds=300):
            process.join(seconds)
            if process.exitcode is None:
                process.kill()
                raise subprocess.TimeoutExpired(["arriero", *arguments], seconds)
            out, err = (path.read_text() for path in files)
            return SimpleNamespace(returncode=process.exitcode, stdout=out, stderr=err)

        return SimpleNamespace(wait=wait, pid=process.pid)

    return start


@pytest.fixture(scope="session")
def forked_arriero(start_arriero):
    return lambda *arguments, cwd: start_arriero(*arguments, cwd=cwd).wait()


@pytest.fixture
def arriero(forked_arriero, command, tmp_path):
    """Run the command line; verbs that train or fork run in their own process, the others in this one."""

    def run(*arguments, cwd=tmp_path):
        if arguments[:1] not in IN_PROCESS and arguments[:2] not in IN_PROCESS:
            return forked_arriero(*arguments, cwd=cwd)
        with contextlib.chdir(cwd):
            return command(*arguments)

    return run


@pytest.fixture
def command(capsys, monkeypatch):
    """Run the command line in this process; for tests that need no process of their own."""
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
    """Return a folder on a file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
