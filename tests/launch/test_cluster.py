"""The cluster that other tests use behaves like a real one."""


def test_four_nodes_run_a_step_of_eight_tasks(slurm):
    shown = slurm.run("srun", "-N4", "-n8", "sh", "-c", "echo $SLURMD_NODENAME $SLURM_PROCID").stdout
    tasks = [line.split() for line in shown.splitlines()]
    assert {node for node, _ in tasks} == set(slurm.nodes)
    assert sorted(int(rank) for _, rank in tasks) == list(range(8))


def test_fake_gpus_are_distributed_to_tasks(slurm):
    ask = ["srun", "-N1", "-n2", "--gpus-per-node=2", "--gpu-bind=single:1"]
    seen = slurm.run(*ask, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout.split()
    assert sorted(seen) == ["0", "1"]


def test_a_requeued_job_starts_again_within_seconds(slurm, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/sh\n#SBATCH --requeue\n"
        'test -n "$SLURM_RESTART_COUNT" && exit 0\nscontrol requeue $SLURM_JOB_ID; sleep 60\n'
    )
    job = slurm.submit(script, cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED"
    assert slurm.job(job)["Restarts"] == "1"
