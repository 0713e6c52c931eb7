"""`arriero runs`, `runs compare` and `status` read what run directories say."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from arriero.config.fields import to_toml
from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.report.history import RunHistory, at_tokens

START, END = {"time": 1.0, "event": "start"}, {"time": 9.0, "event": "end"}


def write_run(folder, name, losses, events=(START, END), lr=0.1, **metrics):
    directory = folder / name
    directory.mkdir(parents=True)
    sets = [f"run.name={name}", "train.horizon=10 steps", f"optim.lr={lr}"]
    (directory / "run.toml").write_text(to_toml(load_run(None, sets, expand).config))
    lines = [
        {"step": step, "tokens": 100 * step, "loss": loss, "tokens_per_s": 50.0, "step_s": 2.0, **metrics}
        for step, loss in losses
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


@pytest.mark.parametrize(
    ("last", "state"),
    [("end", "finished"), ("signal", "stopped"), ("fault", "failed"), ("hang", "failed"), ("save", "killed")],
)
def test_the_state_is_that_of_the_last_start(tmp_path, last, state):
    events = (START, END, START, {"time": 8.0, "event": last})
    assert RunHistory(write_run(tmp_path, "a", [(1, 2.0)], events)).state == state


def test_a_run_is_running_while_its_process_holds_the_lock_and_killed_afterwards(tmp_path):
    directory = write_run(tmp_path, "a", [(1, 2.0)], (START,))
    code = """
        import sys
        from pathlib import Path
        from arriero.files import locked
        from arriero.train.rundir import lock_of
        with locked(lock_of(Path(sys.argv[1])), "the run", unwritable=""):
            print("locked", flush=True)
            sys.stdin.read()
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"locked\n"
    assert RunHistory(directory).state == "running"
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    assert RunHistory(directory).state == "killed"


def test_of_a_repeated_step_the_last_line_counts_and_half_a_line_is_ignored(tmp_path):
    run = RunHistory(write_run(tmp_path, "a", [(1, 4.0), (2, 3.0), (3, 9.0), (2, 2.5), (3, 2.0)]))
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "tok')
    assert run.series("loss") == [(100, 4.0), (200, 2.5), (300, 2.0)]
    assert run.last["step"] == 3


@pytest.mark.parametrize(
    "damage",
    [
        {"event": [], "time": 2.0},
        {"event": "evaluation", "time": 10**30, "step": 1, "eval_loss": 2.0},
        {"event": "end", "time": 2.0, "steps": {}},
        {"step": [], "tokens": 100, "step_s": 1.0, "time": 3.0},
        {"step": 2, "tokens": None, "step_s": 1.0, "time": 3.0, "loss": 1.0},
        {"step": 2, "tokens": 200, "step_s": 2.0, "time": 3.0, "tokens_per_s": "x"},
        {"step": 2, "tokens": 200, "step_s": 2.0, "time": 3.0, "loss": float("nan")},
    ],
)
@pytest.mark.parametrize("verb", ["status a --json", "status a", "runs", "launch status runs/a"])
def test_a_damaged_record_is_ignored(command, tmp_path, damage, verb):
    directory = write_run(tmp_path / "runs", "a", [(1, 4.0)])
    with (directory / ("events.jsonl" if "event" in damage else "metrics.jsonl")).open("a") as file:
        file.write(json.dumps(damage) + "\n")
    ran = command(*verb.split())
    assert ran.returncode == 0, ran.stderr


def test_an_event_without_a_time_is_ignored(command, tmp_path):
    write_run(tmp_path / "runs", "a", [(1, 4.0)], (START, {"event": "start"}, {"time": "x", "event": "end"}))
    with (tmp_path / "runs" / "a" / "events.jsonl").open("a") as file:
        file.write("[" * 100_000)
    assert json.loads(command("status", "a", "--json").stdout)["state"] == "killed"


def test_runs_are_listed_with_the_last_active_first(command, tmp_path):
    for age, name in ((100, "old"), (1, "young")):
        directory = write_run(tmp_path / "runs", name, [(5, 2.0)])
        for file in directory.iterdir():
            os.utime(file, (0, 1e9 - age))
    (tmp_path / "runs" / "notes").mkdir()
    listed = json.loads(command("runs", "--json").stdout)["runs"]
    assert [row["run"] for row in listed] == ["young", "old"]
    assert listed[0] | {"step": 5, "total_steps": 10, "loss": 2.0, "state": "finished"} == listed[0]
    assert "5 of 10" in command("runs").stdout


