"""`bench comm`: time collectives over groups of every size, inside a node and between nodes.

All disjoint groups of one kind run at once, as they do in training, so that they share links and switches.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from arriero.bench.ops import spread_of
from arriero.errors import UserError
from arriero.parallel.world import World
from arriero.plan.measured import Collective, CollectiveTime
from arriero.train.device import Device

_WARMUP, _FEWEST, _MOST = 2, 5, 50
# torch 2.13 deprecates the older names
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class CommRequest:
    """Collectives, sizes in bytes of the whole tensor, and the seconds to spend on each size."""

    collectives: Sequence[Collective]
    sizes: Sequence[int]
    seconds: float = 0.3


class GroupKind(NamedTuple):
    """Groups of `ranks` ranks on `nodes` nodes each; `members` are all of them, disjoint."""

    ranks: int
    nodes: int
    members: list[list[int]]


def group_kinds(world_size: int, per_node: int) -> list[GroupKind]:
    """Return groups of 2, 4, ... ranks inside nodes, and of one or all ranks of each of 2, 4, ... nodes.

    The largest group of each kind is always among them, also if it is no power of two.
    """
    if world_size % per_node:
        raise UserError(
            f"{world_size} ranks do not fill nodes of {per_node}", "start equally many ranks on each node"
        )
    nodes = world_size // per_node
    kinds = []
    for size in _doubling(per_node):
        starts = range(0, per_node - size + 1, size)
        groups = [
            [node * per_node + first + i for i in range(size)] for node in range(nodes) for first in starts
        ]
        kinds.append(GroupKind(size, 1, groups))
    for count in _doubling(nodes):
        firsts = range(0, nodes - count + 1, count)
        across = [
            [(first + i) * per_node + local for i in range(count)]
            for first in firsts
            for local in range(per_node)
        ]
        kinds.append(GroupKind(count, count, across))
        if per_node > 1:
            whole = [list(range(first * per_node, (first + count) * per_node)) for first in firsts]
            kinds.append(GroupKind(count * per_node, count, whole))
    return kinds


def _doubling(most: int) -> list[int]:
    sizes = [1 << k for k in range(1, most.bit_length())]
    return sizes if not sizes or sizes[-1] == most else [*sizes, most]


def measure_comm(
    world: World, device: Device, request: CommRequest, report: Callable[[CollectiveTime], None]
) -> list[CollectiveTime]:
    """Measure as one rank; all ranks call it together. `report` gets each result on rank 0."""
    found = []
    for kind in group_kinds(world.size, world.local_size):
        own, _ = dist.new_subgroups_by_enumeration(kind.members)
        for collective in request.collectives:
            # two ranks exchange messages; larger groups are chains of such pairs
            if collective == "p2p" and kind.ranks > 2:
                continue
            for size in request.sizes:
                group = own if isinstance(own, dist.ProcessGroup) else None
                row = _measure(kind, group, collective, size, device, request.seconds)
                found.append(row)
                if world.is_leader:
                    report(row)
        if isinstance(own, dist.ProcessGroup):
            dist.destroy_process_group(own)
    return found


def _measure(
    kind: GroupKind,
    group: dist.ProcessGroup | None,
    collective: Collective,
    size: int,
    device: Device,
    seconds: float,
) -> CollectiveTime:
    """Return the time of the slowest rank in each run; a rank in no group only takes part in the exchange."""
    run = _prepared(collective, size, kind.ranks, group, device) if group is not None else lambda: None
    for _ in range(_WARMUP):
        run()
    device.synchronize()
    _everyone(device, 0.0)
    start = time.perf_counter()
    run()
    device.synchronize()
    once = _everyone(device, time.perf_counter() - start)
    runs = min(_MOST, max(_FEWEST, int(seconds / max(once, 1e-6))))
    times = _gpu_times(run, runs) if device.is_gpu else _cpu_times(run, runs)
    slowest = [_everyone(device, each) for each in times]
    return CollectiveTime(
        collective=collective, ranks=kind.ranks, nodes=kind.nodes, bytes=size, seconds=spread_of(slowest)
    )


def _cpu_times(run: Callable[[], None], runs: int) -> list[float]:
    found = []
    for _ in range(runs):
        dist.barrier()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return found


def _gpu_times(run: Callable[[], None], runs: int) -> list[float]:
    """Queue all runs and time each by events in the stream, so that launches are not counted."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    dist.barrier()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _everyone(device: Device, value: float) -> float:
    """Return the largest value of all ranks."""
    shared = torch.tensor(value, dtype=torch.float64, device=device.torch_device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


def _prepared(
    collective: Collective, size: int, ranks: int, group: dist.ProcessGroup, device: Device
) -> Callable[[], Any]:
    """Allocate the tensors of a collective and return a function that runs it once."""
    dtype = torch.bfloat16 if device.is_gpu else torch.float32
    share = max(1, size // dtype.itemsize // ranks)
    whole = torch.ones(share * ranks, dtype=dtype, device=device.torch_device)
    part = torch.ones(share, dtype=dtype, device=device.torch_device)
    if collective == "all_gather":
        return partial(_gather, whole, part, group=group)
    if collective == "reduce_scatter":
        return partial(_scatter, part, whole, group=group)
    if collective == "all_reduce":
        return partial(dist.all_reduce, whole, group=group)
    if collective == "all_to_all":
        return partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group)
    mine = dist.get_rank(group)
    peer = dist.get_global_rank(group, 1 - mine)

    def exchange() -> None:
        if mine == 0:
            dist.send(whole, peer, group=group)
        else:
            dist.recv(whole, peer, group=group)

    return exchange


def fabric(device: Device, world: World) -> str:
    """Describe backend and network cards of this node."""
    backend = "gloo"
    if device.is_gpu:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # pyrefly: ignore
        backend = f"{'NCCL' if torch.version.hip is None else 'RCCL'} {version}"
    # the speeds of InfiniBand and RoCE ports
    rates = Counter(path.read_text().strip() for path in Path("/sys/class/infiniband").glob("*/ports/*/rate"))
    nodes = world.size // world.local_size
    where = f"{nodes} nodes" if nodes > 1 else "one node"
    return ", ".join([backend, where, *sorted(f"{count} x {rate}" for rate, count in rates.items())])
