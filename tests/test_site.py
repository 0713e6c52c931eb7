"""The documentation site: it builds without a warning, needs no network, and its search works from a file."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from browser import browse

ROOT = Path(__file__).parents[1]
SEARCH = """<pre id="found"></pre><script>
setTimeout(() => {
  const query = document.querySelector("[data-md-component=search-query]")
  query.focus()
  query.value = "stochastic rounding"
  query.dispatchEvent(new KeyboardEvent("keyup", { key: "g", bubbles: true }))
  query.dispatchEvent(new Event("input", { bubbles: true }))
}, 1500)
setTimeout(() => {
  const found = document.querySelectorAll(".md-search-result__item").length
  const loaded = performance.getEntriesByType("resource").map((each) => each.name)
  const network = loaded.filter((name) => name.startsWith("http"))
  document.getElementById("found").textContent = JSON.stringify({ found, network, errors: window.errors })
}, 9000)
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; a broken link or anchor is a warning, and a warning fails the build."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs mkdocs-material (pip install -c constraints.txt '.[docs]')")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "mkdocs.yml"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run([*command, "-d", folder], env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_built_and_loads_nothing_from_the_network(site):
    pages = sorted(site.rglob("*.html"))
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {page.stem for page in pages}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="?https?://', text), page


def test_lists_and_tables_of_the_markdown_are_lists_and_tables_of_the_site(site):
    for page in site.glob("docs/*.html"):
        text = re.sub(r"<(pre|code).*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"<p>[^<]*\|---", text), page
        assert not re.search(r"<p>[^<]*\n *(-|\d+\.) ", text), page


@pytest.mark.slow
def test_search_finds_the_terms_of_the_field(site):
    answer, console = browse(site / "index.html", SEARCH)
    assert answer["found"] > 3
    assert (answer["network"], answer["errors"], console) == ([], [], [])


def test_the_reference_of_the_api_is_generated_from_the_docstrings():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert (ROOT / "docs" / "api-reference.md").read_text(encoding="utf-8") == hooks.reference(), (
        "run `make docs`"
    )
