"""Every `arriero` command of the documents is valid, and those of the tour and of short pages run."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from rich.markup import render

from arriero.cli import app
from arriero.config.load import read_run
from arriero.config.schema import RunConfig
from arriero.config.site import load_site
from arriero.federate.schema import FederationConfig
from arriero.model.presets import expand
from arriero.plan.hardware import load_cluster

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "recipes/**/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)


def commands(page):
    """Return the commands of the bash blocks of a page, as lists of arguments."""
    for block in re.findall(r"```(?:bash)?\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            found = re.search(r"(?:^|\| |&& |4 )arriero (.*)", line.strip())
            if found:
                yield shlex.split(found[1], comments=True)
    if page.name == "README.md" and page.parent == ROOT:
        for line in re.findall(
            r"`arriero ([^`]+)`", "".join(re.findall(r"^\| ?[^`]*\|.*\n", page.read_text(), flags=re.M))
        ):
            yield shlex.split(line)


def parse(command, arguments, parent=None, name="arriero"):
    """Parse a command down to its verb, as the command line does, without running it."""
    if not hasattr(command, "resolve_command") or not arguments:
        command.make_context(name, list(arguments), parent=parent)
        return
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    context.resilient_parsing = False
    verb, command, rest = command.resolve_command(context, list(arguments))
    parse(command, rest, context, verb)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_verbs_and_options_of_a_page_exist(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    group = typer.main.get_command(app)
    for arguments in commands(page):
        try:
            parse(group, arguments)
        except Exception as error:
            # files of the reader do not exist here
            is_missing_file = type(error).__name__ == "BadParameter" and "does not exist" in str(error)
            assert is_missing_file, f"{shlex.join(arguments)}: {error}"


TOML_BLOCKS = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(
        re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
]


@pytest.mark.parametrize("block", TOML_BLOCKS)
def test_keys_and_values_of_a_toml_block_are_valid(block, tmp_path):
    """Blocks are run files, cluster files, site files and federation files, or parts of them."""
    path = tmp_path / "block.toml"
    path.write_text(block, encoding="utf-8")
    document = tomllib.loads(block)
    if "sources" in document:
        path.write_text(f"[data]\npacking = 'bestfit'\n{block}", encoding="utf-8")
        document = {"data": document}
    if document.keys() <= {*RunConfig.model_fields, "extends"}:
        needed = [] if "sources" in document.get("data", {}) else ["data.sources=['builtin:stdlib']"]
        needed += [] if "model" in document else ["model.preset=llama3.1-8b"]
        needed += [] if "train" in document else ["train.horizon=1T tok"]
        _, problems = read_run(path, needed, expand)
        assert [each for each in problems if "does not exist" not in each.what] == []  # files of the reader
    elif "links" in document:
        load_cluster(str(path))
    elif "sites" in document or "federation" in document:
        FederationConfig.model_validate(document)
    else:
        load_site(str(path))


def help_texts(command, path=()):
    """Yield the help text of every verb and option."""
    for name, each in getattr(command, "commands", {}).items():
        yield from help_texts(each, (*path, name))
    for text in (command.help, *(getattr(each, "help", "") for each in command.params)):
        yield " ".join(path), text or ""


def test_no_help_text_loses_words_in_brackets():
    """Rich reads [word] as markup and does not print it; it must be written \\[word]."""
    for verb, text in help_texts(typer.main.get_command(app)):
        assert render(text).plain == text.replace("\\[", "["), verb


SMALL = ["--set", "train.batch=1024 tok", "--set", "eval.heldout=2k tok", "--set", "model.layers=2"]


@pytest.mark.slow
def test_the_tour_runs_from_top_to_bottom(arriero, corpus_cache, tmp_path):
    """Commands that are also in the table of README.md run in the test of that table."""
    (tmp_path / "data").mkdir()
    for dataset in corpus_cache.iterdir():
        (tmp_path / "data" / dataset.name).symlink_to(dataset)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ran = 0
    for arguments in commands(ROOT / "docs" / "tour.md"):
        line = shlex.join(arguments)
        if f"`arriero {line}`" in readme or arguments == ["train"]:
            continue
        result = arriero(*arguments, *(SMALL if arguments[0] == "train" else []))
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        ran += 1
    assert ran > 10
