"""A run on a GPU is saved while it trains, and resumes bit-identically."""

import os
import signal
import threading
import time

import pytest
import torch

from arriero.checkpoint import manager
from arriero.checkpoint.directory import CHECKPOINTS, Manifest
from arriero.checkpoint.formats.dcp_directory import SafeDcpReader
from arriero.checkpoint.manager import Checkpoints, SaveRequest
from arriero.checkpoint.ranks import Ranks
from arriero.checkpoint.state import Staging, describe_parts, local_parts, read_parts
from arriero.errors import UserError
from arriero.train.hooks import Hook
from checkpoint.running import Runs
from gpu.alone import DEVICE, alone

pytestmark = pytest.mark.gpu

ON_GPU = ["run.device=cuda", "precision.compute=bf16", "checkpoint.every=2 steps"]
MODES = {
    "compiled": ["precision.compile=true"],
    "bf16 weights, int8 moments": [
        "precision.compile=false",
        "precision.master=bf16",
        "optim.state=int8",
    ],
}


@pytest.fixture
def runs(tmp_path, corpus_cache):
    return Runs(tmp_path, corpus_cache)


class Killed(Hook):
    """At a step, once the save before it is on the disk."""

    def __init__(self, step):
        self.step = step

    def on_step(self, session, step, tokens):
        if step == self.step:
            session.record.saver.wait(session)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_goes_on_to_the_bit(runs, mode):
    sets = [*ON_GPU, *MODES[mode]]
    runs.train("whole", *sets)
    with pytest.raises(UserError, match=r"killed \(SIGKILL\)"):
        runs.train("killed", *sets, hooks=[Killed(3)])
    assert runs.saved("killed") == ["step-00000002"]
    runs.train("killed", *sets)
    assert runs.losses("killed") == runs.losses("whole")


class Gate(Hook):
    """Opened by the second step after a save: a writer that waits for it waits for ever, if training does."""

    def __init__(self):
        self.opened = threading.Event()

    def on_step(self, session, step, tokens):
        if step == 4:
            session.device.synchronize()
            self.opened.set()


def test_training_steps_are_computed_while_a_save_is_being_written(runs, monkeypatch):
    """And what is written is the state of the step that was saved, not of those that followed."""
    gate, write = Gate(), manager.write_parts

    def write_behind_the_gate(*arguments):
        if not gate.opened.wait(timeout=120):
            raise TimeoutError("no step was taken while the save was under way")
        return write(*arguments)

    sets = [*ON_GPU, "checkpoint.keep=9"]
    runs.train("whole", *sets)
    with monkeypatch.context() as patched:
        patched.setattr(manager, "write_parts", write_behind_the_gate)
        runs.train("run", *sets, "train.horizon=4 steps", "checkpoint.at_end=false", hooks=[gate])
    assert "step-00000002" in runs.saved("run")
    source = runs.folder / "run" / CHECKPOINTS / "step-00000002"
    runs.train("again", *sets, f"checkpoint.resume_from={source}")
    assert runs.losses("again") == {step: loss for step, loss in runs.losses("whole").items() if step > 2}


def state_of_200_mb():
    generator = torch.Generator().manual_seed(5)
    tensors = {f"model.{i}": torch.randn(25, 10**6 // 4, generator=generator) for i in range(8)}
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()} | {"step": torch.tensor(3)}


def unit(step, tensors):
    pieces = local_parts(tensors)

    def about(files):
        return Manifest(step, step, time.time(), {}, {}, "tok", describe_parts(pieces), files)

    return SaveRequest(step, pieces, {}, about)


def test_a_save_waits_in_pinned_host_memory_that_the_next_one_uses_again():
    def work():
        tensors, staging = state_of_200_mb(), Staging()
        first = staging.copy(local_parts(tensors))
        for name, tensor in tensors.items():
            assert torch.equal(first[name].local, tensor.cpu()), name
            assert first[name].local.is_pinned() == tensor.is_cuda, name
        places = {name: piece.local.data_ptr() for name, piece in first.items()}
        # queued behind work of this very moment, as a save after a step is
        tensors["model.0"] @ tensors["model.0"].T
        tensors["model.0"].mul_(2.0)
        again = staging.copy(local_parts(tensors))
        assert torch.equal(again["model.0"].local, tensors["model.0"].cpu())
        assert {name: piece.local.data_ptr() for name, piece in again.items()} == places

    alone(work)


def test_training_waits_half_as_long_at_most_for_a_save_in_the_background(tmp_path):
    def work():
        tensors, waits = state_of_200_mb(), {}
        for background in (True, False):
            many = Checkpoints(tmp_path / str(background), Ranks(), 2 * 10**8, background=background)
            blocked = []
            for step in range(1, 4):
                blocked.append(many.save(unit(step, tensors)))
                many.wait()
            assert [report.error for report in many.reports()] == [None] * 3
            waits[background] = min(blocked)
        return waits

    waits = alone(work)
    assert waits[True] < 0.5 * waits[False], waits


@pytest.mark.parametrize("background", [True, False])
def test_what_was_saved_from_a_gpu_is_read_back_into_one(tmp_path, background):
    def work():
        tensors = state_of_200_mb()
        many = Checkpoints(tmp_path, Ranks(), 2 * 10**8, background=background)
        many.save(unit(1, tensors))
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.zero_()
        many.wait()
        read_parts(SafeDcpReader(tmp_path / CHECKPOINTS / "step-00000001"), local_parts(tensors), Ranks())
        for name, tensor in tensors.items():
            assert tensor.device == expected[name].device
            assert torch.equal(tensor, expected[name]), name

    alone(work)
