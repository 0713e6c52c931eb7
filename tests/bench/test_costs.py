"""`make bench-costs` measures the ordinary training code and stores results without paths."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from arriero.bench.result import replace_section
from arriero.errors import UserError
from arriero.model.spec import ModelSpec
from benchmarks.costs.__main__ import RESULTS, main, measure_costs
from benchmarks.costs.result import Costs, section
from benchmarks.costs.sizes import Place, Sizes
from benchmarks.costs.steps import saves
from benchmarks.costs.waits import start_up
from benchmarks.script import run_script

REPOSITORY = Path(__file__).parents[2]

LEAST = Sizes().least
TINY = Sizes(
    starts=1,
    blocks=1,
    repeats=2,
    saves=3,
    saved=(("tiny", LEAST),),
    tokens=100_000,
    tokens_per_s=1e8,
    drawn_s=0.01,
    seq_lens=(16, 64),
    steps=2,
    grown=LEAST,
    seq_len=16,
    longer=(1, 2),
    deeper=(1, 3),
)


@pytest.fixture
def place(tmp_path, synthetic_cache):
    return Place("cpu", tmp_path, synthetic_cache, TINY)


@pytest.fixture(scope="module")
def found(synthetic_cache):
    quick = ["overhead", "data-wait", "growth"]
    return measure_costs(quick, "cpu", synthetic_cache, lambda _: None, TINY)


def rows_of(found, name):
    return next(cost.rows for cost in found.costs if cost.name == name)


def test_overhead_is_measured_at_two_logging_intervals(found):
    rows = rows_of(found, "overhead")
    assert [row.what for row in rows] == ["observe.log_every = 1", "observe.log_every = 10"]
    for row in rows:
        assert [len(samples) for samples in row.samples.values()] == [2, 2]
        fastest = {name: min(samples) for name, samples in row.samples.items()}
        assert all(value > 0 for value in fastest.values())
        assert fastest.items() <= row.values.items()
        assert row.values["µs of overhead"] == fastest["µs per step"] - fastest["µs bare"]


def test_every_save_is_recorded_and_only_one_is_kept(place):
    kinds = saves(place).rows
    assert [row.what for row in kinds] == ["tiny, in the background", "tiny, in the foreground"]
    for row in kinds:
        assert len(row.samples["ms waited"]) == 3
        assert row.values["ms until written"] > 0
        assert row.values["MB on disk"] * 1e6 > 12 * ModelSpec.from_dict(_model(LEAST)).parameters
    assert len(list(place.folder.glob("*/bench/checkpoints/step-*"))) == 2


def _model(sets):
    dims = {key.removeprefix("model."): value for key, value in sets.items() if key.startswith("model.")}
    return {"vocab_size": 4096, "max_seq_len": 64} | dims


def test_data_is_consumed_at_the_given_rate(found):
    rows = rows_of(found, "data-wait")
    assert [row.what for row in rows] == [
        "sequences of 16",
        "sequences of 64",
        "sequences of 16, with document masks",
        "sequences of 64, with document masks",
    ]
    assert [row.values["ms per step"] for row in rows[:2]] == pytest.approx([32 * 16 / 1e5, 32 * 64 / 1e5])
    assert all(0 < row.values["% of the time"] < 100 for row in rows)


def test_growth_is_compared_with_the_flops(found):
    rows = rows_of(found, "growth")
    assert [row.what for row in rows] == ["16 tokens", "32 tokens", "1 layers", "3 layers"]
    for first in (rows[0], rows[2]):
        assert (first.values["times as long"], first.values["times the FLOPs"]) == (1, 1)
    # attention makes it more than twice
    assert 2 < rows[1].values["times the FLOPs"] < 2.1
    assert 1 < rows[3].values["times the FLOPs"] < 3


def test_start_up_counts_to_the_first_step_of_the_embedded_default(place, corpus_cache):
    folder = place.folder / "start-up"
    folder.mkdir()
    (folder / "data").symlink_to(corpus_cache)
    cost = start_up(place)
    assert [len(row.samples["s"]) for row in cost.rows] == [1, 1, 1, 1]
    assert sorted(path.name for path in (folder / "runs").glob("[!.]*")) == ["made", "start-0"]
    first = json.loads((folder / "runs" / "start-0" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 1


def test_a_run_that_does_not_start_is_reported(place):
    with pytest.raises(UserError, match=r"did not start: run\.device is 'cuda'"):
        start_up(replace(place, device="cuda"))


def test_a_result_has_its_versions_and_no_paths(found, tmp_path, synthetic_cache):
    path = tmp_path / "costs.json"
    found.write(path)
    assert Costs.read(path) == found
    assert [cost.name for cost in found.costs] == ["overhead", "data-wait", "growth"]
    asked = ["--device", "cpu", "--only", "overhead,data-wait,growth"]
    assert found.command == ["python", "-m", "benchmarks.costs", *asked]
    assert found.code.versions["torch"]
    assert found.device.cpu
    text = path.read_text()
    for place in (tmp_path, synthetic_cache, Path.home(), Path.cwd(), "/tmp"):
        assert f'"{place}' not in text
    assert str(synthetic_cache) not in text


def test_the_section_of_the_page_has_every_table(found, tmp_path):
    found.write(tmp_path / "results" / "cpu.json")
    text = section(tmp_path / "results", tmp_path)
    assert "[cpu.json](results/cpu.json)" in text
    for cost in found.costs:
        assert f"**{cost.name}.** {cost.explanation}" in text
        assert f"| {cost.rows[0].what} |" in text


def test_the_committed_page_is_the_generated_one():
    page = REPOSITORY / "docs" / "performance.md"
    text = page.read_text()
    assert replace_section(text, "costs", section(RESULTS, page.parent), "it") == text


def test_costs_of_another_version_are_rejected(found, tmp_path):
    changed = json.loads(found.model_dump_json()) | {"schema_version": 99}
    (tmp_path / "old.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="schema_version"):
        section(tmp_path, tmp_path)


def test_a_mistake_ends_in_one_sentence(python, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    result = python("-m", "benchmarks.costs", "--only", "growth", "--device", "cuda")
    assert result.returncode == 2, result.stderr
    monkeypatch.setattr("sys.argv", ["costs", "--only", "save"])
    with pytest.raises(SystemExit, match="2"):
        run_script(main)
    said = [result.stderr, capsys.readouterr().err]
    for text, words in zip(
        said, ("torch sees no GPU here", "there is no 'save' (did you mean 'saves'?)"), strict=True
    ):
        assert words in text
        assert len(text.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
