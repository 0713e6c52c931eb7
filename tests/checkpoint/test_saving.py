"""A checkpoint is wholly valid or not there; saving never hurts what was saved before."""

import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from arriero.checkpoint import manager
from arriero.checkpoint.directory import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    SavedStep,
    expired_steps,
    find_checkpoints,
    find_damage,
    read_manifest,
)
from arriero.checkpoint.formats.dcp_directory import SafeDcpReader
from arriero.checkpoint.manager import Checkpoints, SaveRequest
from arriero.checkpoint.ranks import Ranks
from arriero.checkpoint.state import describe_parts, local_parts, read_parts
from arriero.errors import UserError
from arriero.interrupt import Interrupted
from arriero.parallel.world import World
from arriero.train.hooks import Hook
from arriero.train.saving import Saver


def unit(step, value=0.0):
    tensors = {"model.a": torch.full((4, 4), value), "optim.optimizer.step": torch.tensor(step)}
    pieces = local_parts(tensors)

    def about(files):
        return Manifest(step, step * 10, time.time(), {"tp": 1}, {}, "tok", describe_parts(pieces), files)

    return SaveRequest(step, pieces, {"state.json": b'{"step": 1}', "run.toml": b"[run]"}, about)


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(unit(step))
    checkpoints.wait()
    return checkpoints.reports()


def names(folder):
    return sorted(path.name for path in (folder / CHECKPOINTS).iterdir())


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


FILES = [".metadata", "__0_0.distcp", "state.json", "run.toml", MANIFEST]


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink], ids=["flipped", "truncated", "removed"])
@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_noticed_and_the_one_before_is_used(checkpoints, tmp_path, name, harm):
    save(checkpoints(), 1, 2)
    harm(tmp_path / CHECKPOINTS / "step-00000002" / name)
    newest, remarks = checkpoints().newest()
    assert newest.step == 1
    assert len(remarks) == 1
    assert "step-00000002" in remarks[0]
    assert name in remarks[0]


def test_every_bit_of_a_manifest_counts(checkpoints, tmp_path):
    save(checkpoints(), 1, 2)
    path = tmp_path / CHECKPOINTS / "step-00000002" / MANIFEST
    intact = path.read_bytes()
    for position in range(0, len(intact), 7):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        found = find_checkpoints(tmp_path)[-1]
        same = found.manifest is not None and json.loads(bytes(damaged)) == json.loads(intact)
        assert found.problem is not None or same, position


def test_a_checkpoint_of_a_newer_version_is_named_and_left_alone(checkpoints, tmp_path):
    save(checkpoints(), 1, 2)
    path = tmp_path / CHECKPOINTS / "step-00000002" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    newest, remarks = checkpoints().newest()
    assert newest.step == 1
    assert "newer version (format 99" in remarks[0]
    assert path.exists()


def test_unfinished_checkpoints_are_removed_at_the_next_start(checkpoints, tmp_path):
    save(checkpoints(), 1)
    shutil.copytree(tmp_path / CHECKPOINTS / "step-00000001", tmp_path / CHECKPOINTS / "step-00000002.tmp")
    newest, remarks = checkpoints().newest()
    assert newest.step == 1
    assert remarks == ["checkpoint step-00000002.tmp was never finished: removed"]
    assert names(tmp_path) == ["step-00000001"]


def test_retention_keeps_the_newest_and_some_for_ever(checkpoints, tmp_path):
    save(checkpoints(keep=2, period=40), *range(1, 10))
    assert names(tmp_path) == [f"step-{n:08d}" for n in (4, 8, 9)]


def test_the_first_after_each_period_stays_wherever_saves_fall():
    marks = [SavedStep(step, step * 10) for step in (3, 7, 12, 13, 21, 22, 23)]
    assert expired_steps(marks, keep=1, period=100) == [3, 7, 13, 22]
    assert expired_steps(marks, keep=3, period=None) == [3, 7, 12, 13]


