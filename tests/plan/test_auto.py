"""Degrees that are "auto"."""

import json
from dataclasses import replace

import pytest

from arriero.config.keys import ConfigError
from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.plan.auto import prediction
from arriero.plan.hardware import machine_named
from arriero.plan.resolve import resolve
from arriero.train.run import run

H100 = machine_named("h100")
LARGE = ("model.preset=llama3-70b", "data.seq_len=8192", "train.batch=4194304 tok")


def config(*sets):
    return load_run(None, list(sets), expand).config


@pytest.mark.parametrize("given", ["parallel=auto", "parallel.tp=auto"])
def test_auto_degrees_are_planned_and_written_out(given):
    resolved = resolve(config(*LARGE, given), H100, 64)
    assert resolved.layout.ranks == 64
    assert resolved.config.parallel.tp == resolved.layout.tp
    reason = next(each.reason for each in resolved.decisions if each.name == "layout")
    assert reason.startswith("planned: best of")


def test_a_degree_that_is_set_beside_auto_is_kept():
    resolved = resolve(config(*LARGE, "parallel=auto", "parallel.pp=4"), H100, 64)
    assert resolved.layout.pp == 4


def test_all_ranks_plan_the_same():
    layouts = {str(resolve(config(*LARGE, "parallel=auto"), H100, 32).layout) for _ in range(2)}
    assert len(layouts) == 1


def test_an_unknown_device_falls_back_to_data_parallelism():
    unknown = replace(H100, name="NVIDIA Future 1000", memory_free=2**40, memory_total=2**40)
    assert resolve(config(*LARGE, "parallel=auto"), unknown, 16).layout.dp_shard == 16


def test_what_cannot_fit_is_refused_with_the_command_that_says_more():
    with pytest.raises(ConfigError, match=r"no layout of 2 ranks fits.*arriero plan"):
        resolve(config(*LARGE, "parallel=auto"), H100, 2)


def test_a_resolved_run_has_a_prediction():
    found = prediction(resolve(config(*LARGE, "parallel=auto"), H100, 64))
    assert found["step_s"] > 1
    assert found["memory_bytes"] < H100.memory_total


def test_training_writes_the_plan_and_then_the_measurement(corpus_cache, tmp_path):
    sets = [f"data.cache={corpus_cache}", f"run.dir={tmp_path}", "run.name=planned", "parallel=auto"]
    sets += [
        "train.horizon=6 steps",
        "train.batch=1024 tok",
        "observe.log_every=1",
        "checkpoint.export=false",
    ]
    sets += ["eval.heldout=false", "eval.every=false", "observe.sample=false", "observe.tensorboard=false"]
    run(config(*sets), nproc=2)
    facts = json.loads((tmp_path / "planned" / "plan.json").read_text())
    degrees = facts["layout"]
    assert degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] * degrees["tp"] * degrees["pp"] == 2
    assert facts["predicted"]["step_s"] > 0
    assert facts["measured"]["step_s"] > 0
    assert facts["measured"]["memory_bytes"] > 2**20