def test_compare_shows_keys_that_differ_and_losses_at_equal_tokens(command, tmp_path):
    write_run(tmp_path / "runs", "a", [(1, 4.0), (3, 2.0)])
    write_run(tmp_path / "runs", "b", [(1, 5.0), (2, 3.0), (3, 1.0)], lr=0.2)
    found = json.loads(command("runs", "compare", "a", "b", "--json").stdout)
    assert found["settings"] == {"run.name": ["a", "b"], "optim.lr": [0.1, 0.2]}
    points = {point["tokens"]: point["values"] for point in found["curves"]["loss"]}
    assert points[100] == [4.0, 5.0]
    assert points[300] == [2.0, 1.0]
    assert all(300 >= tokens >= 100 for tokens in points)


def test_a_curve_is_interpolated_and_not_extended():
    curve = [(100, 4.0), (300, 2.0)]
    assert [at_tokens(curve, tokens) for tokens in (100, 200, 300)] == [4.0, 3.0, 2.0]
    assert at_tokens(curve, 99) is None
    assert at_tokens(curve, 301) is None


def test_status_shows_progress_and_the_reason_of_a_failure(command, tmp_path):
    fault = {"time": 3.0, "event": "fault", "step": 4, "message": "the disk is full"}
    write_run(tmp_path / "runs", "a", [(1, 4.0), (4, 2.0)], (START, fault))
    shown = command("status", "a").stdout
    assert "failed" in shown
    assert "4 of 10" in shown
    assert "the disk is full" in shown
    assert json.loads(command("status", "a", "--json").stdout)["time_left_s"] == 12.0


def test_a_folder_that_is_no_run_is_refused(command):
    for arguments in (("status", "x"), ("runs", "compare", "x", "y"), ("runs", "--dir", "x")):
        result = command(*arguments)
        assert (result.returncode, "Traceback" in result.stderr) == (2, False)


def test_the_status_shows_what_went_wrong_and_what_was_decided(command, tmp_path):
    troubles = [
        {"time": 2.0, "event": "bad step", "step": 3, "reason": "loss spike"},
        {"time": 3.0, "event": "rollback", "to_step": 2, "from_step": 4, "reason": "loss spike"},
        {"time": 4.0, "event": "hang", "step": 5, "message": "rank 3 does not answer"},
        {"time": 5.0, "event": "supervise", "decision": "give up", "reason": "3 restarts were made"},
    ]
    harmless = {"time": 6.0, "event": "supervise", "decision": "end of job", "reason": ""}
    run = write_run(tmp_path / "runs", "a", [(5, 2.0)], (START, *troubles, harmless))
    shown = command("status", run).stdout
    for text in ("bad step at step 3", "rollback", "rank 3 does not answer", "give up", "3 restarts"):
        assert text in shown
    assert [each["event"] for each in json.loads(command("status", run, "--json").stdout)["events"]] == [
        each["event"] for each in troubles
    ]


def test_a_loss_that_is_not_finite_is_named(command, tmp_path):
    directory = write_run(tmp_path / "runs", "a", [(1, 2.0), (2, None)], (START,), skipped=1)
    shown = command("status", directory).stdout
    assert "not finite" in shown and "1 updates were skipped so far" in shown
    assert command("report", directory).returncode == 0
    assert "not finite" in (directory / "report.html").read_text(encoding="utf-8").split("<script>")[0]


def test_the_status_names_the_model_and_its_devices_and_fits_80_columns(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    start = START | {"parameters": 8030261248, "ranks": 64, "device": "NVIDIA H200", "layout": "dp_shard 64"}
    losses = [(step, 9.0 - step / 100) for step in range(1, 200)]
    shown = command("status", write_run(tmp_path / "runs", "a", losses, (start, END), mfu=0.431)).stdout
    assert "8.03B parameters" in shown and "64 x NVIDIA H200, dp_shard 64" in shown
    # a curve that is cut ends with an ellipsis
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
