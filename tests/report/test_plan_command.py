"""`arriero plan` as a user runs it."""

import json
import tomllib
from pathlib import Path

import pytest

RUN = """# my run
[run]
name = "big"     # its name

[model]
preset = "llama3-70b"

[data]
seq_len = 8192
sources = "data/x"

[train]
batch = "4194304 tok"   # 512 sequences
horizon = "1T tok"

[parallel]
tp = 4   # four ranks share a layer
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return str(path)


def test_a_plan_is_a_table_an_explanation_and_reasons(command, run_file):
    result = command("plan", run_file, "--cluster", "8xh100", "--nodes", "16", "--top", "3")
    assert result.returncode == 0, result.stderr
    text = result.stdout
    for expected in ("tok/s/device", "tp 4", "whole run", "device-hours", "MWh", "rejected", "analytic"):
        assert expected in text
    assert len([line for line in text.splitlines() if line.startswith(("1 ", "2 ", "3 "))]) == 3


def test_json_holds_candidates_explanation_and_the_whole_run(command, run_file):
    result = command("plan", run_file, "--cluster", "8xh100", "--gpus", "64", "--json", "--top", "4")
    facts = json.loads(result.stdout)
    assert facts["devices"] == 64
    assert len(facts["explanation"]) == 5
    assert len(facts["candidates"]) == 4
    best = facts["candidates"][0]
    assert best["layout"]["tp"] == 4
    parts = sum(best["compute_s"].values()) + sum(best["exposed_s"].values())
    parts += best["bubble_s"] + best["optimizer_s"] + best["host_s"]
    assert parts == pytest.approx(best["step_s"], rel=0.1)
    assert facts["whole_run"]["tokens"] == pytest.approx(1e12, rel=1e-4)
    assert facts["whole_run"]["device_hours"] == pytest.approx(64 * facts["whole_run"]["hours"])


def test_the_written_run_file_keeps_comments_and_has_explicit_degrees(command, run_file, tmp_path):
    target = tmp_path / "planned.toml"
    arguments = ("--cluster", "8xh100", "--gpus", "64", "--set", "optim.lr=1e-4", "--write", str(target))
    result = command("plan", run_file, *arguments)
    assert result.returncode == 0, result.stderr
    text, table = target.read_text(), tomllib.loads(target.read_text())
    assert all(comment in text for comment in ("# my run", "# its name", "# 512 sequences"))
    degrees = table["parallel"]
    product = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        product *= degrees[axis]
    assert product == 64
    assert table["optim"]["lr"] == 1e-4
    assert Path(run_file).read_text() == RUN
    checked = command("config", "check", str(target), "--nproc", "64", "--device", "h100")
    assert checked.returncode == 0, checked.stderr


def test_explain_compares_a_layout_with_the_best(command, run_file):
    where = ("--cluster", "8xh100", "--gpus", "64")
    result = command("plan", run_file, *where, "--explain", "cp=2", "--json")
    compared = json.loads(result.stdout)["compared"]
    assert compared["with"]["layout"]["cp"] == 2
    best, other = compared["seconds"]["total"]
    assert other >= best * 0.97
    refused = command("plan", run_file, *where, "--explain", "tp=8")
    assert refused.returncode == 2
    assert "parallel.tp = 4 and --explain tp=8" in refused.stderr


def test_an_excluded_kind_of_activation_checkpointing_is_not_planned(command, run_file):
    """Where only `full` is left, every candidate uses it."""
    left_out = ("--exclude", "none,selective,attention,fraction")
    result = command("plan", run_file, "--cluster", "8xh100", "--gpus", "64", "--json", *left_out)
    assert result.returncode == 0, result.stderr
    candidates = json.loads(result.stdout)["candidates"]
    assert {each["activation_checkpointing"] for each in candidates} == {"full"}


def test_what_if_shows_scaling(command, run_file):
    result = command("plan", run_file, "--cluster", "frontier", "--what-if", "nodes=32,64", "--json")
    rows = json.loads(result.stdout)["what_if"]
    assert [row["devices"] for row in rows] == [256, 512]
    assert rows[1]["whole_run"]["hours"] < rows[0]["whole_run"]["hours"]


def test_a_model_that_does_not_fit_is_answered_with_what_would(command, run_file):
    result = command("plan", run_file, "--device", "a100-80g", "--gpus", "4")
    assert result.returncode == 1
    assert "does not fit on 4 devices" in result.stdout
    assert "smallest number of devices on which it would fit is" in result.stdout
    limited = command("plan", run_file, "--device", "a100-80g", "--gpus", "4", "--memory-limit", "1GiB")
    assert "or raise --memory-limit" in limited.stdout


def test_a_run_without_an_allowed_layout_is_not_said_to_lack_memory(command, run_file):
    batch = ("--set", "train.batch=8192 tok")
    result = command("plan", run_file, "--device", "h100", "--gpus", "8", "--fix", "dp_shard=2", *batch)
    assert result.returncode == 1
    assert "has no allowed layout on 8 devices" in result.stdout
    assert "the batch has only 1 sequence, fewer than data ranks" in result.stdout
    assert "would fit" not in result.stdout
    kinds = ("--exclude", "none,selective,attention,full")
    excluded = command("plan", run_file, "--device", "h100", "--gpus", "64", *kinds)
    assert "--exclude leaves no candidate" in excluded.stdout


def test_a_run_file_written_elsewhere_still_extends_its_base(command, run_file, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(f'extends = "{Path(run_file).name}"\n')
    (tmp_path / "planned").mkdir()
    target = tmp_path / "planned" / "run.toml"
    result = command("plan", str(own), "--device", "h100", "--gpus", "64", "--write", str(target))
    assert result.returncode == 0, result.stderr
    assert tomllib.loads(target.read_text())["extends"] == "../run.toml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --cluster or --device"),
        (("--cluster", "frontier", "--device", "h100"), "exclude each other"),
        (("--cluster", "frontier", "--nodes", "2", "--gpus", "2"), "exclude each other"),
        (("--device", "h100"), "needs the number of devices"),
        (("--cluster", "h200", "--nodes", "2"), "h200 has 1 device, not 2"),
        (("--cluster", "8xh100", "--gpus", "12"), "do not fill nodes of 8"),
        (("--cluster", "8xh100", "--fix", "tq=2"), "--fix tq=2 is not a degree"),
        (("--cluster", "8xh100", "--fix", "tp=2", "--fix", "tp=4"), "contradict each other"),
        (("--cluster", "8xh100", "--exclude", "everything"), "--exclude everything is unknown"),
        (("--cluster", "8xh100", "--what-if", "nodes=a"), "is not a list"),
        (("--device", "h100", "--what-if", "gpus=12"), "do not fill nodes of 8"),
        (("--cluster", "8xh100", "--memory-limit", "big"), "--memory-limit"),
        (("--cluster", "8xh100", "--write", "no/such/folder.toml"), "no directory"),
    ],
)
def test_wrong_options_are_answered_in_a_sentence(command, run_file, arguments, message):
    result = command("plan", run_file, *arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_plan_needs_no_torch(python):
    code = (
        "import sys\n"
        "from arriero.config.load import load_run\n"
        "from arriero.model.presets import expand\n"
        "from arriero.plan.hardware import load_cluster\n"
        "from arriero.plan.search import plan_run\n"
        "import arriero.report.commands\n"
        "plan_run(load_run(None, [], expand).config, load_cluster('8xh100'), 8, keep=1)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert python("-c", code).returncode == 0
