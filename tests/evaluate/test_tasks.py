"""Tasks of lm-evaluation-harness on a stored model, and the watcher, without a network."""

import json
import shutil
from pathlib import Path

import pytest

from arriero.checkpoint.scores import read_evaluations

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture
def task_folder(tmp_path):
    folder = tmp_path / "tasks"
    shutil.copytree(TASKS, folder)
    for path in folder.glob("*.yaml"):
        path.write_text(path.read_text().replace("PATH", str(folder)))
    return folder


@pytest.mark.slow
def test_a_local_task_is_evaluated_and_stored(arriero, trained, task_folder):
    checkpoint = trained.run / "checkpoints" / "step-00000012"
    arguments = ["--tasks", "arriero_python", "--include", task_folder, "--device", "cpu", "--json"]
    result = arriero("eval", "tasks", checkpoint, *arguments)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)["tasks"]
    assert row["task"] == "arriero_python" and row["examples"] == 12
    assert {"acc", "acc_norm"} == set(row["metrics"])
    (stored,) = [each for each in read_evaluations(checkpoint) if each.kind == "tasks"]
    assert stored.scores == {"arriero_python acc": row["metrics"]["acc"]}


def test_the_watcher_evaluates_each_checkpoint_once(command, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained.run, run)
    for old in run.rglob("evaluation-*.json"):
        old.unlink()
    watch = ["eval", "watch", run, "--device", "cpu", "--poll", "0.1", "--json"]
    first = command(*watch)
    assert first.returncode == 0, first.stderr
    rows = [json.loads(line) for line in first.stdout.splitlines()]
    assert [row["step"] for row in rows] == [6, 12]
    assert command(*watch).stdout == ""
    assert "nothing to evaluate" in command(*watch[:-1]).stdout
    shutil.copytree(run / "checkpoints" / "step-00000012", run / "checkpoints" / "step-00000013")
    damaged = run / "checkpoints" / "step-00000006"
    next(damaged.glob("evaluation-*.json")).unlink()
    weights = next(damaged.glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-9])
    second = command(*watch)
    assert second.returncode == 1
    (row,) = [json.loads(line) for line in second.stdout.splitlines()]
    assert row["step"] == 6 and "damaged" in row["problem"]
