"""Weights & Biases, MLflow and Aim receive the metrics of a run; a resumed run continues its tracked run."""

import json
import sys
import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from arriero.train import trackers

TRACKERS = Path(sys.prefix) / "trackers"
RUN = """
run = {{ name = "run", device = "cpu" }}
model = {{ preset = "llama-test", vocab_size = 4096 }}
data = {{ seq_len = 64, sources = [{{ path = "builtin:stdlib" }}], cache = "{cache}" }}
train = {{ batch = "512 tok", horizon = "2 steps" }}
schedule = {{ kind = "constant" }}
eval = {{ heldout = "4k tok" }}
observe = {{ log_every = 1, tensorboard = false, trackers = ["wandb", "mlflow", "aim"] }}
"""
READ = """
import json, sys
import aim
from aim.sdk.index_manager import RepoIndexManager
from mlflow import MlflowClient
ids = json.load(open("runs/run/trackers.json"))
client = MlflowClient(tracking_uri="sqlite:///runs/mlflow.db")
experiment = client.get_experiment_by_name("arriero")
runs = client.search_runs([experiment.experiment_id])
loss = client.get_metric_history(ids["mlflow"], "loss")
# the user interface of Aim indexes runs when it starts
RepoIndexManager.get_index_manager(aim.Repo.from_path("runs")).index(ids["aim"])
tracked = aim.Repo("runs").get_run(ids["aim"])
frames = {each.name: each.dataframe() for each in tracked.metrics()}
curves = {name: sorted(zip(each["step"].tolist(), each["value"].tolist())) for name, each in frames.items()}
print(json.dumps({
    "mlflow": [[each.step, each.value] for each in loss],
    "mlflow_runs": [[each.info.run_id == ids["mlflow"], each.info.status] for each in runs],
    "mlflow_params": dict(runs[0].data.params),
    "aim": curves["loss"],
    "aim_evaluations": [step for step, _ in curves["eval_loss"]],
    "aim_settings": tracked["settings"]["train"]["batch"],
}))
"""


@pytest.fixture
def with_trackers(python, monkeypatch):
    if not TRACKERS.is_dir():
        pytest.skip("needs the packages of tests/trackers.txt: make .venv/trackers")
    monkeypatch.setenv("PYTHONPATH", str(TRACKERS))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return python


def test_all_trackers_hold_the_losses_of_a_run_that_was_resumed(with_trackers, corpus_cache, tmp_path):
    (tmp_path / "run.toml").write_text(RUN.format(cache=corpus_cache))
    for horizon in (2, 4):
        done = with_trackers("-m", "arriero", "train", "run.toml", "--set", f"train.horizon={horizon} steps")
        assert done.returncode == 0, done.stderr
        assert "cannot be used" not in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    expected = [[line["step"], line["loss"]] for line in lines]
    read = with_trackers("-c", READ)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout.splitlines()[-1])
    assert found["mlflow"] == expected
    assert found["mlflow_runs"] == [[True, "FINISHED"]]
    assert found["mlflow_params"]["train.batch"] == found["aim_settings"] == "512 tok"
    assert found["aim"] == expected
    assert found["aim_evaluations"] == [0, 2, 4]
    known = json.loads((tmp_path / "runs/run/trackers.json").read_text())["wandb"]
    stored = sorted((tmp_path / "runs/run/wandb").glob(f"offline-run-*-{known}/run-{known}.wandb"))
    assert len(stored) == 2
    assert all(b"grad_norm" in path.read_bytes() and b"eval_loss" in path.read_bytes() for path in stored)


def test_a_tracker_that_cannot_be_reached_does_not_stop_training(
    with_trackers, corpus_cache, tmp_path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://host")
    (tmp_path / "run.toml").write_text(RUN.format(cache=corpus_cache))
    done = with_trackers("-m", "arriero", "train", "run.toml", "--set", "observe.trackers=['mlflow']")
    assert done.returncode == 0, done.stderr
    assert "mlflow cannot be used" in done.stderr
    assert "training continues without it" in done.stderr


@pytest.fixture
def tracker(monkeypatch, tmp_path):
    """A tracker whose server accepts the run and then hangs, its session, and the states sent to it."""
    answers, sent = Event(), []

    class Client:
        def __init__(self, tracking_uri):
            pass

        def update_run(self, run, status):
            sent.append((run, status))

        def log_batch(self, run, metrics=(), params=()):
            answers.wait()

        def set_terminated(self, run, status):
            sent.append((run, status))

    entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr(trackers, "PATIENCE_S", 0.2)
    about = dict.fromkeys(("device", "ranks", "layout", "parameters", "versions"))
    config = SimpleNamespace(model_dump=lambda **_: {}, run=SimpleNamespace(name="run"))
    session = SimpleNamespace(config=config, describe=lambda: about, eval_losses={})
    (tmp_path / "trackers.json").write_text('{"mlflow": "7"}')
    yield trackers.Tracker("mlflow", tmp_path), session, sent
    answers.set()


def test_a_server_that_does_not_answer_does_not_hold_up_training(tracker, capsys):
    hook, session, _ = tracker
    hook.on_start(session)
    began = time.monotonic()
    for step in range(trackers.WAITING + 5):
        hook.on_evaluation(session, step, 0, 1.0)
    hook.on_fault(session, 9, RuntimeError())
    assert time.monotonic() - began < 10
    assert capsys.readouterr().err.count("mlflow does not answer") == 1


def test_the_end_of_a_run_waits_for_a_slow_server_a_while(tracker, capsys):
    hook, session, sent = tracker
    hook.on_start(session)
    hook.on_evaluation(session, 1, 0, 1.0)
    hook.on_end(session, None)
    assert capsys.readouterr().err.count("mlflow does not answer") == 1
    assert sent == [("7", "RUNNING")]


def test_a_damaged_list_of_tracked_runs_does_not_stop_training(tracker, tmp_path, capsys):
    hook, session, _ = tracker
    (tmp_path / "trackers.json").write_text("{")
    hook.on_start(session)
    hook.on_end(session, None)
    assert "mlflow cannot be used (JSONDecodeError" in capsys.readouterr().err


def test_a_missing_package_is_an_error_before_training(command, corpus_cache):
    result = command("train", "--set", f"data.cache={corpus_cache}", "--set", "observe.trackers=['aim']")
    assert result.returncode == 2
    assert "observe.trackers needs the package aim; pip install 'arriero[aim]'" in result.stderr
