"""The page of a plan works in a real browser: no errors, every mark where the data says, and tooltips."""

import json
import re
from html import unescape
from itertools import pairwise

import pytest

from arriero.report.page import Cell, Column, Section, page, significant, table, ticks
from browser import browse

# appended to the page: point at every mark, as a mouse would, and report what the page shows
PROBE = """
<script>
const wide = document.documentElement.scrollWidth > innerWidth;
const found = { marks: 0, hit: 0, tips: 0, wide, errors: window.errors };
for (const mark of document.querySelectorAll("[data-tip]")) {
  mark.scrollIntoView({ block: "center" });
  const box = mark.getBoundingClientRect(), x = box.left + box.width / 2, y = box.top + box.height / 2;
  found.marks += 1;
  const top = document.elementFromPoint(x, y);
  if (top) found.hit += top.closest("[data-tip]") ? 1 : 0;
  (top || mark).dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: x, clientY: y }));
  const tip = document.getElementById("tip");
  found.tips += tip.classList.contains("shown") && tip.textContent.length > 10 ? 1 : 0;
}
const button = document.querySelector("th button");
const rows = () => [...button.closest("table").tBodies[0].rows].map((row) => row.cells[0].textContent);
const before = rows();
button.click();
found.sorted = JSON.stringify(rows()) === JSON.stringify([...before].sort().reverse());
const out = document.createElement("pre");
out.id = "found";
out.textContent = JSON.stringify(found);
document.body.append(out);
</script>
"""


@pytest.fixture
def written(command, tmp_path, monkeypatch):
    """The page of a plan with a pipeline, and the data it shows."""
    monkeypatch.setenv("ARRIERO_CACHE", str(tmp_path / "cache"))

    def plan(*options):
        sets = ("model.preset=llama3-70b", "data.seq_len=8192", "train.batch=2097152 tok")
        given = [word for each in sets for word in ("--set", each)]
        arguments = ("plan", *given, "--cluster", "8xh100", "--nodes", "8", *options)
        ran = command(*arguments, "--json", "--html", tmp_path / "plan.html", "--top", "1000")
        assert ran.returncode == 0, ran.stderr
        return tmp_path / "plan.html", json.loads(ran.stdout)

    return plan


def test_every_mark_answers_the_pointer_in_a_browser(written):
    path, facts = written("--fix", "pp=4")
    found, console = browse(path, PROBE)
    assert console == []
    assert found["errors"] == []
    assert found["marks"] == found["tips"], "a mark shows no tooltip"
    assert found["hit"] >= 0.99 * found["marks"], "marks are covered by other elements"
    assert found["sorted"], "a click on a heading does not sort"
    text = path.read_text(encoding="utf-8")
    candidates = facts["candidates"]
    assert text.count('class="mark dot') == len(candidates)
    assert text.count('<div class="lane">') == 4
    assert facts["timeline"] and facts["timeline_micro_batches"] <= candidates[0]["gradient_accumulation"]
    assert found["marks"] > len(facts["timeline"]) + len(candidates)


def test_the_page_fits_a_phone(written):
    path, _ = written()
    found, console = browse(path, PROBE, width=500)
    assert (console, found["errors"]) == ([], [])
    assert not found["wide"], "the page scrolls sideways"
    assert found["marks"] == found["tips"]


def test_the_page_is_one_file_with_the_content_of_the_plan(written):
    path, facts = written()
    text = path.read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "http" not in re.sub(r"https?://www\.w3\.org\S*", "", text)
    assert "prefers-color-scheme: dark" in text
    shown = unescape(re.sub("</?code>", "`", text))
    for sentence in facts["explanation"]:
        assert sentence in shown
    for each in facts["rejected"]:
        assert each["reason"] in shown
    assert "Pipeline" not in re.findall("<h2>(.*?)</h2>", text), "this plan has no pipeline"


def test_text_of_users_is_escaped():
    made = page("<script>", "a & b", [Section("x<y", table([Column("<b>")], [[Cell("<i>", '"')]]))])
    assert "<script>alert" not in made
    for text in ("&lt;script&gt;", "a &amp; b", "x&lt;y", "&lt;b&gt;", "&lt;i&gt;", "&quot;"):
        assert text in made


@pytest.mark.parametrize(("low", "high"), [(0, 79.2), (37.0, 44.3), (0.0012, 0.0013), (5, 5), (0, 3e6)])
def test_ticks_enclose_the_data_with_round_numbers(low, high):
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high
    assert 2 <= len(found) <= 8
    assert len({round(b - a, 9) for a, b in pairwise(found)}) == 1


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1234.5, "1,234"), (37.04, "37"), (0.01234, "0.0123"), (1.5, "1.5")]
)
def test_numbers_have_three_digits(value, text):
    assert significant(value) == text
