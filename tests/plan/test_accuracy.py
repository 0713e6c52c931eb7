"""The planner's predictions against published and measured results."""

import statistics
from pathlib import Path

import pytest

from benchmarks.planner import compare, measured_ops, measured_rows, page, published


@pytest.fixture(scope="module")
def rows():
    return compare(published())


def test_published_speeds_that_were_not_fitted_are_predicted_within_bounds(rows):
    errors = {each.row.name: abs(each.error) for each in rows if not each.row.fitted}
    assert len(errors) >= 130
    assert statistics.median(errors.values()) <= 0.08
    assert max(errors.values()) <= 0.35, max(errors, key=errors.__getitem__)


def test_published_memory_is_predicted_within_bounds(rows):
    published = [each for each in rows if each.memory_error is not None]
    errors = {each.row.name: each.memory_error for each in published if not each.row.peak_remark}
    assert len(errors) >= 19 and len(published) == len(errors) + 1
    assert statistics.median(map(abs, errors.values())) <= 0.05
    assert all(abs(error) <= 0.10 for name, error in errors.items() if "405b" not in name)
    assert all(abs(error) <= 0.13 for error in errors.values())


def test_only_7b_and_8b_rows_are_fitted(rows):
    sizes = [each.row.config.model.dim for each in rows if each.row.fitted]
    assert sizes and set(sizes) == {4096}


def test_steps_on_one_h200_are_predicted_without_measurements():
    errors = {each.row.name: abs(each.error) for each in compare(measured_rows())}
    assert len(errors) >= 24
    assert statistics.median(errors.values()) <= 0.05
    assert max(errors.values()) <= 0.10, max(errors, key=errors.__getitem__)


def test_steps_on_one_h200_are_predicted_from_measured_operations():
    errors = {each.row.name: abs(each.error) for each in compare(measured_rows(), measured_ops())}
    assert max(errors.values()) <= 0.05, max(errors, key=errors.__getitem__)


def test_the_docs_state_the_current_errors():
    stored = (Path(__file__).parents[2] / "docs" / "planner-accuracy.md").read_text(encoding="utf-8")
    stated = [line for line in page().splitlines() if line.startswith("- ")]
    assert len(stated) == 6
    assert all(line in stored for line in stated), "run `make planner-accuracy`"
