import json

import pytest
import torch

from arriero.events import LineFile
from arriero.parallel.mesh import make_mesh
from arriero.parallel.world import World
from arriero.plan.layout import Layout
from arriero.train import metrics as metrics_module
from arriero.train.device import Device
from arriero.train.metrics import Stopwatch
from arriero.train.schedule import Cadence
from arriero.units import Span


class Clock:
    """A clock the test turns by hand."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(metrics_module, "time", clock)
    return clock


def watch(peak):
    return Stopwatch(
        Device(torch.device("cpu"), "test", 2**30, None),
        peak,
        make_mesh(Layout(), World(), 1, torch.device("cpu")),
    )


def test_numbers_that_are_not_finite_become_null_also_inside_tables(tmp_path):
    file = LineFile(tmp_path / "lines.jsonl")
    file.line({"loss": float("inf"), "eval_losses": {"web": float("nan"), "code": 2.0}})
    line = (tmp_path / "lines.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "loss": None,
        "eval_losses": {"web": None, "code": 2.0},
    }


def test_rates_are_means_over_the_steps_of_a_lap(clock):
    stopwatch = watch(peak=1e6)
    for _ in range(4):
        with stopwatch.waiting_for_data():
            clock.now += 0.5
        clock.now += 1.5
        stopwatch.count(tokens=1000, flops=8e5)
    lap, _ = stopwatch.lap()
    assert lap["tokens_per_s"] == pytest.approx(4000 / 8)
    assert lap["step_s"] == pytest.approx(2.0)
    assert lap["data_wait"] == pytest.approx(0.25)
    assert lap["mfu"] == pytest.approx(4 * 8e5 / 8 / 1e6)
    assert lap["peak_mem_gib"] > 0.01


def test_a_pause_is_not_counted_and_a_lap_resets_the_time(clock):
    stopwatch = watch(peak=None)
    stopwatch.count(10, 1.0)
    clock.now += 1
    stopwatch.lap()
    with stopwatch.paused():
        clock.now += 60
    clock.now += 2
    stopwatch.count(10, 1.0)
    lap, _ = stopwatch.lap()
    assert lap["tokens_per_s"] == pytest.approx(5.0)
    assert lap["mfu"] is None


def due_after(every, steps, batch=100):
    cadence = Cadence(every)
    return [step for step in range(1, steps + 1) if cadence.is_due(step, step * batch, batch, now=0.0)]


def test_a_period_of_steps_or_tokens_is_due_when_it_is_completed():
    assert due_after(Span(3, "steps"), 10) == [3, 6, 9]
    assert due_after(Span(250, "tok"), 10) == [3, 5, 8, 10]
    assert due_after(False, 10) == []


def test_a_period_of_seconds_begins_when_the_last_one_was_done():
    cadence = Cadence(Span(10, "s"))
    assert not cadence.is_due(1, 100, 100, now=9)
    assert cadence.is_due(2, 200, 100, now=10)
    cadence.restart(now=40)
    assert not cadence.is_due(3, 300, 100, now=49)
