"""Bad losses: the update is skipped, or the run returns to a checkpoint and passes over the batches."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from arriero.config.load import load_run
from arriero.config.schema import GuardSection
from arriero.data.order.ledger import Audit, read_ledger
from arriero.data.order.streams import build_streams
from arriero.data.workers import no_progress
from arriero.errors import UserError
from arriero.interrupt import Interrupted
from arriero.model.presets import expand
from arriero.train.guard import Guard
from arriero.train.hooks import Hook
from arriero.train.run import run
from checkpoint.running import BASE
from launch.spoiled import BAD, SpoilBatch

STEPS = 24
SETS = [*BASE, f"train.horizon={STEPS} steps", "checkpoint.every=4 steps", "checkpoint.export=false"]


class StopAt(Hook):
    def __init__(self, step):
        self._step = step

    def on_step(self, session, step, tokens):
        if step == self._step:
            raise Interrupted(15)


@pytest.fixture
def runs(tmp_path, corpus_cache):
    def train(name, *sets, hooks=(), ranks=1):
        place = [f"run.name={name}", f"run.dir='{tmp_path}'", f"data.cache='{corpus_cache}'"]
        config = load_run(None, [*SETS, *place, *sets], expand).config
        result = run(config, hooks, nproc=ranks if ranks > 1 else None)
        return config, Path(config.run.dir) / name, result

    return train


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(run_dir, kind):
    return [event for event in lines(run_dir / "events.jsonl") if event["event"] == kind]


def losses(run_dir):
    return {line["step"]: line["loss"] for line in lines(run_dir / "metrics.jsonl")}


def check_ledger(config, run_dir, skipped):
    ledger = read_ledger(run_dir)
    per_step = config.train.batch.amount // config.data.seq_len
    assert ledger.samples == STEPS * per_step
    assert {step for first, end in ledger.skipped for step in range(first // per_step, end // per_step)} == {
        step - 1 for step in skipped
    }
    audit = Audit(ledger, build_streams(config, no_progress).train)
    audit.run(lambda *_: None)
    assert audit.problems == []


def test_the_documents_of_a_bad_batch_are_named(runs):
    config, run_dir, _ = runs("skip", hooks=[SpoilBatch()])
    [event] = events(run_dir, "bad step")
    assert (event["step"], event["reason"]) == (BAD, "loss or gradient norm not finite")
    stream = build_streams(config, no_progress).train
    first, end = event["samples"]
    [named] = event["documents"]
    store, expected = stream.sources[0].store, set()
    spans = {store.document_span(n)[0]: n for n in range(store.documents)}
    for index in stream.locate(np.arange(first, end)).index.tolist():
        start = index * config.data.seq_len
        expected |= {spans[store.document_start_before(start + i)] for i in range(config.data.seq_len)}
    assert named["documents"] == sorted(expected)
    assert named["count"] == len(expected)
    check_ledger(config, run_dir, {BAD})


def test_a_rollback_passes_over_the_batch_and_ends_as_if_it_had_been_skipped_at_once(runs):
    skip = runs("skip", hooks=[SpoilBatch()])
    config, run_dir, result = runs("back", "guard.nonfinite=rollback", hooks=[SpoilBatch()])
    assert result.steps == STEPS
    [back] = events(run_dir, "rollback")
    assert (back["from_step"], back["to_step"], back["bad_steps"]) == (BAD, 8, [BAD])
    assert losses(run_dir) == losses(skip[1])
    check_ledger(config, run_dir, {BAD})


def test_a_spike_is_found_and_rolled_back_on_two_ranks_as_on_one(runs):
    """Batch 9 is the cause, the loss shows it in step 11: three batches are skipped."""
    sets = ["guard.spike=rollback", "guard.window=8", "guard.skip_batches=3", "guard.spike_z=20"]
    spoil = [SpoilBatch(BAD, 3.0, cause=9)]
    found = [runs(f"spike-{ranks}", *sets, hooks=spoil, ranks=ranks) for ranks in (1, 2)]
    for config, run_dir, _ in found:
        [back] = events(run_dir, "rollback")
        assert (back["to_step"], back["reason"]) == (8, "loss spike")
        check_ledger(config, run_dir, {9, 10, 11})
        assert [loss for step, loss in losses(run_dir).items() if step in (9, 10, 11)] == [None] * 3
    one, two = ({step: x for step, x in losses(run_dir).items() if x} for _, run_dir, _ in found)
    assert two == pytest.approx(one, rel=1e-5)


def test_a_run_that_is_stopped_after_a_rollback_resumes_bit_identically(runs):
    sets = ["guard.spike=rollback", "guard.window=8", "guard.spike_z=20"]
    whole = runs("whole", *sets, hooks=[SpoilBatch(BAD, 3.0)])
    with pytest.raises(Interrupted):
        runs("parts", *sets, hooks=[SpoilBatch(BAD, 3.0), StopAt(13)])
    config, run_dir, _ = runs("parts", *sets, hooks=[SpoilBatch(BAD, 3.0)])
    assert losses(run_dir) == losses(whole[1])
    assert len(events(run_dir, "rollback")) == 1
    check_ledger(config, run_dir, {BAD})


def test_without_a_checkpoint_before_it_a_bad_step_stays_skipped(runs):
    _, run_dir, result = runs("early", "guard.nonfinite=rollback", hooks=[SpoilBatch(3)])
    assert result.steps == STEPS
    assert len(events(run_dir, "no rollback")) == 1


def test_a_run_that_rolls_back_too_often_stops(runs):
    with pytest.raises(UserError, match="max_rollbacks"):
        runs("often", "guard.nonfinite=rollback", "guard.max_rollbacks=0", hooks=[SpoilBatch()])


def test_the_guard_ignores_noise_and_falling_losses_and_keeps_its_state():
    def judged(guard, losses):
        found = []
        for step, loss in enumerate(losses, 1):
            value = torch.tensor(loss)
            allowed = guard.allows(value)
            guard.note(step, value, allowed & value.isfinite())
            found.append(bool(allowed))
        return found

    section, device = GuardSection(spike="skip", window=16, spike_z=8.0), torch.device("cpu")
    noise = np.random.default_rng(1).normal(0, 0.05, 200)
    falling = [10 * 0.99**i + float(noise[i]) for i in range(200)]
    guard = Guard(section, device, scaled_loss=False)
    assert all(judged(guard, falling))
    guard.rollbacks = [7]
    other = Guard(section, device, scaled_loss=False)
    other.load(guard.state())
    assert other.state() == guard.state()
    # a rollback loads an older state and is still counted after it
    other.load({"losses": other.state()["losses"]})
    assert other.rollbacks == [7]
    assert judged(other, [falling[-1] + 5, falling[-1]]) == [False, True]
    assert int(other.bad_count) == 1
