"""The rank of this process, from the variables of its launcher, and the default process group."""

import hashlib
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from arriero.errors import UserError
from arriero.parallel.rendezvous import check_own_gpu, join
from arriero.slurm import first_host

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

RENDEZVOUS = "ARRIERO_RENDEZVOUS"
HOST_SUFFIX = "ARRIERO_HOST_SUFFIX"
INIT_TIMEOUT = timedelta(minutes=30)
_STARTERS = "--nproc, srun, torchrun or mpirun"
# above the ports of most services and below those that systems give to clients
_PORTS = range(20_000, 32_000)


@dataclass(frozen=True)
class _Launcher:
    """The variables of a launcher; of several names, the first that is set counts."""

    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...] = ()
    step: str | None = None


# Innermost first: mpirun inside a Slurm job starts its daemons as a step, whose variables the ranks inherit.
_LAUNCHERS = (
    _Launcher("RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher(
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        job=("MPIRUN_ID",),
    ),
    # MPICH's and Intel's Hydra, Cray PALS, MVAPICH 3, and srun --mpi=pmi2
    _Launcher(
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
        job=("PALS_APID", "PMI_JOBID"),
    ),
    _Launcher(
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        step="SLURM_STEP_ID",
    ),
    # PMIx does not say in a variable how many ranks there are
    _Launcher(
        "PMIX_RANK",
        ("PMIX_SIZE", "WORLD_SIZE"),
        ("PMIX_LOCAL_RANK", "LOCAL_RANK"),
        ("PMIX_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
        job=("PMIX_NAMESPACE",),
    ),
)


@dataclass(frozen=True)
class World:
    """The ranks of a run; `meeting` is the address of their rendezvous, None for a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    meeting: str | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this process is rank 0, which writes metrics, ledger and terminal output."""
        return self.rank == 0


def world_from(environment: Mapping[str, str] = os.environ) -> World:
    """Read what `arriero train --nproc`, torchrun, srun or mpirun has set; otherwise a single process."""
    complete = False
    for launcher in _LAUNCHERS:
        size_name = _first_set(environment, launcher.size)
        # the process of a batch script has Slurm's variables too, but no step
        is_step = launcher.step is None or launcher.step in environment
        if not is_step or launcher.rank not in environment or size_name is None:
            continue
        complete = True
        rank, size = _number(environment, launcher.rank), _number(environment, size_name)
        if rank >= size:
            raise UserError(
                f"{launcher.rank} is {rank} and {size_name} is {size}: ranks count from 0 to {size_name} - 1",
                f"unset both, or start the ranks by one launcher ({_STARTERS})",
            )
        if size > 1:
            local_rank = _first_set(environment, launcher.local_rank)
            return World(
                rank,
                size,
                _number(environment, local_rank) if local_rank else rank,
                _local_size(environment, _first_set(environment, launcher.local_size)),
                _meeting(environment, launcher),
            )
    if not complete:
        _check_complete(environment)
    return World()


def _first_set(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environment), None)


def _check_complete(environment: Mapping[str, str]) -> None:
    if "PMIX_RANK" in environment:
        raise UserError(
            "PMIX_RANK is set, but no variable says how many ranks there are",
            "set WORLD_SIZE to their number, or start the ranks with srun or mpirun",
        )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = [name for name in names if name in environment]
    missing = [name for name in names[:2] if name not in environment]
    if found:
        raise UserError(
            f"the environment sets {' and '.join(found)} without {' and '.join(missing)}",
            f"unset {' and '.join(found)}, or start the ranks by {_STARTERS}",
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d+", environment[name]):
        raise UserError(
            f"{name} is '{environment[name]}', not a number", "unset it, or let the launcher set it"
        )
    return int(environment[name])


def _local_size(environment: Mapping[str, str], name: str | None) -> int:
    """Return the number of ranks on this node; Slurm lists those of all nodes, like '4(x2),3'."""
    if name is None:
        return 1
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment[name]):
        counts += [int(count)] * int(times or 1)
    node = environment.get("SLURM_NODEID", "0") if name.startswith("SLURM_") else "0"
    return counts[min(int(node), len(counts) - 1)] if counts else 1


