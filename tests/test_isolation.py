"""Check that tests do not touch the user's runs/ and data/: `make demo` and `make test` pass in any order."""

import shutil
from pathlib import Path

import pytest

from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.train.rundir import run_directory

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder_of_a_module_fixture():
    return Path.cwd()


def test_no_test_and_no_fixture_runs_inside_the_repository(folder_of_a_module_fixture):
    for folder in (Path.cwd(), folder_of_a_module_fixture):
        assert REPOSITORY not in (folder, *folder.parents)


def test_the_default_run_directory_of_a_test_is_empty(tmp_path):
    directory = run_directory(load_run(None, [], expand).config)
    assert directory.absolute() == tmp_path / "runs" / "demo"
    assert not directory.exists()


@pytest.mark.parametrize(("name", "code"), [("runs", 1), ("elsewhere", 0)])
def test_a_test_that_writes_to_user_folders_fails_the_suite(python, tmp_path, name, code):
    (tmp_path / "tests").mkdir()
    for name_of_file in ("conftest.py", "forked.py", "slurm.py"):
        shutil.copy(REPOSITORY / "tests" / name_of_file, tmp_path / "tests")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['gpu']\n")
    made = tmp_path / name / "demo"
    body = f"from pathlib import Path\n\n\ndef test_it():\n    Path({str(made)!r}).mkdir(parents=True)\n"
    (tmp_path / "tests" / "test_it.py").write_text(body)
    result = python("-m", "pytest", "-p", "no:cacheprovider", "tests")
    assert result.returncode == code, result.stdout
    assert (f"a test made {made}" in result.stdout) is bool(code)
