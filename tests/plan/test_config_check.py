"""`arriero config check`: all derived settings or all problems, for a machine that need not be here."""

import json

import pytest


def test_check_prints_every_decision_with_its_reason(arriero):
    result = arriero("config", "check", "--nproc", "4", "--device", "mi300x")
    assert result.returncode == 0, result.stderr
    for words in ("AMD Instinct MI300X", "bf16", "micro-batch", "4 of 4 sequences", "dp_shard 4"):
        assert words in result.stdout


def test_check_reports_problems_of_file_and_layout_together(arriero, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text("data = {sources = 'builtin:stdlib', seq_len = 128}\nmodel = {preset = 'llama-demo'}\n")
    with run.open("a") as file:
        file.write("optim = {lrr = 1}\n")
    sets = ["--set", "parallel.tp=3", "--set", "train.horizon=1h", "--set", "train.batch=4096 tok"]
    result = arriero("config", "check", run, *sets, "--nproc", "4", "--json")
    assert result.returncode == 2
    found = {problem["key"]: problem for problem in json.loads(result.stdout)["problems"]}
    assert {"optim.lrr", "schedule.horizon", "parallel", "parallel.tp"} <= found.keys()
    assert found["optim.lrr"]["origin"] == str(run)
    assert found["parallel.tp"]["origin"] == "--set"
    assert all(problem["problem"] and problem["todo"] for problem in found.values())
    text = arriero("config", "check", run, *sets, "--nproc", "4")
    assert text.returncode == 2
    assert all(key in text.stderr for key in found)


def test_check_suggests_the_nearest_device(arriero):
    result = arriero("config", "check", "--device", "h20")
    assert result.returncode == 2
    assert "there is no device 'h20'; did you mean 'h200'?" in result.stderr


@pytest.mark.parametrize("more", [[], ["--device", "h200"], ["--json"]])
def test_check_does_not_load_torch(python, more):
    script = f"""
import sys
sys.argv = ["arriero", "config", "check", *{more!r}]
from arriero.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules
"""
    result = python("-c", script)
    assert result.returncode == 0, result.stderr
