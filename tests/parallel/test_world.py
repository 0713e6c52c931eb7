"""The place of a process in every launcher, and how the ranks meet."""

import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from arriero.errors import UserError
from arriero.parallel.mesh import make_mesh
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import World, leader_first, process_group, world_from
from arriero.plan.layout import Layout
from arriero.units import parse_span

CPU = torch.device("cpu")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "nid[00017-00020,00031]",
}


def test_variables_of_all_launchers_are_read():
    assert world_from({}) == World()
    assert world_from(TORCHRUN) == World(3, 8, 1, 1, "tcp://n1:29500")
    assert world_from(SLURM) == World(3, 8, 1, 4, "tcp://nid00017:20119")
    assert world_from(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == World()
    batch_script = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert world_from(batch_script) == World()
    with pytest.raises(UserError, match="RANK is 'x', not a number"):
        world_from({"RANK": "x", "WORLD_SIZE": "2"})
    with pytest.raises(UserError, match="rendezvous address"):
        world_from({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"RANK": "3", "WORLD_SIZE": "1"}, "RANK is 3 and WORLD_SIZE is 1"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK is 8 and WORLD_SIZE is 8"),
        ({"RANK": "0"}, "sets RANK without WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "sets WORLD_SIZE without RANK"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "without RANK and WORLD_SIZE"),
    ],
)
def test_contradictory_or_incomplete_launcher_variables_are_errors(variables, complaint):
    with pytest.raises(UserError, match=complaint):
        world_from(variables)


def test_other_variables_beside_those_of_slurm_are_ignored():
    assert world_from(SLURM | {"WORLD_SIZE": "8"}) == world_from(SLURM)
    assert world_from({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == World()


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "958136321",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
PALS = {
    "PMI_RANK": "13",
    "PMI_SIZE": "24",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "12",
    "PALS_RANKID": "13",
    "PALS_LOCAL_RANKID": "1",
    "PALS_APID": "8d4a8f0e-7a7f-4a5e-9c0e-0a6b1f0d6d3b",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    "MPIRUN_ID": "4711",
}
MEETING = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (OPEN_MPI, (3, 4, 1, 2)),
        (MPICH, (1, 2, 1, 2)),
        (PALS, (13, 24, 1, 12)),
        (MVAPICH, (5, 8, 1, 4)),
        ({"PMIX_RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, (2, 4, 0, 2)),
        # the daemons of mpirun are a step with one task per node
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | OPEN_MPI, (3, 4, 1, 2)),
        # srun --mpi=pmi2
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"}, (3, 8, 1, 4)),
        # one task of srun is a shell that calls mpirun
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"} | MPICH, (1, 2, 1, 2)),
    ],
)
def test_mpi_launchers_give_rank_size_and_place_on_the_node(variables, place):
    world = world_from(variables | MEETING)
    assert (world.rank, world.size, world.local_rank, world.local_size) == place
    assert world.meeting == "tcp://n1:29500"


def test_ranks_of_a_step_use_its_tasks_and_nodes_and_not_those_of_the_job():
    spared = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_JOB_NODELIST": "nid[00016-00020]"}
    world = world_from(SLURM | spared)
    assert (world.size, world.meeting) == (6, "tcp://nid00017:20119")


def test_each_node_of_an_uneven_step_knows_its_own_number_of_tasks():
    uneven = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": "2"}
    assert world_from(uneven).local_size == 1
    assert world_from(uneven | {"SLURM_NODEID": "1"}).local_size == 3


def test_a_suffix_of_the_site_is_added_to_the_first_node():
    assert world_from(SLURM | {"ARRIERO_HOST_SUFFIX": "i"}).meeting == "tcp://nid00017i:20119"


def test_mpirun_on_one_node_needs_no_address():
    local = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    first, second = world_from(local), world_from(local | {"OMPI_COMM_WORLD_RANK": "0"})
    assert first.meeting == second.meeting
    assert first.meeting.startswith("tcp://127.0.0.1:2")
    assert world_from(local | {"PMIX_NAMESPACE": "another job"}).meeting != first.meeting
    assert world_from(MPICH).meeting.startswith("tcp://127.0.0.1:")


def test_mpirun_over_several_nodes_uses_the_first_node_of_the_job_for_the_rendezvous(tmp_path):
    slurm = {"SLURM_JOB_NODELIST": "n[3-6]", "SLURM_STEP_NODELIST": "n[4-6]", "SLURM_JOB_ID": "9"}
    assert world_from(OPEN_MPI | slurm).meeting.startswith("tcp://n3:")
    (tmp_path / "nodes").write_text("x3101\nx3102\n")
    assert world_from(PALS | {"PBS_NODEFILE": str(tmp_path / "nodes")}).meeting.startswith("tcp://x3101:")
    with pytest.raises(UserError, match="set MASTER_ADDR and MASTER_PORT"):
        world_from(PALS)


def test_a_pmix_rank_without_the_number_of_ranks_is_an_error():
    with pytest.raises(UserError, match="no variable says how many ranks there are"):
        world_from({"PMIX_RANK": "0"})
    assert world_from(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"}) == World()


def test_missing_ranks_are_named(tmp_path):
    def work():
        world = World(int(os.environ["RANK"]), 4, 0, 4, f"file://{tmp_path}/meeting")
        with process_group(world, CPU, timeout=timedelta(seconds=2)):
            pass

    with pytest.raises(UserError, match=r"2 of 4 ranks had started; missing: rank 2, 3"):
        run_ranks(work, 2, leader_prints=False)


def test_a_run_whose_ranks_are_missing_may_be_restarted(tmp_path):
    world = World(0, 2, 0, 1, f"file://{tmp_path}/meeting")
    with (
        pytest.raises(UserError, match=r"missing: rank 1") as caught,
        process_group(world, CPU, timeout=timedelta(seconds=1)),
    ):
        pass
    assert caught.value.exit_code == 75


def test_a_refusal_of_rank_0_is_raised_on_all_ranks(tmp_path):
    def work():
        world = world_from()
        refusal = UserError("the run is in use", "wait for it") if world.is_leader else None
        try:
            with process_group(world, CPU, refusal=refusal):
                pass
        except UserError as error:
            (tmp_path / str(world.rank)).write_text(f"{error.what} {error.todo}")

    run_ranks(work, 3, leader_prints=False)
    assert {path.read_text() for path in tmp_path.glob("[012]")} == {"the run is in use wait for it"}
    assert len(list(tmp_path.glob("[012]"))) == 3


def test_an_unknown_rendezvous_host_fails_at_once_and_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(UserError, match=r"no-such-node.invalid, does not resolve .* scontrol"),
        process_group(World(1, 2, 0, 1, "tcp://no-such-node.invalid:20000"), CPU),
    ):
        pass


def test_ranks_of_nodes_without_dns_use_the_address_of_slurm_for_the_rendezvous(slurm, tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from arriero.parallel.world import process_group, world_from\n"
        "world = world_from()\n"
        "with process_group(world, torch.device('cpu')):\n"
        "    total = torch.tensor(world.rank)\n"
        "    dist.all_reduce(total)\n"
        "print(world.rank, world.size, world.local_rank, world.local_size, total.item(), world.meeting)\n"
    )
    shown = slurm.run("srun", "-N2", "-n4", "--ntasks-per-node=2", "--exclude=n1", sys.executable, script)
    lines = sorted(shown.stdout.splitlines())
    assert [line.split()[:5] for line in lines] == [[str(r), "4", str(r % 2), "2", "6"] for r in range(4)]
    assert all(line.split()[5].startswith("tcp://n2:") for line in lines)


def sockets():
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


def sockets_of_a_run(ranks):
    """Return the sockets of a rank after the mesh of an FSDP run is made and rank 0 has gone first."""

    def work():
        world = world_from()
        with process_group(world, CPU):
            mesh = make_mesh(Layout(1, ranks, 1, 1, 1), world, 1, CPU)
            assert mesh.group("loss") is dist.group.WORLD
            with leader_first(world):
                pass
            mesh.sum_over(torch.ones(1), "loss")
            dist.barrier(mesh.group("checkpoint"))
            return sockets()

    return run_ranks(work, ranks, leader_prints=False)


def test_a_sharded_run_has_two_groups_of_all_ranks():
    assert sockets_of_a_run(8) < 3 * 8


def test_large_groups_connect_only_the_ranks_that_communicate(monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert sockets_of_a_run(24) < 24


def test_the_limit_of_open_files_is_raised():
    def work():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        with process_group(world_from(), CPU):
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard

    assert run_ranks(work, 2, leader_prints=False)


def test_rank_0_goes_first_each_time(tmp_path):
    def work():
        world = world_from()
        with process_group(world, CPU):
            for turn in range(3):
                with leader_first(world):
                    if world.is_leader:
                        (tmp_path / str(turn)).touch()
                    assert (tmp_path / str(turn)).exists()

    run_ranks(work, 4, leader_prints=False)


def test_a_collective_fails_after_the_timeout_of_training(tmp_path):
    def work():
        world = world_from()
        with process_group(world, CPU):
            mesh = make_mesh(Layout(1, 2, 1, 1, 1), world, 1, CPU)
            mesh.set_timeout(parse_span("1s"))
            if world.rank == 1:
                while not (tmp_path / "failed").exists():
                    time.sleep(0.05)
                os._exit(0)
            with pytest.raises(RuntimeError, match=r"(?i)time"):
                dist.all_reduce(torch.ones(1))
            (tmp_path / "failed").touch()
            raise UserError("the collective has failed")

    with pytest.raises(UserError, match="the collective has failed"):
        run_ranks(work, 2, leader_prints=False)
