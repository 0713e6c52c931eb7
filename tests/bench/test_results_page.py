"""The published tables are what the kept results say."""

import shutil
from pathlib import Path

import pytest

from arriero.bench.cases import BF16, FLOAT8, FP32, STATES
from arriero.bench.result import Energy, StepResult, Timing, read_results, replace_section, tables
from arriero.bench.step import COMPILED, MASKED
from arriero.errors import UserError
from arriero.model.spec import FLOP_FORMULAS

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "performance.md"


def test_the_committed_page_is_the_generated_one():
    text = PAGE.read_text()
    kept = read_results([REPOSITORY / "benchmarks" / "results"])
    assert replace_section(text, "results", tables(kept, PAGE.parent), "it") == text


def test_the_page_has_the_formula_of_every_convention():
    text = PAGE.read_text()
    for name, convention in FLOP_FORMULAS.items():
        assert f"| {name} | {convention.formula.partition(' (causal')[0]}" in text


def test_the_page_has_the_bounds_of_the_gate():
    text = PAGE.read_text()
    for bounds in (FP32, COMPILED, BF16, MASKED, FLOAT8):
        assert f"| {_short(bounds.loss)} | {_short(bounds.norm)} |" in text
    assert "; ".join(_short(bounds.loss) for bounds in STATES.values()) in text


def _short(bound):
    return f"{bound:.1e}".replace(".0e", "e").replace("e-0", "e-")


def test_a_single_step_is_called_one(measured, tmp_path):
    result = StepResult.read(measured)
    alone = Timing.of([1500.0], 1000, 0, 2.0)
    found = tables([(tmp_path / "a.json", result.model_copy(update={"timing": alone}))], tmp_path)
    assert "1,500.0 (one step, the first)" in found


def test_a_result_that_is_older_than_a_formula_has_an_empty_cell(measured, tmp_path):
    result = StepResult.read(measured)
    old = result.model_copy(update={"rates": result.rates[:1]})
    assert "| a | " in tables([(tmp_path / "a.json", old)], tmp_path)


def test_results_become_rows_with_every_convention_and_every_part(arriero, measured, tmp_path):
    (tmp_path / "results").mkdir()
    shutil.copy(measured, tmp_path / "results" / "a.json")
    result = StepResult.read(measured)
    gate = result.gate.model_copy(update={"needed": True, "holds": True, "loss": 3e-4, "loss_bound": 2e-3})
    energy = Energy(joules_per_step=1234.0, tokens_per_joule=2.0)
    changed = {"mode": "bf16, compiled", "energy": energy, "gate": gate}
    result.model_copy(update=changed).write(tmp_path / "results" / "b.json")
    page = tmp_path / "page.md"
    page.write_text("# Speed\n\n<!-- results -->\nold\n<!-- /results -->\n\nafter\n")
    written = arriero("bench", "compare", "results", "--write", "page.md")
    assert written.returncode == 0, written.stderr
    text = page.read_text()
    assert text.startswith("# Speed\n")
    assert text.endswith("\n\nafter\n")
    assert "old" not in text
    assert f"{result.timing.tokens_per_s:,.0f}" in text
    assert f"{result.timing.upper_quartile_ms:,.1f} of 4 steps)" in text
    assert "[a.json](results/a.json)" in text
    assert "| not reported | is the reference |" in text
    assert "| 1,234 | 3e-04 of 2e-03 |" in text
    for words in ("causal", "nnscaler", "hfu", "GEMM", "communication", "idle"):
        assert words in text
    again = arriero("bench", "compare", "results")
    assert again.stdout.splitlines()[0] in text


def test_a_page_without_results_says_so(tmp_path):
    (tmp_path / "results").mkdir()
    assert tables(read_results([tmp_path / "results"]), tmp_path) == "No results yet.\n"


def test_a_page_without_marks_is_left_alone():
    with pytest.raises(UserError, match="has no"):
        replace_section("# nothing here\n", "results", "tables", "page.md")
