"""Keys that change the arithmetic are searched only where the run file sets them to "auto"."""

import tomllib
from dataclasses import replace

import pytest

from arriero.config.keys import ConfigError
from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.plan.advice import write_run_file
from arriero.plan.hardware import Machine, load_cluster, machine_named
from arriero.plan.resolve import resolve
from arriero.plan.search import plan_run

CPU = Machine("CPU", "cpu", 2**38, 2**38, torch=(2, 13))
H200 = machine_named("h200")
BASE = ("model.preset=llama3.1-8b", "data.seq_len=8192", "train.batch=65536 tok")
OPEN = ("precision.float8=auto", "optim.state=auto", "memory.offload_activations=auto")


def config(*sets):
    return load_run(None, [*BASE, *sets], expand).config


def chosen(run):
    return run.config.precision.float8, run.config.optim.state, run.config.memory.offload_activations


def test_defaults_are_not_searched():
    assert chosen(resolve(config(), H200, 1)) == ("off", "fp32", False)


def test_open_keys_get_the_fastest_values_with_their_reasons():
    run = resolve(config(*OPEN), H200, 1)
    assert chosen(run) == ("tensorwise", "bf16", False)
    rows = {each.name: (each.value, each.reason) for each in run.decisions}
    assert rows["float8 recipe"][0] == "tensorwise" and "faster than off" in rows["float8 recipe"][1]
    assert rows["optimizer state"][0] == "bf16" and "faster than fp32" in rows["optimizer state"][1]
    assert rows["offload activations"] == ("false", "no other value is faster by 1 % or more")


def test_a_set_key_is_kept():
    run = resolve(config("optim.state=auto", "precision.float8=rowwise"), H200, 1)
    assert run.config.precision.float8 == "rowwise"


def test_arithmetic_stays_exact_where_another_gains_nothing():
    small = ("model.preset=llama3.2-1b", "train.batch=16384 tok", "optim.state=auto")
    assert resolve(config(*small), H200, 1).config.optim.state == "fp32"


def test_a_value_is_changed_if_the_run_would_not_fit():
    machine = replace(H200, memory_free=110 << 30)
    run = resolve(config("optim.state=auto"), machine, 1)
    assert run.config.optim.state != "fp32"
    reasons = {each.name: each.reason for each in run.decisions}
    assert reasons["optimizer state"] == "the run does not fit with fp32"


def test_a_cpu_keeps_the_defaults_that_fit():
    run = resolve(config(*OPEN, "model.preset=llama3.2-1b", "train.batch=8192 tok"), CPU, 1)
    assert chosen(run) == ("off", "fp32", False)


def test_a_device_without_float8_computes_in_bf16():
    assert resolve(config("precision.float8=auto"), machine_named("a100"), 8).config.precision.float8 == "off"


@pytest.mark.parametrize("degrees", [(), ("parallel.dp_shard=auto",)])
def test_a_resumed_run_keeps_what_it_was_started_with(degrees):
    small, large = replace(H200, memory_free=110 << 30), replace(H200, memory_free=1 << 40)
    run = config("optim.state=auto", *degrees)
    started = resolve(run, small, 1)
    resumed = resolve(run, large, 1, started.open_settings)
    assert (
        resumed.config.optim.state == started.config.optim.state != resolve(run, large, 1).config.optim.state
    )
    assert {each.name: each.reason for each in resumed.decisions}[
        "optimizer state"
    ] == "as the run was started"
    assert resumed.open_settings["optim.state"] == started.config.optim.state


def test_a_plan_searches_open_keys_and_writes_them(tmp_path):
    plan = plan_run(config(*OPEN), load_cluster("8xh200"), 8, keep=20)
    assert plan.best.choice.keys["precision.float8"] == "tensorwise"
    assert "float8 tensorwise" in str(plan.best.choice)
    assert len({each.choice.arithmetic for each in plan.candidates}) > 1
    write_run_file(tmp_path / "run.toml", None, (), plan)
    written = tomllib.loads((tmp_path / "run.toml").read_text())
    assert written["precision"]["float8"] == "tensorwise"
    assert written["optim"]["state"] == plan.best.choice.keys["optim.state"]


def test_ranks_with_different_free_memory_agree():
    run = config("optim.state=auto", "memory.offload_activations=auto")
    least, more = 110 << 30, 135 << 30
    total = H200.memory_total
    ranks = [resolve(run, replace(H200, memory_free=free), 1) for free in (least, more)]
    assert chosen(ranks[0]) != chosen(ranks[1])
    agreed = [rank.with_least_memory(least, total) for rank in ranks]
    assert agreed[0].open_settings == agreed[1].open_settings
    assert chosen(agreed[0]) == chosen(agreed[1]) == chosen(ranks[0])


def test_offloading_is_not_planned_beyond_the_memory_of_the_host():
    huge = ("model.preset=llama3.1-405b", "parallel.dp_shard=2", *OPEN, "memory.offload_state=auto")
    with pytest.raises(ConfigError):
        resolve(config(*huge), H200, 2)


def test_float8_is_not_searched_beside_an_adapter():
    adapted = ("model.preset=llama3.2-1b", "lora.rank=4", "precision.float8=auto")
    assert resolve(config(*adapted), H200, 1).config.precision.float8 == "off"
