"""Signals are answered in every phase of a run."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from arriero.config.load import load_run
from arriero.errors import UserError
from arriero.interrupt import Interrupted, Requests
from arriero.model.presets import expand
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import World, process_group, world_from
from arriero.train.build import arrange, build
from arriero.train.hooks import Hook
from arriero.train.loop import train
from arriero.train.run import run
from arriero.train.rundir import lock_run

SOURCE = Path(__file__).parents[2] / "src"
BASE = [
    "model.preset=llama-test",
    "model.vocab_size=4096",
    "data.seq_len=32",
    "train.batch=256 tok",
    "train.horizon=6 steps",
    "schedule.warmup=2 steps",
    "eval.heldout=2k tok",
    "eval.every=2 steps",
    "observe.log_every=1",
    "observe.sample=false",
    "observe.tensorboard=false",
    "checkpoint.export=false",
    "run.device=cpu",
]


@pytest.fixture
def config(tmp_path, corpus_cache):
    where = ["run.name=run", f"run.dir='{tmp_path}'", f"data.cache='{corpus_cache}'"]
    return load_run(None, [*BASE, *where], expand).config


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


IN_A_NATIVE_CALL = """
import hashlib, sys
from arriero.interrupt import Interrupted, Requests
try:
    with Requests(final=True) as requests:
        if sys.argv[1] == "deferred":
            requests.answer_with(lambda: "saving at step 7, then exiting", deferred=True)
        print("ready", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
except Interrupted as stop:
    sys.exit(128 + stop.number)
"""


@pytest.mark.parametrize("phase", ["deferred", "at once"])
def test_a_signal_is_answered_while_the_main_thread_is_in_a_long_native_call(phase):
    command = [sys.executable, "-c", IN_A_NATIVE_CALL, phase]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        if phase == "deferred":
            process.send_signal(signal.SIGUSR1)
            assert process.stderr.readline() == "SIGUSR1: saving after the current step\n"
            process.send_signal(signal.SIGTERM)
            answer = "SIGTERM: saving at step 7, then exiting; send it again to stop now\n"
            assert process.stderr.readline() == answer
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline().startswith("SIGTERM: stopping now")
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_only_the_second_signal_interrupts_a_phase_that_defers():
    with Requests() as outer:
        signal.raise_signal(signal.SIGUSR1)
        with Requests() as requests:
            assert requests.save
            requests.answer_with(lambda: "", deferred=True)
            signal.raise_signal(signal.SIGINT)
            assert requests.stop == signal.SIGINT
            with pytest.raises(Interrupted, match="SIGTERM"):
                signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Interrupted, match="SIGINT"):
                requests.answer_with(lambda: "", deferred=False)
        assert not outer.stop


def test_sigusr1_that_stops_may_be_repeated_and_followed_by_one_sigterm():
    with Requests(usr1_stops=True) as requests:
        requests.answer_with(lambda: "", deferred=True)
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            signal.raise_signal(number)
        assert (requests.stop, requests.save) == (signal.SIGUSR1, False)
        with pytest.raises(Interrupted, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)


def test_slurm_and_a_supervisor_may_both_send_sigterm(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with Requests() as requests:
        requests.answer_with(lambda: "", deferred=True)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert requests.stop == signal.SIGTERM


def test_a_rank_that_does_not_print_does_not_acknowledge_a_signal(capfd):
    with Requests(), Requests(prints=False), Requests() as requests:
        signal.raise_signal(signal.SIGUSR1)
        assert requests.save
    assert capfd.readouterr().err == ""


def evaluation_that_gets_a_signal(config, rank=0):
    """The session of this rank; the second batch of an evaluation after step 2 brings a signal."""
    world = world_from()
    session = build(arrange(config, world), lambda *_: None)
    held_out, calls = session.passes.summed_loss, []

    def summed_loss_with_signal(*given):
        calls.append(session.record.outcome.steps)
        if calls.count(2) == 2 and world.rank == rank:
            signal.raise_signal(signal.SIGTERM)
            given = (given[0], session.record.saver.requests.stop)
        return held_out(*given)

    session.passes.summed_loss = summed_loss_with_signal
    return session, calls


def check_an_evaluation_that_ended_early(run_dir, step):
    assert [line.get("eval_loss") for line in lines(run_dir / "metrics.jsonl")] == [None] * step
    events = [(e["event"], e.get("step")) for e in lines(run_dir / "events.jsonl")]
    assert events[1:] == [("evaluation", 0), ("save", step), ("signal", step)]


def test_an_evaluation_ends_early_is_not_logged_and_the_run_is_saved(config):
    session, calls = evaluation_that_gets_a_signal(config)
    with pytest.raises(Interrupted):
        train(session)
    assert calls.count(2) == 2 < calls.count(0)
    check_an_evaluation_that_ended_early(session.run_dir, 2)


def test_ranks_end_an_evaluation_together_when_one_gets_a_signal(config):
    def work():
        world = world_from()
        with process_group(world, arrange(config, world).device.torch_device):
            session, calls = evaluation_that_gets_a_signal(config, rank=1)
            with pytest.raises(Interrupted):
                train(session)
            return session.run_dir, calls.count(2)

    run_dir, evaluated = run_ranks(work, 2, leader_prints=False)
    assert evaluated == 2
    check_an_evaluation_that_ended_early(run_dir, 2)


def test_a_signal_before_the_first_step_is_done_stops_at_once(config):
    class Stop(Hook):
        def on_evaluation(self, session, step, tokens, loss):
            session.passes.gradients = lambda *_: signal.raise_signal(signal.SIGTERM)

    session = build(arrange(config, World()), lambda *_: None, [Stop()])
    with pytest.raises(Interrupted):
        train(session)
    assert lines(session.run_dir / "events.jsonl")[-1] | {"time": 0} == {
        "time": 0, "event": "signal", "step": 0, "signal": "SIGTERM", "saved": False,
    }  # fmt: skip


def test_a_signal_ends_the_export_and_the_same_command_exports(config):
    class Stop(Hook):
        def on_save(self, session, report):
            signal.raise_signal(signal.SIGTERM)

    exports = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"export": True})})
    session = build(arrange(exports, World()), lambda *_: None, [Stop()])
    with pytest.raises(Interrupted):
        train(session)
    assert lines(session.run_dir / "events.jsonl")[-1]["event"] == "signal"
    assert not (session.run_dir / "model").exists()
    again = run(exports)
    assert (again.has_trained, again.model) == (False, session.run_dir / "model")


class SignalAt(Hook):
    """Send a signal to the process of rank 1, or of a single rank, after a step."""

    on_all_ranks = True

    def __init__(self, step, number):
        self._step, self._number = step, number

    def on_step(self, session, step, tokens):
        last = session.mesh.world.rank == session.mesh.world.size - 1
        if step == self._step and last:
            signal.raise_signal(self._number)


@pytest.mark.parametrize(("number", "ranks"), [("SIGUSR1", 2), ("SIGTERM", 1)])
def test_a_signal_before_the_time_limit_saves_and_ends_with_code_0_and_a_marker(config, number, ranks):
    section = config.checkpoint.model_copy(update={"on_usr1": "stop"})
    config = config.model_copy(update={"checkpoint": section})
    with pytest.raises(Interrupted) as stop:
        run(config, [SignalAt(3, signal.Signals[number])], nproc=ranks if ranks > 1 else None)
    assert (stop.value.name, stop.value.saved, stop.value.exit_code) == (number, True, 0)
    run_dir, step = Path(config.run.dir) / config.run.name, 3 if ranks == 1 else 4
    marker = json.loads((run_dir / "stopped.json").read_text())
    assert marker | {"time": 0} == {"time": 0, "step": step, "signal": number, "saved": True}
    assert run(config, nproc=ranks if ranks > 1 else None).steps == 6
    assert not (run_dir / "stopped.json").exists()
    logs = sorted(path.name for path in run_dir.glob("logs/*"))
    assert logs == (["rank-00000.log", "rank-00001.log"] if ranks == 2 else [])


def test_sigusr1_continues_by_default(config):
    assert run(config, [SignalAt(2, signal.SIGUSR1)]).steps == 6
    saves = [e["step"] for e in lines(Path(config.run.dir) / "run" / "events.jsonl") if e["event"] == "save"]
    assert saves == [2, 6]


def test_a_killed_rank_is_named_with_the_last_lines_of_its_log(config):
    class Die(Hook):
        on_all_ranks = True

        def on_step(self, session, step, tokens):
            if step == 3 and session.mesh.world.rank == 1:
                os.write(2, b"corrupted double-linked list\n")
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match=r"rank 1 was killed .*corrupted double-linked list"):
        run(config, [Die()], nproc=2)
    log = (Path(config.run.dir) / "run" / "logs" / "rank-00001.log").read_text()
    assert "rank 1 of 2" in log
    assert "step 2: loss" in log


def test_sigusr2_writes_the_stacks_of_all_threads_into_the_log_of_a_rank(config):
    class Dump(Hook):
        on_all_ranks = True

        def on_step(self, session, step, tokens):
            if step == 2 and session.mesh.world.rank == 1:
                signal.raise_signal(signal.SIGUSR2)

    assert run(config, [Dump()], nproc=2).steps == 6
    log = (Path(config.run.dir) / "run" / "logs" / "rank-00001.log").read_text()
    assert "in on_step" in log
    assert "Thread 0x" in log


def test_a_profile_is_written_on_demand_and_training_continues(config):
    class Ask(Hook):
        def on_step(self, session, step, tokens):
            if step == 1:
                (session.run_dir / "profile-now").touch()

    assert run(config, [Ask()]).steps == 6
    run_dir = Path(config.run.dir) / "run"
    assert [path.name for path in run_dir.glob("profiles/*")] == ["trace-00000003.json.gz"]
    assert not (run_dir / "profile-now").exists()


def test_a_profile_that_cannot_start_is_a_warning(config, capfd, monkeypatch):
    """As when another profiler of the process, which torch knows, has not ended."""

    def start(_):
        raise RuntimeError("profiler is already enabled")

    class Ask(Hook):
        def on_step(self, session, step, tokens):
            if step == 1:
                (session.run_dir / "profile-now").touch()

    monkeypatch.setattr(torch.profiler.profile, "start", start)
    assert run(config, [Ask()]).steps == 6
    assert "the profile was not written" in capfd.readouterr().err


def test_a_launcher_locks_the_directory_survives_sigusr1_and_exits_with_its_signal(tmp_path):
    """During start-up, before its ranks can have installed a handler."""
    command = [sys.executable, "-m", "arriero", "train", "--nproc", "2", "--set", "run.name=mine"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes) as process:
        held = tmp_path / "runs" / ".mine.lock"
        while not (held.exists() and held.read_text()):
            assert process.poll() is None
            select.select([process.stdout], [], [], 0.01)
        assert held.read_text().startswith(f"process {process.pid} on ")
        process.send_signal(signal.SIGUSR1)
        assert process.stderr.readline().startswith("SIGUSR1: ")
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline().startswith("SIGTERM: ")
        assert process.wait(timeout=120) == 128 + signal.SIGTERM
    assert not (tmp_path / "runs").exists()


def test_ranks_stopped_before_they_can_answer_end_the_launcher_with_its_signal():
    ready, tell = os.pipe()

    def work():
        os.write(tell, b".")
        signal.pause()

    if (pid := os.fork()) == 0:
        code = 1
        try:
            run_ranks(work, 2)
        except Interrupted as stop:
            code = 128 + stop.number
        finally:
            os._exit(code)
    assert os.read(ready, 1) + os.read(ready, 1) == b".."
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM


def test_all_ranks_are_rejected_when_rank_0_finds_the_directory_in_use(config, monkeypatch):
    monkeypatch.setattr("arriero.train.rundir.LOCK_WAIT_S", 0.0)
    with (
        lock_run(config),
        pytest.raises(UserError, match=f"in use by process {os.getpid()} on"),
    ):
        run_ranks(lambda: run(config), 2, leader_prints=False)


def test_a_rejected_rank_0_does_not_wait_for_ranks_that_find_the_run_finished(config, monkeypatch):
    exports = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"export": True})})
    run(exports)
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ARRIERO_RENDEZVOUS": "nowhere"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)

    @contextmanager
    def in_use(_):
        raise UserError("in use", "wait")
        yield

    monkeypatch.setattr("arriero.train.run.lock_run", in_use)
    with pytest.raises(UserError, match="in use"):
        run(exports)
    monkeypatch.setenv("RANK", "1")
    assert not run(exports).has_trained
