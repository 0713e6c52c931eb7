"""Jobs of a run on a real Slurm: two nodes with two ranks each."""

import json
import sys
import time

import pytest

from arriero.config.load import load_run
from arriero.launch.status import read_status
from arriero.model.presets import expand

RUN = """
[run]
name = "{name}"
device = "cpu"
deterministic = true
[model]
preset = "llama-test"
layers = 2
vocab_size = 4096
[data]
seq_len = 64
sources = ["builtin:stdlib"]
cache = "{cache}"
[train]
batch = "512 tok"
horizon = "{steps} steps"
[eval]
heldout = false
[parallel]
dp_replicate = 2
dp_shard = 2
[checkpoint]
every = "1000 steps"
[observe]
log_every = 1
tensorboard = false
"""
SITE = """
[slurm]
partition = "debug"
gpus_per_node = 0
cpus_per_task = 1
time = "30"
"""
STEPS = 60


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture
def run_arriero(slurm, tmp_path, corpus_cache):
    (tmp_path / "site.toml").write_text(SITE)
    for name in ("alone", "chained"):
        text = RUN.format(name=name, cache=corpus_cache, steps=STEPS)
        (tmp_path / f"{name}.toml").write_text(text)

    def run(*arguments):
        done = slurm.run(sys.executable, "-m", "arriero", *arguments, cwd=tmp_path)
        return json.loads(done.stdout) if "--json" in arguments else done.stdout

    return run


def wait_for_step(run_dir, step):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        path = run_dir / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.05)
    raise TimeoutError(f"no step {step} in {run_dir}")


def log_of(status):
    return "\n".join(open(job["log"]).read() for job in status["jobs"])  # noqa: PTH123


def test_a_chain_of_jobs_continues_bit_identically_and_status_follows_it(
    slurm, tmp_path, run_arriero, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    config = load_run(tmp_path / "chained.toml", [], expand).config
    options = ["--nodes", 2, "--tasks-per-node", 2, "--no-preflight", "--hours", 0.9, "--json"]
    jobs = run_arriero("launch", "chain", "chained.toml", *options)["jobs"]
    assert len(jobs) == 3
    run = tmp_path / "runs" / "chained"
    wait_for_step(run, 10)
    # a process of its own would take longer than the run has left
    during = read_status(config).describe()
    assert [job["state"] for job in during["jobs"]] == ["RUNNING", "PENDING", "PENDING"]
    assert 10 <= during["last"]["step"] < STEPS
    assert during["ends_in_s"] > 0
    # what --signal=B:TERM does before the time limit
    slurm.run("scancel", "--batch", "--signal=TERM", jobs[0])
    assert slurm.wait(jobs[0]) == "COMPLETED", log_of(during)
    stopped = max(losses(run))
    assert stopped < STEPS
    assert slurm.wait(jobs[2]) == "COMPLETED", log_of(during)
    after = run_arriero("launch", "status", "runs/chained", "--json")
    assert after["finished"]
    # the third job found the run finished
    assert (after["last"]["step"], after["restarts"]) == (STEPS, 1)
    assert [job["state"] for job in after["jobs"]] == ["COMPLETED"] * 3
    assert 0 < after["goodput"]["goodput"] < 1
    run_arriero("train", "alone.toml", "--nproc", "4")
    assert losses(run) == losses(tmp_path / "runs" / "alone")
