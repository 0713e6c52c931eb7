"""The rank of this process, from the variables of its launcher, and the default process group."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from arriero.errors import UserError

if TYPE_CHECKING:
    import torch

RENDEZVOUS = "ARRIERO_RENDEZVOUS"
_STARTERS = "--nproc, torchrun or srun"

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
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
    for names in _LAUNCHERS:
        # the process of a batch script has Slurm's variables too, but no step
        is_step = names[0] != "SLURM_PROCID" or "SLURM_STEP_ID" in environment
        if not is_step or not all(name in environment for name in names[:2]):
            continue
        complete = True
        rank, size = (_number(environment, name) for name in names[:2])
        if rank >= size:
            raise UserError(
                f"{names[0]} is {rank} and {names[1]} is {size}: ranks count from 0 to {names[1]} - 1",
                f"unset both, or start the ranks by one launcher ({_STARTERS})",
            )
        if size > 1:
            local_rank, local_size = (_number(environment, name, 1) for name in names[2:])
            local_rank = local_rank if names[2] in environment else rank
            return World(rank, size, local_rank, local_size, _meeting(environment))
    if not complete:
        _check_complete(environment)
    return World()


def _check_complete(environment: Mapping[str, str]) -> None:
    names = _LAUNCHERS[0]
    found = [name for name in names if name in environment]
    missing = [name for name in names[:2] if name not in environment]
    if found:
        raise UserError(
            f"the environment sets {' and '.join(found)} without {' and '.join(missing)}",
            f"unset {' and '.join(found)}, or start the ranks by {_STARTERS}",
        )


def _number(environment: Mapping[str, str], name: str, absent: int | None = None) -> int:
    """Read a count; of Slurm's list such as '4(x2),3', the first number."""
    if absent is not None and name not in environment:
        return absent
    found = re.match(r"\d+", environment[name])
    if found is None:
        raise UserError(
            f"{name} is '{environment[name]}', not a number", "unset it, or let the launcher set it"
        )
    return int(found[0])


def _meeting(environment: Mapping[str, str]) -> str:
    if RENDEZVOUS in environment:
        return environment[RENDEZVOUS]
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if address is None and "SLURM_STEP_NODELIST" in environment:
        address = first_host(environment["SLURM_STEP_NODELIST"])
    if port is None and "SLURM_JOB_ID" in environment:
        job, step = (_number(environment, f"SLURM_{name}_ID", 0) for name in ("JOB", "STEP"))
        port = str(20000 + (7 * job + step) % 20000)
    if address is None or port is None or not port.isdigit():
        raise UserError(
            "this is one of several processes, and their rendezvous address is not set",
            "set MASTER_ADDR and MASTER_PORT, the same for all of them",
        )
    return f"tcp://{address}:{port}"


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, such as 'frontier[00017-00020,00031],login3'."""
    prefix, bracket, rest = nodes.partition("[")
    if not bracket or "," in prefix:
        return nodes.partition(",")[0]
    first = re.split("[-,\\]]", rest, maxsplit=1)[0]
    return prefix + first


@contextmanager
def leader_first(world: World) -> Iterator[None]:
    """Let rank 0 run the block first, however long it takes, and then the other ranks."""
    if world.size == 1:
        yield
        return
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    assert isinstance(group, dist.ProcessGroup)
    if not world.is_leader:
        dist.barrier(group)
    yield
    if world.is_leader:
        dist.barrier(group)


@contextmanager
def process_group(
    world: World,
    device: "torch.device",
    timeout: timedelta = timedelta(minutes=30),
    refusal: UserError | None = None,
    share_gpu: bool = False,
) -> Iterator[None]:
    """Create the default process group (gloo on CPUs, NCCL or RCCL on GPUs) and destroy it at the end.

    `refusal` is an error of rank 0. It is sent to all ranks, which raise it instead of waiting.
    """
    if world.size == 1:
        if refusal is not None:
            raise refusal
        yield
        return
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if share_gpu:
        from arriero.parallel.shared_gpu import BACKEND, register_backend

        register_backend()
        backend = BACKEND
    dist.init_process_group(
        backend,
        init_method=world.meeting,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and not share_gpu else None,
    )
    errors = [refusal]
    dist.broadcast_object_list(errors, src=0)
    if errors[0] is not None:
        raise errors[0]
    yield
    # not after an error, when other ranks may be gone
    dist.barrier()
    dist.destroy_process_group()
