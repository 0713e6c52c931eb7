"""`arriero doctor --allocation` on a real Slurm: nodes that fail, hang or cannot be reached are named."""

import json
import sys

import pytest

# n2 fails a command of the site; on n4 the checks stop and never answer
STOPPED = '[ "$SLURMD_NODENAME" != n4 ] || kill -STOP $(ps -o ppid= $PPID) $PPID $$'
CHECKS = ["--check", 'test "$SLURMD_NODENAME" != n2', "--check", STOPPED]


@pytest.fixture(scope="module")
def examined(slurm, tmp_path_factory):
    """Examine four nodes, of which one fails and one hangs; return the folder and the job's output."""
    folder = tmp_path_factory.mktemp("examined")
    words = [sys.executable, "-m", "arriero", "doctor", "--allocation", "--out", folder, "--dir", folder]
    quoted = " ".join(f"'{word}'" for word in [*words, "--timeout", "45", *CHECKS[:3]])
    script = folder / "job.sh"
    script.write_text(f'#!/bin/bash\n{quoted} "$STOPPED"\necho exit code $?\n')
    environment = slurm.environment | {"STOPPED": STOPPED, "OMP_NUM_THREADS": "1"}
    job = slurm.submit(script, "--nodes=4", f"--output={folder}/log", env=environment)
    assert slurm.wait(job) == "COMPLETED"
    slurm.wait_for_nodes(4)
    return folder, (folder / "log").read_text()


@pytest.mark.slow
def test_nodes_that_fail_or_hang_are_written_with_their_reason(examined):
    folder, log = examined
    lines = dict(line.split(" ", 1) for line in (folder / "failing_nodes.txt").read_text().splitlines())
    assert set(lines) == {"n2", "n4"}, log
    assert "exit code 1" in lines["n2"]
    assert "did not answer" in lines["n4"]
    assert "exit code 1" in log.splitlines()[-1]
    assert "2 of 4 nodes passed" in log


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
