"""Examples and recipes: their commands run, and their pages say what the planner predicts."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from benchmarks.predictions import PAGES, ROOT, ROW, cell, numbers

# Verbs that neither train nor need data or a network.
VERBS = ("plan", "config check", "fed plan", "fed init", "launch render")
ROWS = [
    pytest.param(row["command"], row["cell"], id=row["command"])
    for page in PAGES
    for row in ROW.finditer(page.read_text(encoding="utf-8"))
    if "parallel=default" not in row["command"]  # a search of several seconds each
]
BLOCKS = [
    line
    for page in PAGES
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for line in block.splitlines()
    if line.startswith(tuple(f"arriero {verb} " for verb in VERBS[1:]))
]


@pytest.fixture
def folder(tmp_path):
    """Copy what the commands read, so that nothing is written into the repository."""
    for name in ("examples", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("line", "shown"), ROWS)
def test_the_page_shows_what_the_planner_predicts(command, line, shown):
    result = command(*shlex.split(line), "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    predicted = cell(json.loads(result.stdout))
    assert numbers(shown) == pytest.approx(numbers(predicted), rel=0.05), "run `make predictions`"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", BLOCKS)
def test_the_commands_of_the_pages_run(command, line):
    result = command(*shlex.split(line)[1:])
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_run_file_has_a_planned_row():
    planned = {shlex.split(command.values[0])[1] for command in ROWS}
    for path in [*(ROOT / "examples").rglob("*.toml"), *(ROOT / "recipes").rglob("*.toml")]:
        is_run_file = re.search(r"^\[run\]$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if is_run_file:
            assert path.relative_to(ROOT).as_posix() in planned


@pytest.mark.parametrize("page", [*PAGES, ROOT / "recipes" / "README.md"], ids=lambda page: page.parent.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", Path(page).read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
