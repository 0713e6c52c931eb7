"""Check the documents: their commands run, their run files are valid, their links and numbers exist."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from arriero.bench.cases import MODELS, cases
from arriero.model.presets import preset_names
from arriero.plan.commands import page

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
RESULTS = REPOSITORY / "benchmarks" / "results"

TABLE_COMMANDS = re.findall(r"^\|[^|]+\| `(arriero [^`]+)` \|$", README, flags=re.MULTILINE)
RUN_FILE = re.search(r"```toml\n(.*?)```", README, flags=re.DOTALL).group(1)
SMALL = ["--set", "train.batch=1024 tok", "--set", "model.layers=3"]
SHORT = [*SMALL, "--set", "train.horizon=2 steps", "--set", "eval.heldout=2k tok"]


@pytest.mark.slow
def test_the_commands_of_the_readme_table_run_one_after_the_other(arriero, corpus_cache, tmp_path):
    """Run them as a reader would: from the first row to the last, in one folder."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "data").mkdir()
    for dataset in corpus_cache.iterdir():
        (tmp_path / "data" / dataset.name).symlink_to(dataset)
    assert len(TABLE_COMMANDS) > 12
    for line in TABLE_COMMANDS:
        arguments = shlex.split(line)[1:]
        sets = {"train": SHORT, "bench step": SMALL}
        more = next((each for start, each in sets.items() if " ".join(arguments).startswith(start)), [])
        result = arriero(*arguments, *more)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        assert result.stdout.strip(), line


def test_the_readme_shows_the_output_of_config_check(command, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("COLUMNS", "120")
    check = re.search(r"^arriero (config check recipes/\S+ .*)$", README, flags=re.MULTILINE)
    result = command(*shlex.split(check[1]))
    assert result.returncode == 0, result.stderr
    shown = "\n".join(line.rstrip() for line in result.stdout.splitlines())
    assert f"```\n{shown}\n```" in README


def test_the_readme_names_the_commands_of_the_makefile_that_ci_runs():
    targets = re.findall(r"^(\w[\w-]*):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    commands = re.findall(r"^make (\S+)", README, flags=re.MULTILINE)
    assert commands == ["demo", "test"]
    assert set(commands) <= set(targets)
    ci = re.findall(r"^make (\S+)", (REPOSITORY / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert ci == commands, "CI runs them in one clone, in this order"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_map_names_every_module():
    pages = (REPOSITORY / "docs" / "architecture.md").read_text()
    modules = [p for p in (REPOSITORY / "src" / "arriero").rglob("*.py") if not p.name.startswith("__")]
    assert not [p.name for p in modules if p.name not in pages]


def test_the_readme_counts_the_presets():
    assert f"{len(preset_names())} named models" in README


def test_the_changelog_lists_every_renamed_key():
    aliases = tomllib.loads((REPOSITORY / "src" / "arriero" / "config" / "aliases.toml").read_text())
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    for old, new in aliases["renamed"].items():
        assert f"| key `{old}` | `{new}`" in changelog


def test_the_page_of_all_keys_is_generated_from_the_schema():
    written = (REPOSITORY / "docs" / "config.md").read_text()
    assert written == page(), "run `make docs`"
    assert "arriero config reference > docs/config.md" in (REPOSITORY / "Makefile").read_text()


def parity_rows():
    text = (REPOSITORY / "docs" / "parity.md").read_text()
    for model, tables in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL):
        for group, table in re.findall(
            r"^### (.+?)\n(.*?)(?=^### |\Z)", tables, flags=re.MULTILINE | re.DOTALL
        ):
            for row in re.findall(r"^\| (.+) \| (\d+) \|.*\| (\S+) \|$", table, flags=re.MULTILINE):
                yield model, group, *row


def test_the_parity_page_holds_every_case():
    every = [(model, case.group, case.name, str(case.ranks)) for model in MODELS for case in cases(model)]
    rows = list(parity_rows())
    assert [row[:4] for row in rows] == every, "run `make parity`"
    assert {row[4] for row in rows} == {"holds"}
    text = (REPOSITORY / "docs" / "parity.md").read_text()
    assert f"**{len(every)} of {len(every)} cases hold**" in text


def test_results_in_the_docs_come_from_clean_commits():
    """Results of uncommitted source are cited in the section of older measurements only."""
    for path in [*RESULTS.glob("*.json"), *(REPOSITORY / "benchmarks" / "costs" / "results").glob("*.json")]:
        assert json.loads(path.read_text())["code"]["dirty"] is False, path.name
    for each in PAGES:
        text = each.read_text().partition("## Older measurements")[0]
        assert "benchmarks/results/older/" not in text, each.name
        for name in re.findall(r"benchmarks/results/([\w.-]+\.json)", text):
            assert (RESULTS / name).is_file(), name
