"""What `bench costs` says is made of the ordinary code, adds up, and tells nothing about where it ran."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arriero.bench.cost_memory import (
    PRECISIONS,
    REMATS,
    STATES,
    LiveTensors,
    beside_the_plan,
    held_by,
    memory,
)
from arriero.bench.cost_sizes import Place, Sizes
from arriero.bench.cost_steps import growth, overhead, saves
from arriero.bench.cost_waits import data_wait, start_up
from arriero.bench.costs import MEASURES, measure_costs
from arriero.bench.costs_commands import NAMES
from arriero.bench.costs_result import Costs
from arriero.bench.results_page import BEGIN, END, read_results, tables
from arriero.errors import UserError
from arriero.model.build import build_model
from arriero.model.presets import load_preset
from arriero.model.spec import ModelSpec

LEAST = Sizes().least
TINY = Sizes(
    starts=1,
    blocks=2,
    repeats=1,
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
    kept=LEAST,
)


@pytest.fixture
def place(tmp_path, synthetic_cache):
    return Place("cpu", tmp_path, synthetic_cache, TINY)


@pytest.fixture(scope="module")
def found(synthetic_cache):
    quick = ["overhead", "data-wait", "growth"]
    return measure_costs(quick, "cpu", synthetic_cache, lambda _: None, TINY)


def test_the_trainers_share_is_the_step_less_the_bare_calls(place):
    rows = overhead(place).rows
    assert [row.what[-2:].strip() for row in rows] == ["1", "10"]
    for row in rows:
        whole, bare, own, _ = row.values.values()
        assert (whole, bare) == tuple(min(samples) for samples in row.samples.values())
        assert own == pytest.approx(whole - bare)
        assert [len(samples) for samples in row.samples.values()] == [2, 2]
        assert bare > 0


def test_every_save_is_seen_and_only_one_kept(place):
    kinds = saves(place).rows
    assert [row.what for row in kinds] == ["tiny, in the background", "tiny, at once"]
    for row in kinds:
        assert len(row.samples["ms waited"]) == 3
        assert row.values["ms until it was safe"] > 0
        assert row.values["MB on disk"] * 1e6 > 12 * ModelSpec.from_dict(_model(LEAST)).parameters
    assert len(list(place.folder.glob("*/bench/checkpoints/step-*"))) == 2


def _model(sets):
    dims = {key.removeprefix("model."): value for key, value in sets.items() if key.startswith("model.")}
    return {"vocab_size": 4096, "max_seq_len": 64} | dims


def test_data_is_drawn_at_the_asked_rate(place):
    rows = data_wait(place).rows
    assert [row.what for row in rows] == [
        "sequences of 16",
        "sequences of 64",
        "sequences of 16, with document masks",
        "sequences of 64, with document masks",
    ]
    assert [row.values["ms a step"] for row in rows[:2]] == pytest.approx([32 * 16 / 1e5, 32 * 64 / 1e5])
    assert all(0 < row.values["% of the time"] < 100 for row in rows)


def test_growth_is_told_beside_the_formula(place):
    rows = growth(place).rows
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


def test_a_run_that_does_not_start_is_said(place):
    with pytest.raises(UserError, match=r"did not start: run\.device is 'cuda'"):
        start_up(replace(place, device="cuda"))


def test_live_tensors_are_counted_once_and_until_they_go():
    with LiveTensors() as live:
        a = torch.zeros(1000)
        view = a.view(10, 100)
        assert live.now() == 4000
        b = view * 2
        assert live.now() == 8000
        del a, view
        assert live.now() == 4000
        del b
    assert (live.now(), live.peak()) == (0, 8000)


def test_live_tensors_see_what_only_the_backward_pass_holds():
    weight = torch.ones(1000, requires_grad=True)
    with LiveTensors() as live:
        loss = (weight * 2).exp().sum()
        kept = live.now()
        loss.backward()
    # the result of exp, and the loss
    assert kept == 4000 + 4
    assert weight.grad is not None


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_plan_knows_the_bytes_of_every_state(place, precision, state):
    """All choices of the table but recomputation, which state does not depend on."""
    # the quantiles that weights are drawn by are made once in a process, and are of no run
    build_model(load_preset("llama-test")).init_weights(1)
    sets = {**LEAST, "model.dim": 64, "model.ffn": 128, "model.heads": 1, **PRECISIONS[precision]}
    place = replace(place, sizes=replace(TINY, kept=sets))
    values = beside_the_plan(place, "it", {"optim.state": state}, on_gpu=False).values
    assert values["ratio"] == pytest.approx(1.0, abs=0.02)
    assert values["peak measured"] >= values["measured"]


def test_the_table_of_memory_has_every_choice(place, monkeypatch):
    held = held_by(place.run(2, LEAST), on_gpu=False)
    monkeypatch.setattr("arriero.bench.cost_memory.held_by", lambda *_: held)
    cost = memory(place)
    assert (
        len(cost.rows) == len({row.what for row in cost.rows}) == len(PRECISIONS) * len(STATES) * len(REMATS)
    )
    assert "all tensors alive" in cost.explanation


def test_recomputation_leaves_less_alive(place):
    sets = {**LEAST, "model.layers": 4, "data.seq_len": 256, "train.batch": "1024 tok"}
    peaks = [held_by(place.run(2, sets | {"memory.remat": kind}), False).peak for kind in ("none", "full")]
    assert peaks[1] < peaks[0]


def test_a_result_has_its_provenance_and_no_places(found, tmp_path, synthetic_cache):
    path = tmp_path / "costs.json"
    found.write(path)
    assert Costs.read(path) == found
    assert [cost.name for cost in found.costs] == ["overhead", "data-wait", "growth"]
    asked = ["--device", "cpu", "--only", "overhead,data-wait,growth"]
    assert found.command == ["arriero", "bench", "costs", *asked]
    assert found.code.versions["torch"]
    assert found.device.cpu
    text = path.read_text()
    for place in (tmp_path, synthetic_cache, Path.home(), Path.cwd(), "/tmp"):
        assert f'"{place}' not in text
    assert str(synthetic_cache) not in text


def test_the_page_shows_costs_beside_speeds(arriero, found, tmp_path):
    (tmp_path / "results").mkdir()
    found.write(tmp_path / "results" / "costs.json")
    (tmp_path / "page.md").write_text(f"# Speed\n{BEGIN}\nold\n{END}\n")
    done = arriero("bench", "page", "--results", "results", "--write", "page.md")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.md").read_text()
    assert "### Cost of the rest" in text
    assert "[costs.json](results/costs.json)" in text
    for cost in found.costs:
        assert f"**{cost.name}.** {cost.explanation}" in text
        assert f"| {cost.rows[0].what} |" in text


def test_both_kinds_of_results_live_in_one_folder(found, measured, tmp_path):
    shutil.copy(measured, tmp_path / "step.json")
    found.write(tmp_path / "costs.json")
    kept = read_results(tmp_path)
    assert sorted(isinstance(result, Costs) for _, result in kept) == [False, True]
    page = tables(kept, tmp_path)
    assert page.index("Where a step goes") < page.index("### Cost of the rest")


def test_costs_of_another_version_are_refused(found, tmp_path):
    changed = json.loads(found.model_dump_json()) | {"schema_version": 99}
    (tmp_path / "old.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="schema_version"):
        read_results(tmp_path)


def test_the_command_knows_every_cost():
    assert tuple(MEASURES) == NAMES


def test_a_mistake_ends_in_one_sentence(arriero, tmp_path):
    for arguments, words in [
        (["--only", "save"], "there is no 'save' (did you mean 'saves'?)"),
        (["--only", "growth", "--device", "cuda"], "torch sees no GPU here"),
    ]:
        result = arriero("bench", "costs", *arguments)
        assert result.returncode == 2, result.stderr
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
