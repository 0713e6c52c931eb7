"""What Arriero asks of a real Slurm: states of jobs, resubmission, a controller that does not answer."""

import re
import sys
import threading

import pytest

from arriero import slurm as client
from arriero.events import read_records


@pytest.fixture
def controller(slurm, tmp_path, monkeypatch):
    """Let this process reach the cluster through a file that a test may break and repair."""
    whole = (slurm.folder / "slurm.conf").read_text()
    place = tmp_path / "slurm.conf"

    def set_reachable(is_reachable):
        # port 9 is refused; Slurm's own commands try again for as long as these times allow
        broken = re.sub(r"(?m)^SlurmctldPort=.*$", "SlurmctldPort=9\nMessageTimeout=1", whole)
        broken = re.sub(r"(?m)^SlurmctldTimeout=.*$", "SlurmctldTimeout=1", broken)
        place.write_text(whole if is_reachable else broken)

    (tmp_path / "gres.conf").write_text((slurm.folder / "gres.conf").read_text())
    set_reachable(True)
    monkeypatch.setenv("SLURM_CONF", str(place))
    return set_reachable


def job_of(slurm, folder, text, *options):
    script = folder / "a job.sh"
    script.write_text(f"#!/bin/sh\n{text}\n")
    return slurm.submit(script, f"--output={folder}/log", f"--chdir={folder}", *options, cwd=folder)


def test_a_job_that_slurm_has_forgotten_differs_from_a_silent_controller(slurm, tmp_path, controller):
    job = job_of(slurm, tmp_path, "exit 3")
    assert client.wait_for(job, poll_s=0.1) == "FAILED"
    assert client.job_facts(job)["Command"] == str(tmp_path / "a job.sh")
    assert client.wait_for("7", poll_s=0.1) == client.UNKNOWN
    assert client.job_facts("7") == {}
    controller(False)
    assert client.job_facts(job) == {"JobState": client.NO_ANSWER}


def test_waiting_for_a_job_outlives_a_silent_controller(slurm, tmp_path, controller, capfd):
    job = job_of(slurm, tmp_path, "true")
    slurm.wait(job)
    controller(False)
    found = []
    waiting = threading.Thread(target=lambda: found.append(client.wait_for(job, poll_s=0.1)))
    waiting.start()
    said = ""
    while "does not answer" not in said:
        assert waiting.is_alive(), found
        said += capfd.readouterr().err
    controller(True)
    waiting.join(120)
    assert found == ["COMPLETED"]


SUPERVISED = """
test -e {done} && exit 0
touch {done}
{drain}
exec {python} -m arriero launch supervise {folder}/run.toml --nodes {nodes} --no-preflight --restarts 2 \
    --set run.dir={folder} --set run.name=again --set parallel.dp_shard={nodes}
"""


@pytest.fixture
def supervised(slurm, tmp_path):
    """Submit a supervised job whose last node, or all of them, become unusable as it starts.

    Return the job, the next job of its chain, the unusable nodes and the last decision of its supervisor.
    """
    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "llama3.1-8b"\n[data]\nsources = ["builtin:stdlib"]\n'
    )

    def submit(nodes, all_of_them=False):
        bad = "$SLURM_JOB_NODELIST"
        if not all_of_them:
            bad = f"$(scontrol show hostnames {bad} | tail -1)"
        drain = f"scontrol update NodeName={bad} State=DRAIN Reason=test"
        about = {"done": tmp_path / "done", "drain": drain, "folder": tmp_path, "nodes": nodes}
        text = SUPERVISED.format(python=sys.executable, **about)
        job = job_of(slurm, tmp_path, text, f"--nodes={nodes}", "--hold")
        link = job_of(slurm, tmp_path, text, f"--dependency=afterany:{job}")
        slurm.run("scontrol", "release", job)
        slurm.wait(job)
        had = slurm.run("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).stdout.split()
        bad = had if all_of_them else had[-1:]
        slurm.run("scontrol", "update", f"NodeName={','.join(bad)}", "State=RESUME")
        events = [e for e in read_records(tmp_path / "again" / "events.jsonl") if e.get("decision")]
        last = [e for e in events if e["decision"] in ("resubmit", "give up")][-1:]
        assert last, (tmp_path / "log").read_text()
        return job, link, bad, last[0]

    return submit


def test_a_job_with_a_bad_node_is_submitted_again_without_it_before_the_rest_of_its_chain(
    slurm, tmp_path, supervised
):
    job, link, [bad], decision = supervised(2)
    assert (decision["decision"], decision["excluded"]) == ("resubmit", [bad])
    [again] = [each for each in client.submitted(tmp_path) if each.get("replaces") == job]
    assert slurm.wait(again["job"]) == "COMPLETED"
    names = slurm.run("scontrol", "show", "hostnames", slurm.job(again["job"])["NodeList"])
    assert bad not in names.stdout.split()
    assert slurm.job(again["job"])["ExcNodeList"] == bad
    assert slurm.wait(link) == "COMPLETED"
    assert slurm.job(link)["StartTime"] >= slurm.job(again["job"])["EndTime"]


def test_a_job_whose_nodes_are_all_bad_gives_up_with_the_reason(slurm, tmp_path, supervised):
    job, _, _, decision = supervised(4, all_of_them=True)
    assert decision["decision"] == "give up"
    assert "all 4 nodes fail, n1 because: Slurm reports it as" in decision["reason"]
    assert slurm.job(job)["ExitCode"] == "1:0"
    assert client.submitted(tmp_path) == []


def test_a_job_is_not_submitted_again_for_ever_without_a_save(tmp_path, supervised):
    earlier = '{"event": "supervise", "decision": "resubmit", "time": 1}\n' * 2
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "events.jsonl").write_text('{"event": "save"}\n' + earlier)
    *_, decision = supervised(2)
    assert "submitted again 2 times without a save" in decision["reason"]