def test_a_damaged_checkpoint_is_renamed_and_neither_counted_nor_deleted(checkpoints, tmp_path):
    save(checkpoints(), 1, 2)
    flip(tmp_path / CHECKPOINTS / "step-00000002" / "state.json")
    again = checkpoints(keep=2)
    again.newest()
    save(again, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000002.damaged", "step-00000003"]
    save(again, 4)
    assert names(tmp_path) == ["step-00000002.damaged", "step-00000003", "step-00000004"]


def test_a_damaged_one_is_replaced_when_its_step_is_reached_again(checkpoints, tmp_path):
    save(checkpoints(), 1, 2)
    flip(tmp_path / CHECKPOINTS / "step-00000002" / "state.json")
    again = checkpoints()
    again.newest()
    save(again, 2)
    directory = tmp_path / CHECKPOINTS / "step-00000002"
    assert find_damage(directory, read_manifest(directory)) == {}


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_cannot_be_written_is_reported_and_leaves_the_others(checkpoints, tmp_path, background):
    many = checkpoints(background=background)
    save(many, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        reports = save(many, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in reports[0].error
    assert names(tmp_path) == ["step-00000001"]
    assert save(many, 3)[0].error is None


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path):
    huge = Checkpoints(tmp_path, Ranks(), 10**18)
    (report,) = save(huge, 1)
    assert "needs at least 909494.7 TiB" in report.error
    assert list(tmp_path.iterdir()) == []


def test_a_save_holds_the_values_of_its_step(checkpoints, tmp_path):
    """Training changes the tensors while they are being written."""
    many = checkpoints()
    one = unit(1, value=1.0)
    many.save(one)
    one.parts["model.a"].local.fill_(2.0)
    many.wait()
    empty = {"model.a": torch.zeros(4, 4)}
    read_parts(SafeDcpReader(tmp_path / CHECKPOINTS / "step-00000001"), local_parts(empty), Ranks())
    assert torch.equal(empty["model.a"], torch.ones(4, 4))


def test_training_waits_a_quarter_as_long_at_most_when_saving_in_the_background(tmp_path):
    waits = {}
    for background in (True, False):
        many = Checkpoints(tmp_path / str(background), Ranks(), 10**8, background=background)
        blocked = []
        for step in range(1, 5):
            one = unit(step)
            large = local_parts({"model.a": torch.ones(2**22)})
            blocked.append(many.save(SaveRequest(step, large, one.files, one.about)))
            many.wait()
        waits[background] = min(blocked)
    assert waits[True] < 0.25 * waits[False]


def test_the_writing_thread_leaves_the_gpu_alone(checkpoints, monkeypatch):
    """In a new thread torch's current device is the first GPU, which may be another rank's."""

    def refuse(*_, **__):
        raise AssertionError("a stream was asked for")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", refuse)
    assert [report.error for report in save(checkpoints(), 1)] == [None]


def test_a_report_that_is_made_while_others_are_taken_is_not_lost(checkpoints, monkeypatch):
    many, report = checkpoints(), manager.SaveReport

    def made_meanwhile(*fields):
        many.reports()
        return report(*fields)

    monkeypatch.setattr(manager, "SaveReport", made_meanwhile)
    assert [report.step for report in save(many, 1)] == [1]


class At(Hook):
    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step(self, session, step, tokens):
        if step == self.step:
            self.act(session)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_stops_and_the_run_resumes_there(runs, ranks):
    stop = At(2, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    runs.train("whole", ranks=ranks)
    with pytest.raises(Interrupted):
        runs.train("stopped", ranks=ranks, hooks=[stop])
    reached = 2 if ranks == 1 else 3
    assert runs.saved("stopped") == [f"step-{reached:08d}"]
    events = [event["event"] for event in runs.lines("stopped", "events.jsonl")]
    assert events == ["start", "save", "signal"]
    runs.train("stopped", ranks=ranks)
    assert runs.losses("stopped") == runs.losses("whole")
    assert len(runs.lines("stopped", "metrics.jsonl")) == 6


def test_sigusr1_and_a_touched_file_save_and_training_continues(runs):
    asked = [
        At(2, lambda _: os.kill(os.getpid(), signal.SIGUSR1)),
        At(4, lambda session: (session.run_dir / "save-now").touch()),
    ]
    runs.train("run", "checkpoint.at_end=false", hooks=asked)
    assert runs.saved("run") == ["step-00000002", "step-00000004"]
    assert not (runs.folder / "run" / "save-now").exists()
    waits = [line["step"] for line in runs.lines("run", "metrics.jsonl") if "save_s" in line]
    assert waits == [2, 4]


def test_a_failed_save_is_reported_and_the_exit_code_is_not_zero(runs):
    def no_space(_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))

    def free_space(session):
        session.record.saver.wait(session)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    with pytest.raises(UserError, match=r"checkpoint of step 2 could not be saved .*File too large"):
        runs.train("run", "checkpoint.every=2 steps", hooks=[At(1, no_space), At(3, free_space)])
    assert runs.saved("run") == ["step-00000004", "step-00000006"]
    events = [event["event"] for event in runs.lines("run", "events.jsonl")]
    assert events == ["start", "save failed", "save", "save", "end"]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_training_continues(runs):
    """Only the first rank has hooks."""

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def free_space(session):
        session.record.saver.wait(session)
        limit(resource.RLIM_INFINITY)

    hooks = [At(1, lambda _: limit(200_000)), At(3, free_space)]
    sets = ["checkpoint.every=2 steps", "train.horizon=4 steps"]
    with pytest.raises(UserError, match=r"step 2 could not be saved .*File too large"):
        runs.train("run", *sets, ranks=2, hooks=hooks)
    assert runs.saved("run") == ["step-00000004"]


def test_a_finished_run_is_not_trained_again(runs):
    first = runs.train("run")
    again = runs.train("run")
    assert again["last_loss"] == first["last_loss"]
    assert len(runs.lines("run", "metrics.jsonl")) == 6


def test_a_run_may_be_lengthened_where_its_rates_stay_the_same(runs):
    cosine = ["schedule.kind=cosine", "train.horizon=3 steps"]
    runs.train("run", *cosine)
    with pytest.raises(
        UserError, match=r"step 3 .* had .* keep the shape with --set schedule.horizon='3 steps'"
    ):
        runs.train("run", "schedule.kind=cosine", "train.horizon=5 steps")
    kept = ["schedule.kind=cosine", "train.horizon=5 steps", "schedule.horizon=3 steps"]
    assert runs.train("run", *kept)["steps"] == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_not_saved(checkpoints, tmp_path, dtype, value):
    many = checkpoints()
    save(many, 1)
    if dtype == torch.float8_e4m3fn:
        value = float("nan")  # the only non-finite value it has
    bad = torch.ones(7, 5)
    bad[3, 2] = value
    tensors = {"model.good": torch.full((3,), torch.finfo(torch.float32).max), "model.bad": bad.to(dtype)}
    one = unit(2)
    with pytest.raises(UserError, match=r"step 2 was not saved: 1 tensor contains .*: model\.bad"):
        many.save(SaveRequest(2, local_parts(tensors), one.files, one.about))
    assert names(tmp_path) == ["step-00000001"]
    assert "non-finite" in many.reports()[0].error


@pytest.mark.parametrize(("ranks", "state"), [(1, "fp32"), (2, "int8")])
def test_non_finite_state_of_one_rank_ends_the_run_and_keeps_older_checkpoints(runs, ranks, state):
    def spoil(session):
        moments = session.optimizer._rules[0].moments["blocks.0.ffn.up.weight"]
        moments["exp_avg"].stored[-1].view(-1)[0] = float("nan")

    sets = ["checkpoint.every=2 steps", f"optim.state={state}"]
    with pytest.raises(
        UserError, match=r"step 4 was not saved.*: optim\.blocks\.0\.ffn\.up\.weight\.exp_avg;"
    ):
        runs.train("run", *sets, ranks=ranks, hooks=[At(4, spoil)])
    assert runs.saved("run") == ["step-00000002"]
    events = [event["event"] for event in runs.lines("run", "events.jsonl")]
    assert events == ["start", "save", "save failed", "fault"]


def test_a_file_system_error_while_looking_for_save_now_does_not_stop_training():
    saver = Saver(None, None, False, None, {}, 0)
    unreadable = SimpleNamespace(mesh=SimpleNamespace(world=World()), run_dir=Path("x" * 300))
    assert not saver._asked_to_save(unreadable)
