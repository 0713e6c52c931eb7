"""Starting a run whose checkpoints are damaged, unreadable, missing or cannot be deleted."""

import contextlib
import errno
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from arriero.checkpoint import directory
from arriero.checkpoint.directory import CHECKPOINTS, MANIFEST
from arriero.cli import app
from arriero.data.order.ledger import Audit, read_ledger
from arriero.data.order.streams import build_streams
from arriero.data.workers import no_progress
from arriero.errors import UserError
from arriero.parallel.spawn import RankFailed
from arriero.parallel.world import world_from
from arriero.train import build as train_build
from arriero.train.finish import outcome_if_ended
from arriero.train.hooks import Hook
from checkpoint.test_saving import flip, names, save, truncate

EIO = Path("/proc/self/mem")  # the kernel answers a read at its start with EIO


def break_reading(path):
    """A real EIO from the kernel, which the superuser gets too."""
    path.rename(path.with_name("kept"))
    path.symlink_to(EIO)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", MANIFEST])
@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink], ids=["flipped", "truncated", "removed"])
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_nothing_is_touched(
    checkpoints, tmp_path, file, harm
):
    save(checkpoints(), 1, 2)
    for name in names(tmp_path):
        harm(tmp_path / CHECKPOINTS / name / file)
    for _ in range(2):
        with pytest.raises(UserError, match=r"step-00000001 .*step-00000002 .*start_over=true"):
            checkpoints().newest()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_with_start_over_damaged_checkpoints_are_moved_aside(checkpoints, tmp_path):
    save(checkpoints(), 1, 2)
    for name in names(tmp_path):
        flip(tmp_path / CHECKPOINTS / name / "__0_0.distcp")
    again = checkpoints(keep=1)
    newest, remarks = again.newest(start_over=True)
    assert newest is None
    assert "checkpoints.old" in remarks[0]
    save(again, 1, 2)
    assert names(tmp_path) == ["step-00000002"]
    assert sorted(path.name for path in (tmp_path / "checkpoints.old").iterdir()) == [
        "step-00000001",
        "step-00000002",
    ]


def test_only_renamed_checkpoints_left_is_refused_too(checkpoints, tmp_path):
    save(checkpoints(), 1, 2)
    flip(tmp_path / CHECKPOINTS / "step-00000002" / "state.json")
    checkpoints().newest()
    shutil.rmtree(tmp_path / CHECKPOINTS / "step-00000001")
    with pytest.raises(UserError, match=r"step-00000002\.damaged was renamed aside"):
        checkpoints().newest()


def test_a_manifest_that_cannot_be_read_stops_the_run_and_changes_nothing(checkpoints, tmp_path):
    save(checkpoints(), 1, 2, 3)
    for step in (1, 2, 3):
        break_reading(tmp_path / CHECKPOINTS / f"step-0000000{step}" / MANIFEST)
    with pytest.raises(UserError, match=r"manifest\.json cannot be read \(Input/output error\)"):
        checkpoints().newest()
    assert names(tmp_path) == [f"step-0000000{n}" for n in (1, 2, 3)]


def test_a_data_file_that_cannot_be_read_stops_the_run_and_changes_nothing(
    checkpoints, tmp_path, monkeypatch
):
    save(checkpoints(), 1, 2)

    def stale(path, _):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(directory, "sha256_of_file", stale)
    with pytest.raises(UserError, match=r"step-00000002/.* cannot be read \(Stale file handle\)"):
        checkpoints().newest()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_too_many_open_files_stop_the_run_and_change_nothing(checkpoints, tmp_path):
    save(checkpoints(), 1, 2)
    many, before, held = checkpoints(), resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(UserError, match="Too many open files"):
            many.newest()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_link_to_storage_that_is_not_mounted_stops_the_run(checkpoints, tmp_path):
    save(checkpoints(), 1, 2)
    (tmp_path / CHECKPOINTS / "step-00000002").rename(tmp_path / "elsewhere")
    (tmp_path / CHECKPOINTS / "step-00000002").symlink_to(tmp_path / "unmounted" / "step-00000002")
    with pytest.raises(UserError, match=r"step-00000002 cannot be read"):
        checkpoints().newest()


def test_a_read_error_on_one_rank_stops_all_ranks(runs):
    """Ranks that waited for the failed one would be killed after a grace period, not end with its error."""
    runs.train("run", "train.horizon=2 steps", ranks=2)
    break_reading(runs.folder / "run" / CHECKPOINTS / "step-00000002" / MANIFEST)
    with pytest.raises(UserError, match="Input/output error"):
        runs.train("run", ranks=2)
    assert runs.saved("run") == ["step-00000002"]


def test_a_checkpoint_that_was_replaced_is_kept_under_another_name(checkpoints, tmp_path):
    """One of a newer version cannot be used here, and the run reaches its step again."""
    save(checkpoints(), 1, 2)
    path = tmp_path / CHECKPOINTS / "step-00000002" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    again = checkpoints(keep=1)
    again.newest()
    save(again, 2, 3)
    assert names(tmp_path) == ["step-00000002.replaced", "step-00000003"]


