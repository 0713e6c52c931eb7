"""A site whose rounds are Slurm jobs, on a real Slurm with virtual nodes."""

import json

import pytest

from arriero import slurm as slurm_commands
from arriero.federate.coordinator import Coordinator
from arriero.federate.members import MemberManifest, read_manifest
from arriero.federate.site import Launcher, run_round
from federate.test_streamflow import federation_file

SITE = """
[slurm]
partition = "debug"
gpus_per_node = 0
cpus_per_task = 1
time = "30"
"""


@pytest.mark.slow
def test_a_round_is_a_slurm_job_of_arriero_launch(slurm, tmp_path, corpus_cache, monkeypatch):
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "here.toml").write_text(SITE)
    coordinator = Coordinator.of(federation_file(tmp_path, corpus_cache, sites="a"))
    coordinator.prepare()
    order = coordinator.assign_idle()["a"]
    paths = coordinator.paths(coordinator.config.site("a"), order)
    paths.work.mkdir(parents=True, exist_ok=True)
    member = run_round(order, paths, Launcher(profile=str(tmp_path / "here.toml")))
    assert (member.first_step, member.step) == (0, 2)
    assert read_manifest(paths.out, MemberManifest) == member
    events = [json.loads(line) for line in (paths.work / "run" / "events.jsonl").read_text().splitlines()]
    assert {"supervise", "end"} <= {event["event"] for event in events}
    jobs = slurm_commands.submitted(paths.work / "run.launch")
    assert len(jobs) == 1
    made = coordinator.rounds.try_to_close(coordinator.names)
    assert made.round == 1