def _meeting(environment: Mapping[str, str], launcher: _Launcher) -> str:
    """Return the address of the rendezvous: as it is set, or from the node list and the number of the job."""
    if RENDEZVOUS in environment:
        return environment[RENDEZVOUS]
    address = environment.get("MASTER_ADDR") or _first_node(environment, launcher)
    port = environment.get("MASTER_PORT") or _port(environment, launcher)
    if address is None or port is None or not port.isdigit():
        raise UserError(
            "this is one of several processes, and their rendezvous address is not set",
            "set MASTER_ADDR and MASTER_PORT, the same for all of them",
        )
    return f"tcp://{f'[{address}]' if ':' in address else address}:{port}"


def _first_node(environment: Mapping[str, str], launcher: _Launcher) -> str | None:
    # the step of mpirun's daemons does not contain the node of mpirun, where rank 0 is
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    nodes = _first_set(environment, lists if launcher.step else lists[::-1])
    suffix = environment.get(HOST_SUFFIX, "")
    if nodes is not None:
        return first_host(environment[nodes]) + suffix
    if nodefile := environment.get("PBS_NODEFILE"):
        with suppress(OSError):
            return Path(nodefile).read_text().split()[0] + suffix
    return "127.0.0.1" if _is_one_node(environment, launcher) else None


def _is_one_node(environment: Mapping[str, str], launcher: _Launcher) -> bool:
    """Whether mpirun has started all ranks on this node."""
    counts = [_first_set(environment, names) for names in (launcher.size, launcher.local_size)]
    return bool(launcher.job) and len({name and environment[name] for name in counts}) == 1


def _port(environment: Mapping[str, str], launcher: _Launcher) -> str | None:
    """Return a port that is the same for all ranks of a job or step, and hardly ever that of another."""
    job, step = (environment.get(f"SLURM_{name}_ID", "") for name in ("JOB", "STEP"))
    if (name := _first_set(environment, launcher.job)) is not None:
        number = int.from_bytes(hashlib.sha256(environment[name].encode()).digest()[:4])
    elif job.isdigit():
        number = 7 * int(job) + (int(step) if launcher.step and step.isdigit() else 0)
    elif _is_one_node(environment, launcher):
        number = _launcher_pid()
    else:
        return None
    return str(_PORTS[number % len(_PORTS)])


def _launcher_pid() -> int:
    """Return the process that started the ranks of this node, also if each has a shell around it."""
    parent = pid = os.getppid()
    with suppress(OSError, ValueError):
        while pid > 1:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if re.search(r"mpi|hydra|orted|prte|pals", name):
                return pid
            pid = int(rest.split()[1])
    return parent


_store: "dist.Store | None" = None


@contextmanager
def leader_first(world: World) -> Iterator[None]:
    """Let rank 0 run the block first, however long it takes, and then the other ranks."""
    if world.size == 1:
        yield
        return
    assert _store is not None
    key = f"leader-first/{_store.add(f'leader-first-of/{world.rank}', 1)}"
    if not world.is_leader:
        _store.wait([key], timedelta(days=7))
    yield
    if world.is_leader:
        _store.set(key, "done")


@contextmanager
def process_group(
    world: World,
    device: "torch.device",
    timeout: timedelta = INIT_TIMEOUT,
    refusal: UserError | None = None,
    share_gpu: bool = False,
) -> Iterator[None]:
    """Create the default process group (gloo on CPUs, NCCL or RCCL on GPUs) and destroy it at the end.

    `refusal` is an error of rank 0. It is sent to all ranks, which raise it instead of waiting.
    """
    global _store
    if world.size == 1:
        if refusal is not None:
            raise refusal
        yield
        return
    import torch.distributed as dist

    raise_file_limit()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if share_gpu:
        from arriero.parallel.shared_gpu import BACKEND, register_backend

        register_backend()
        backend = BACKEND
    store = join(world, timeout, refusal)
    if device.type == "cuda" and not share_gpu:
        check_own_gpu(store, device)
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and not share_gpu else None,
    )
    _store = store
    try:
        yield
    finally:
        _store = None
    # not after an error, when other ranks may be gone
    dist.barrier()
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from arriero.parallel.dtensor import forget_meshes

        forget_meshes()


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: a rank has sockets to many others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # macOS refuses an unlimited number
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