@pytest.fixture
def undeletable(monkeypatch):
    """Names that `os.unlink` refuses, as NFS does for files that are open elsewhere."""
    refused, unlink = set(), os.unlink

    def refuse(path, *, dir_fd=None):
        if Path(path).name in refused:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    return refused


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(checkpoints, tmp_path, undeletable):
    undeletable.add("state.json")
    (first, second) = save(checkpoints(keep=1), 1, 2)
    assert (first.error, second.error) == (None, None)
    assert "step-00000001 cannot be deleted" in second.warnings[0]
    assert "busy" in second.warnings[0]
    newest, remarks = checkpoints().newest()
    assert newest.step == 2
    assert "cannot be removed" in remarks[0]
    assert names(tmp_path) == ["step-00000001.old.tmp", "step-00000002"]


def test_a_leftover_that_cannot_be_deleted_does_not_hinder_the_same_save(checkpoints, tmp_path, undeletable):
    save(checkpoints(), 1)
    shutil.copytree(tmp_path / CHECKPOINTS / "step-00000001", tmp_path / CHECKPOINTS / "step-00000002.tmp")
    undeletable.add("state.json")
    (report,) = save(checkpoints(), 2)
    assert report.error is None
    newest, _ = checkpoints().newest()
    assert newest.step == 2


def test_a_run_whose_checkpoints_vanished_is_rejected_without_start_over(runs):
    runs.train("run", "train.horizon=4 steps", "checkpoint.every=2 steps")
    folder = runs.folder / "run"
    shutil.rmtree(folder / CHECKPOINTS)
    with pytest.raises(UserError, match=r"2 were saved, the last at step 4.*start_over=true"):
        runs.train("run")
    over = "checkpoint.start_over=true"
    assert runs.train("run", "train.horizon=4 steps", over)["steps"] == 4
    assert runs.train("run", over)["steps"] == 6
    lines = [line["step"] for line in runs.lines("run", "metrics.jsonl")]
    assert lines == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]  # the second start with the key resumed
    assert not (folder / "checkpoints.old").exists()


def test_start_over_applies_once_to_a_run_with_valid_checkpoints(runs):
    half = "train.horizon=3 steps"
    runs.train("run", half)
    runs.train("run", half, "checkpoint.start_over=true")
    runs.train("run", "checkpoint.start_over=true")
    assert [line["step"] for line in runs.lines("run", "metrics.jsonl")] == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert (runs.folder / "run" / "checkpoints.old" / "step-00000003").is_dir()
    audit = Audit(read_ledger(runs.folder / "run"), build_streams(runs.config("run"), no_progress).train)
    audit.run(lambda *_: None)
    assert audit.problems == []


def test_a_run_whose_checkpoints_and_events_vanished_is_refused_by_its_ledger(runs):
    runs.train("run", "train.horizon=2 steps")
    shutil.rmtree(runs.folder / "run" / CHECKPOINTS)
    (runs.folder / "run" / "events.jsonl").unlink()
    with pytest.raises(UserError, match=r"ledger.json shows 16 consumed samples.*start_over=true"):
        runs.train("run")


def test_a_rank_that_sees_the_new_run_file_early_starts_over_with_the_others(runs, monkeypatch):
    runs.train("run", "train.horizon=2 steps")
    seen = train_build.starts_over
    monkeypatch.setattr(train_build, "starts_over", lambda config: world_from().is_leader and seen(config))
    over = ["train.horizon=2 steps", "checkpoint.start_over=true"]
    assert runs.train("run", *over, ranks=2)["steps"] == 2
    assert (runs.folder / "run" / "checkpoints.old").is_dir()


def test_a_run_that_was_never_saved_starts_again_unless_it_had_finished(runs):
    class Stop(Hook):
        def on_step(self, session, step, tokens):
            if step == 2:
                raise RuntimeError("as if killed")

    sets = ["checkpoint.every=false", "checkpoint.at_end=false"]
    with pytest.raises(RankFailed):
        runs.train("run", *sets, hooks=[Stop()])
    assert runs.train("run", *sets)["steps"] == 6
    remarks = [line["text"] for line in runs.lines("run", "events.jsonl") if line["event"] == "remark"]
    assert "never saved" in remarks[0]
    assert outcome_if_ended(runs.config("run", *sets)).steps == 6
    longer = [*sets, "train.horizon=8 steps"]
    assert outcome_if_ended(runs.config("run", *longer)) is None
    with pytest.raises(UserError, match=r"is finished and was never saved.*start_over=true"):
        runs.train("run", *longer)
    assert runs.train("run", *sets, "checkpoint.start_over=true")["steps"] == 6


def test_the_list_names_damaged_and_unreadable_checkpoints(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    save(checkpoints(), 2, 4, 6)
    (tmp_path / "run.toml").touch()
    folder = tmp_path / CHECKPOINTS
    directory.rename_aside(folder / "step-00000004")
    break_reading(folder / "step-00000002" / MANIFEST)
    listed = CliRunner().invoke(app, ["ckpt", "list", str(folder.parent)]).output
    assert "cannot be read (Input/output error)" in listed
    assert "renamed aside as step-00000004.damaged" in listed
