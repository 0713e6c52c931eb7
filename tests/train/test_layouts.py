"""Several ranks from the command line: rejected settings, files left behind, and a common end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from arriero.checkpoint.formats.hf_directory import load_hf
from arriero.config.load import load_run
from arriero.data.workers import no_progress
from arriero.errors import EXIT_RESTART
from arriero.model.presets import expand
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from
from arriero.train.build import arrange, build
from arriero.train.loop import train

SETS = [
    "model.preset=llama-test",
    "model.layers=4",
    "model.vocab_size=4096",
    "data.seq_len=64",
    "train.batch=512 tok",
    "train.horizon=3 steps",
    "schedule.warmup=1 step",
    "eval.heldout=2k tok",
    "observe.log_every=1",
    "observe.tensorboard=false",
    "run.device=cpu",
]
SOURCE = Path(__file__).parents[2] / "src"


def flags(*sets):
    return [part for each in (*SETS, *sets) for part in ("--set", each)]


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def cache(corpus_cache):
    return f"data.cache='{corpus_cache}'"


def test_two_ranks_leave_what_one_does(arriero, cache, tmp_path):
    for name, more in (("one", []), ("two", ["--nproc", "2"])):
        result = arriero("train", *flags(cache, f"run.name={name}"), *more)
        assert result.returncode == 0, result.stderr
    one, two = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    assert "dp_shard 2" in result.stdout
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert json.loads((two / "ledger.json").read_text()) == json.loads((one / "ledger.json").read_text())
    expected, found = load_hf(one / "model")[0], load_hf(two / "model")[0]
    assert expected.keys() == found.keys()
    assert all((expected[name] - found[name]).abs().max() < 1e-4 for name in expected)
    kinds = [json.loads(line)["event"] for line in (two / "events.jsonl").read_text().splitlines()]
    assert kinds.count("start") == kinds.count("end") == 1
    assert arriero("data", "audit", two).returncode == 0


def environment(**more):
    paths = [str(SOURCE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK", "WORLD_SIZE"))}
    return kept | {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths), **more}


def start(arguments, folder, **more):
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_torchrun_and_srun_start_the_run_that_nproc_starts(arriero, start_arriero, cache, tmp_path):
    assert arriero("train", *flags(cache, "run.name=own"), "--nproc", "2").returncode == 0
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    elastic = start([*torchrun, "-m", "arriero", "train", *flags(cache, "run.name=torchrun")], tmp_path)
    port, tasks = free_port(), []
    for rank in range(2):
        step = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": 2, "SLURM_JOB_ID": 7}
        step |= {"SLURM_STEP_ID": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        step = {name: str(value) for name, value in step.items()}
        tasks.append(start_arriero("train", *flags(cache, "run.name=srun"), cwd=tmp_path, **step))
    assert elastic.wait(timeout=300) == 0, elastic.stdout.read()
    for task in tasks:
        assert (done := task.wait()).returncode == 0, done.stderr
    runs = tmp_path / "runs"
    assert losses(runs / "torchrun") == losses(runs / "srun") == losses(runs / "own")


def children_of(parent):
    """Its child processes, in the order they were started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_rank_that_is_killed_ends_the_run_and_is_named(start_arriero, cache, tmp_path):
    run = tmp_path / "runs" / "killed"
    sets = flags(cache, "run.name=killed", "train.horizon=100000 steps")
    process = start_arriero("train", *sets, "--nproc", "2", cwd=tmp_path)
    deadline = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = children_of(process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    done = process.wait()
    output = done.stdout + done.stderr
    assert done.returncode == EXIT_RESTART, output
    assert output.count("error:") == 1
    assert re.search(r"rank 1 was killed \(SIGKILL\).*; the others were stopped", " ".join(output.split()))
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_ranks_with_different_memory_agree_on_the_micro_batch(tmp_path, corpus_cache):
    """A rank with fewer micro-batches than the others would wait for ever."""
    where = [f"run.dir='{tmp_path}'", f"data.cache='{corpus_cache}'"]
    config = load_run(None, [*SETS, *where, "memory.activation_checkpointing=none"], expand).config

    def work():
        world = world_from()
        plan = arrange(config, world)
        need = plan.resolved.estimates[0]
        free = (2**40, need.bytes(1) * 10 // 9 + 1)[world.rank]
        plan = replace(plan, resolved=plan.resolved.with_least_memory(free, free))
        with process_group(world, plan.device.torch_device):
            session = build(plan, no_progress)
            train(session)
            return [decision.value for decision in session.record.decisions if decision.name == "micro-batch"]

    assert run_ranks(work, 2, leader_prints=False) == ["1 of 4 sequences, gradient accumulation 4"]
