"""Decisions about a job with a controller that is a script."""

from types import SimpleNamespace

import pytest

from arriero.launch.allocation import Allocation

JOB = "JobId=7 JobState=RUNNING Command={script}"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Let scontrol give one answer per call, the last for ever; return the pauses between the calls."""
    pauses = []
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    # not time.sleep itself, which subprocess uses
    monkeypatch.setattr("arriero.launch.allocation.time", SimpleNamespace(sleep=pauses.append))

    def program(name, text):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def answer(silent_calls, text):
        program("sbatch", "echo 8")
        program("squeue", "true")
        program("sacct", "echo 'RUNNING|||||0:0|0'")
        count = f"echo >> {tmp_path}/calls; test $(wc -l < {tmp_path}/calls) -gt {silent_calls}"
        program(
            "scontrol", f"{count} || {{ echo 'Unable to contact slurm controller' >&2; exit 1; }}; {text}"
        )
        return pauses

    return answer


def test_a_silent_controller_is_asked_again_before_a_job_is_resubmitted(tmp_path, asked):
    script = tmp_path / "job.sbatch"
    script.touch()
    pauses = asked(3, f"echo '{JOB.format(script=script)}'")
    assert Allocation(1).resubmit(["n2"]) is None
    assert len(pauses) == 3


def test_a_controller_that_stays_silent_is_the_problem(asked):
    pauses = asked(99, "true")
    assert Allocation(1).resubmit([]) == "Slurm does not answer"
    assert sum(pauses) >= 300


@pytest.mark.parametrize("decision", [Allocation.requeue, lambda job: job.resubmit([])])
def test_a_job_that_slurm_has_forgotten_is_the_problem(tmp_path, asked, decision):
    asked(0, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    (tmp_path / "sacct").write_text("#!/bin/sh\n")
    assert decision(Allocation(1)) == "Slurm does not know the job"
