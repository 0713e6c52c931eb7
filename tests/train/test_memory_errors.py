"""A run whose memory runs out says so, loses nothing, and a resumed run keeps its derived settings."""

import json

import pytest
import torch

import arriero
from arriero.config.load import load_run
from arriero.errors import UserError
from arriero.model.presets import expand
from arriero.train.hooks import Hook


@pytest.fixture
def config(tmp_path, synthetic_cache):
    def made(*sets):
        keys = [
            *(
                "model.preset=llama-test",
                "model.vocab_size=4096",
                "data.sources=[{path='builtin:synthetic'}]",
            ),
            *(f"data.cache={synthetic_cache}", "data.seq_len=16", "train.batch=128 tok", "run.device=cpu"),
            *(
                "train.horizon=4 steps",
                "schedule.kind=constant",
                "checkpoint.every=1 step",
                "eval.every=false",
                "eval.heldout=false",
                "observe.sample=false",
            ),
            *(
                f"run.dir={tmp_path}",
                "run.name=small",
                "observe.tensorboard=false",
                "checkpoint.export=false",
            ),
        ]
        return load_run(None, [*keys, *sets], expand).config

    return made


class Exhaust(Hook):
    """Ask for more memory than any machine has after a number of steps."""

    def __init__(self, step, wrapped=False):
        self.step, self.wrapped = step, wrapped

    def on_step(self, session, step, tokens):
        if step != self.step:
            return
        try:
            torch.empty(1 << 60)
        except RuntimeError as error:
            if self.wrapped:
                # as the compiler does
                raise ValueError("backend failed") from error
            raise


@pytest.mark.parametrize("wrapped", [False, True])
def test_error_names_prediction_usage_and_next_setting_and_the_run_resumes(config, wrapped):
    with pytest.raises(UserError) as caught:
        arriero.run(config(), hooks=[Exhaust(3, wrapped)])
    assert "ran out; the predicted peak is " in caught.value.what
    assert "this process used up to " in caught.value.what
    assert caught.value.todo.startswith("set memory.activation_checkpointing = ")
    result = arriero.run(config("train.micro_batch=4"))
    # the checkpoints of the steps before the last one were kept
    assert result.steps == 4 and min(result.losses) >= 3


def test_other_errors_are_not_taken_for_memory(config):
    class Fail(Hook):
        def on_step(self, session, step, tokens):
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        arriero.run(config(), hooks=[Fail()])


def test_a_resumed_run_keeps_the_settings_it_was_started_with(config, tmp_path):
    arriero.run(config("train.horizon=2 steps"))
    path = tmp_path / "small" / "settings.json"
    stored = json.loads(path.read_text())
    assert stored["train.micro_batch"] == [8]
    path.write_text(json.dumps({**stored, "train.micro_batch": [2]}))

    class Look(Hook):
        def on_start(self, session):
            self.micro_batch = session.resolved.micro_batch
            self.reasons = {each.name: each.reason for each in session.record.decisions}

    look = Look()
    arriero.run(config(), hooks=[look])
    assert look.micro_batch == 2
    assert look.reasons["micro-batch"] == "as the run was started"


def test_damaged_settings_are_named(config, tmp_path):
    arriero.run(config("train.horizon=1 step"))
    path = tmp_path / "small" / "settings.json"
    stored = json.loads(path.read_text())
    damaged = ["{", "[]", "{}", json.dumps({**stored, "train.micro_batch": ["8"]})]
    damaged += [json.dumps({**stored, "train.micro_batch": 0}), json.dumps({**stored, "parallel.sync": 1})]
    for content in damaged:
        path.write_text(content)
        with pytest.raises(UserError, match="is damaged"):
            arriero.run(config())
