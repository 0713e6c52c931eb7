"""Every combination of layout and mode runs; one that fails is shown, and the others still run.

Compiled cells take a minute each on two cores: a sample of the cells runs here, all of them in
`make bench-small`.
"""

import json
import re

import pytest

from arriero.bench.matrix import (
    LAYOUTS,
    MODELS,
    MODES,
    Cell,
    Matrix,
    MatrixRequest,
    main_error,
    matrix_html,
    matrix_markdown,
    run_cells,
    settings,
)
from arriero.bench.result import StepResult
from arriero.model.presets import resolve
from arriero.model.spec import ModelSpec


@pytest.fixture
def order(tmp_path, synthetic_cache):
    (tmp_path / "cells").mkdir()

    def make(**changes):
        given = {
            "models": list(MODELS),
            "layouts": LAYOUTS,
            "modes": list(MODES),
            "steps": 2,
            "warmup": 1,
            "accumulate": 1,
            "small": True,
            "devices": 0,
            "sets": [f"data.cache='{synthetic_cache}'"],
            "folder": tmp_path,
            "timeout": 600,
        }
        return MatrixRequest(**given | changes)

    return make


def test_a_sample_of_cells_runs_and_a_failing_one_does_not_stop_the_rest(order, monkeypatch):
    monkeypatch.setitem(MODES, "impossible", {"memory.activation_checkpointing": "budget:0.5"})
    wanted = order(models=["llama3.1-8b"], layouts=["1 process", "HSDP"], modes=["impossible", "float8"])
    cells = {(cell.layout, cell.mode): cell for cell in run_cells(wanted)}
    assert len(cells) == 4
    for (layout, mode), cell in cells.items():
        if mode == "impossible":
            assert cell.result is None
            assert (
                cell.problem.startswith("embedded default: memory.activation_checkpointing")
                or "compiler" in cell.problem
            )
        else:
            assert cell.problem == "", (layout, mode, cell.problem)
            assert cell.result.gate.holds
    assert cells["HSDP", "float8"].result.layout == "dp_replicate 2 x dp_shard 2"
    assert cells["HSDP", "float8"].result.gate == cells["1 process", "float8"].result.gate


def test_cells_that_need_more_gpus_say_how_many(order):
    cells = list(run_cells(order(small=False, devices=0)))
    assert len(cells) == 4 * 4 * 5
    assert {cell.layout: cell.problem for cell in cells} == {
        "1 process": "needs 1 GPU",
        "DDP": "needs 2 GPUs",
        "FSDP": "needs 2 GPUs",
        "HSDP": "needs 4 GPUs",
    }


@pytest.mark.parametrize("name", list(MODELS))
def test_a_small_sister_has_the_models_family_and_grouping_of_heads(name, order):
    whole = resolve(MODELS[name].preset, {})
    _, sets = settings(order(), name, "1 process", "bf16")
    own = {key.removeprefix("model."): v for key, v in sets.items() if key.startswith("model.")}
    small = resolve(own.pop("preset"), own)
    assert isinstance(small, ModelSpec)
    assert (small.family, small.tied) == (whole.family, whole.tied)
    assert small.heads // small.kv_heads == whole.heads // whole.kv_heads
    assert small.parameters < 2_000_000


def test_all_gpus_are_used_and_each_has_the_same_batch(order):
    for layout, expected in [("1 process", 1), ("DDP", 8), ("FSDP", 8), ("HSDP", 8)]:
        ranks, sets = settings(order(small=False, devices=8), "gpt2-1.5b", layout, "bf16")
        assert ranks == expected
        assert sets["train.batch"] == f"{8 * 1024 * ranks} tok"
        assert sets["parallel.dp_replicate"] * sets["parallel.dp_shard"] == ranks
    assert sets["parallel.dp_replicate"] == 2


@pytest.mark.parametrize(
    ("stdout", "stderr", "words"),
    [
        ("", "W1115 warning\nerror: precision.float8 goes with bf16; set it\n", "precision.float8 goes"),
        ("the loss check failed: no speed\n  loss differs by 1.00e+00\n", "", "loss differs by 1.00e+00"),
        (
            "",
            "Traceback\nx.RankFailed: rank 0 failed first:\nTraceback\n  File\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried\n",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        ("", "Killed\n", "Killed"),
    ],
)  # fmt: skip
def test_a_failure_is_told_in_its_own_words(stdout, stderr, words):
    assert words in main_error(stdout, stderr)


def test_the_pages_show_speeds_problems_and_missing_gpus(measured):
    result = StepResult.read(measured)
    cells = [
        Cell(model="gpt2-1.5b", layout="1 process", mode="bf16", ranks=1, result=result, problem=""),
        Cell(model="gpt2-1.5b", layout="DDP", mode="bf16", ranks=2, result=None, problem="needs 2 GPUs"),
        Cell(model="gpt2-1.5b", layout="1 process", mode="float8", ranks=1, result=None, problem="a <b> | c"),
    ]
    matrix = Matrix(time="2026-11-15T00:00+00:00", small=True, accumulate=1, cells=cells)
    text, page = matrix_markdown(matrix), matrix_html(matrix)
    speed = f"{result.timing.tokens_per_s:,.0f} tok/s"
    for shown in (text, page):
        assert speed in shown
        assert "needs 2 GPUs" in shown
        assert "1 of 3 cells ran, 1 failed, 1 need more GPUs. 2026-11-15T00:00+00:00" in shown
        assert "scaled-down models" in shown
    assert "a <b> \\| c" in text
    assert "a &lt;b&gt; | c" in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r'(src|href)="(?!data:)|@import|url\(', page)
    assert Matrix.model_validate_json(json.dumps(matrix.model_dump(mode="json"))) == matrix
