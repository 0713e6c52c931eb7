"""`arriero doctor --allocation` on a real Slurm: nodes that fail, hang or cannot be reached are named."""

import json
import re
import sys

import pytest

# n2 fails a command of the site; on n4 the checks stop and never answer
STOPPED = '[ "$SLURMD_NODENAME" != n4 ] || kill -STOP $(ps -o ppid= $PPID) $PPID $$'
CHECKS = ["--check", 'test "$SLURMD_NODENAME" != n2', "--check", STOPPED]


# the doctor is Arriero's, after more warnings than a pipe holds; instead of training, a rank says where it is
RANK = """#!/bin/bash
[ "$2" = doctor ] && yes warning | head -c 200000 >&2
[ "$2" = doctor ] && exec {python} -m "$@"
echo "rank $SLURM_PROCID on $SLURMD_NODENAME"
"""
RUN = '[model]\npreset = "llama3.1-8b"\n[data]\nsources = ["data/web"]\n'


@pytest.fixture(scope="module")
def examined(slurm, tmp_path_factory):
    """Supervise a job of two nodes and two spares, of which one fails and one hangs in the checks; return the
    folder of the checks and the job's output."""
    folder = tmp_path_factory.mktemp("examined")
    (folder / "run.toml").write_text(RUN)
    (folder / "rank.sh").write_text(RANK.format(python=sys.executable))
    (folder / "rank.sh").chmod(0o755)
    words = [sys.executable, "-m", "arriero", "launch", "supervise", folder / "run.toml", "--nodes", "2"]
    words += ["--spares", "2", "--wrap", folder / "rank.sh", "--set", f"run.dir={folder}", *CHECKS[:3]]
    quoted = " ".join(f"'{word}'" for word in words)
    script = folder / "job.sh"
    script.write_text(f'#!/bin/bash\n{quoted} "$STOPPED"\necho exit code $?\n')
    environment = slurm.environment | {"STOPPED": STOPPED, "OMP_NUM_THREADS": "1"}
    job = slurm.submit(script, "--nodes=4", f"--output={folder}/log", env=environment)
    assert slurm.wait(job, seconds=500) == "COMPLETED"
    slurm.wait_for_nodes(4)
    (checks,) = folder.glob("*/preflight/*")
    return checks, (folder / "log").read_text()


@pytest.mark.slow
def test_nodes_that_fail_or_hang_are_written_with_their_reason(examined):
    folder, log = examined
    lines = dict(line.split(" ", 1) for line in (folder / "failing_nodes.txt").read_text().splitlines())
    assert set(lines) == {"n2", "n4"}, log
    assert "exit code 1" in lines["n2"]
    assert "did not answer" in lines["n4"]
    assert "2 of 4 nodes passed" in log


@pytest.mark.slow
def test_with_spares_the_run_starts_on_the_nodes_that_passed(examined):
    _, log = examined
    assert sorted(re.findall(r"rank (\d) on (n\d)", log)) == [("0", "n1"), ("1", "n3")]
    assert "supervise: exclude (n2): pre-flight: command" in log
    assert log.splitlines()[-1] == "exit code 0"


@pytest.mark.slow
def test_the_network_is_measured_between_the_nodes_that_passed(examined):
    folder, _ = examined
    network = json.loads((folder / "report.json").read_text())["network"]
    assert [each["nodes"] for each in network["pairs"]] == [["n1", "n3"]]
    assert network["world_gb_per_s"] > 0
    assert network["wrong"] == []
    assert set(network["clocks"]) == {"n1", "n3"}
    phases = network["phases"]
    assert {"import torch", "connect", "process group", "first collective"} <= set(phases)
    assert phases["import torch"]["slowest"] in ("n1", "n3")
