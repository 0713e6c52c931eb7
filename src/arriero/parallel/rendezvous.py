"""The rendezvous: how the ranks of a run find each other, and what is said when they do not."""

import fcntl
import ipaddress
import json
import os
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from arriero import slurm
from arriero.errors import NodeError, UserError
from arriero.units import human_time

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from arriero.parallel.world import World

# gloo connects every pair of ranks of a group, unless it connects them when they first communicate
_LAZY_ABOVE = 64


class RanksMissing(NodeError):
    """Ranks did not start or cannot be reached. `node` is theirs if it is one, else None."""

    def __init__(self, what: str, todo: str, node: str | None = None) -> None:
        super().__init__(what, todo)
        self.node = node


def join(world: "World", timeout: timedelta, refusal: UserError | None) -> "dist.Store":
    """Meet the other ranks; return the store. Raises UserError that names the ranks that did not come."""
    store = _open_store(world, timeout)
    store.set(f"here/{world.rank}", os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    if world.is_leader:
        store.set("refusal", json.dumps([refusal.what, refusal.todo] if refusal else None))
    error = json.loads(store.get("refusal"))
    if error is not None:
        _wait_for_readers(store, world)
        raise UserError(*error)
    if store.add("arrived", 1) == world.size:
        store.set("all", "here")
    try:
        # rank 0, which names the missing ranks, should be the first to fail
        store.wait(["all"], timeout if world.is_leader else timeout + timedelta(seconds=10))
    except (RuntimeError, ValueError) as late:
        raise _missing_ranks(store, world, timeout) from late
    return store


def _open_store(world: "World", timeout: timedelta) -> "dist.Store":
    import torch.distributed as dist

    assert world.meeting is not None
    url = urlsplit(world.meeting)
    if url.scheme == "tcp":
        assert url.hostname is not None
        # The store of rank 0 looks up the name of every rank that connects, one after the other. torch stops
        # that after a failure, and with one attempt a slow name server fails instead of delaying every rank.
        os.environ.setdefault("RES_OPTIONS", "timeout:2 attempts:1")
        address = address_of(url.hostname)
        _choose_interface(world, address)
        meeting = f"tcp://{f'[{address}]' if ':' in address else address}:{url.port}"
    else:
        meeting = world.meeting
    if world.size > _LAZY_ABOVE:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        store = next(dist.rendezvous(meeting, world.rank, world.size, timeout=timeout))[0]
    except dist.DistNetworkError as error:
        if world.is_leader:
            raise NodeError(
                f"rank 0 cannot listen at {meeting} ({_first_line(error)})",
                "set MASTER_PORT to a free port of the first node, and MASTER_ADDR to its address",
            ) from None
        raise RanksMissing(
            f"rank {world.rank} on {socket.gethostname()} did not reach rank 0 at {meeting} within "
            f"{human_time(timeout.total_seconds())} ({_first_line(error)})",
            "look for an error of rank 0; check that the address is reachable from this node",
        ) from None

    # ranks of another job that come to the same port must not be counted
    names = (f"SLURM_{name}" for name in ("CLUSTER_NAME", "JOB_ID", "STEP_ID"))
    return dist.PrefixStore(".".join(os.environ.get(name, "") for name in names), store)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _wait_for_readers(store: "dist.Store", world: "World") -> None:
    """Keep the store of rank 0 open until all ranks have read the refusal, or for a minute."""
    deadline = time.monotonic() + 60
    read = store.add("read", 1)
    while world.is_leader and read < world.size and time.monotonic() < deadline:
        time.sleep(0.05)
        read = store.add("read", 0)


def _missing_ranks(store: "dist.Store", world: "World", timeout: timedelta) -> RanksMissing:
    waited = f"after {human_time(timeout.total_seconds())}"
    if not world.is_leader:
        return RanksMissing(f"{waited}, not all of {world.size} ranks had started", "see the error of rank 0")
    here = {rank for rank in range(world.size) if store.check([f"here/{rank}"])}
    missing = [str(rank) for rank in range(world.size) if rank not in here]
    nodes = {store.get(f"here/{rank}").decode() for rank in here}
    silent = [node for node in slurm.hosts(os.environ.get("SLURM_STEP_NODELIST", "")) if node not in nodes]
    shown = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
    where = f"; no rank came from {', '.join(silent[:20])}" if silent else ""
    return RanksMissing(
        f"{waited}, {len(here)} of {world.size} ranks had started; missing: rank {shown}{where}",
        "look for their errors above, run `arriero doctor` on their nodes, or raise parallel.init_timeout",
        silent[0] if len(silent) == 1 else None,
    )


def check_own_gpu(store: "dist.Store", device: "torch.device") -> None:
    """Raise if another rank uses the same GPU: NCCL would refuse it later, and less clearly."""
    import torch

    gpu = f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"
    if store.add(f"gpu/{gpu}", 1) > 1:
        raise UserError(
            f"two ranks use the same GPU ({gpu})",
            "start one process per GPU, or let the launcher give each process one GPU of its own",
        )


def _choose_interface(world: "World", address: str) -> None:
    """Let gloo use the interface that leads to rank 0: its own choice may be the loopback interface."""
    if "GLOO_SOCKET_IFNAME" in os.environ or world.local_size == world.size:
        return
    with suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
            if family != socket.AF_INET or ipaddress.ip_address(own).is_loopback:
                return
            for _, name in socket.if_nameindex():
                if address_of_interface(name) == own:
                    os.environ["GLOO_SOCKET_IFNAME"] = name


def address_of_interface(name: str) -> str | None:
    """Return the IPv4 address of an interface, None if it has none (Linux: SIOCGIFADDR)."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))[20:24])
    return None


def address_of(host: str) -> str:
    """Return the host if its name resolves, else the address that Slurm has for the node of this name.

    Virtual and cloud nodes often have no DNS entry. Raises UserError within seconds if neither is usable.
    """
    if resolves(host):
        return host
    done = slurm.command("scontrol", "show", "node", "-o", host, seconds=20)
    address = slurm.fields_of(done.stdout).get("NodeAddr", "")
    if address and resolves(address):
        return address
    said = slurm.problem_of(done) or done.stdout.strip()
    tried = f"nor does NodeAddr={address}" if address else f"and Slurm does not say its address: {said}"
    raise NodeError(
        f"the name of the rendezvous host, {host}, does not resolve on {socket.gethostname()}, {tried}",
        "set MASTER_ADDR to an address of the first node, or ARRIERO_HOST_SUFFIX if names need one",
    )


def resolves(host: str) -> bool:
    """Return whether a name has an address; a name server that does not answer is asked three times."""
    for _ in range(3):
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
                continue
            return False
        return True
    return False
