"""The device mesh: the ranks of a run with named axes. Only this module creates process groups."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from arriero.parallel.shared_gpu import BACKEND as SHARED_GPU
from arriero.parallel.world import World
from arriero.plan.layout import Layout
from arriero.units import Span


@dataclass(frozen=True)
class Mesh:
    """The mesh of a layout: axes pp, dp_replicate, dp_shard, cp (a ring of Ulysses groups) and tp.

    `groups` are process groups over several axes (views); a group of this process alone is None.
    """

    layout: Layout
    world: World
    ulysses: int
    root: DeviceMesh | None
    groups: dict[str, dist.ProcessGroup]

    def group(self, view: str) -> dist.ProcessGroup | None:
        return self.groups.get(view)

    def coordinate(self, axis: str) -> int:
        return self.layout.coordinates(self.world.rank)[axis]

    @property
    def batch_rank(self) -> int:
        """The number of the part of the global batch that this rank reads."""
        return self.coordinate("dp_replicate") * self.layout.dp_shard + self.coordinate("dp_shard")

    @property
    def is_cp_leader(self) -> bool:
        """True for one of the context-parallel ranks that share their sequences."""
        return self.coordinate("cp") == 0

    @property
    def is_batch_leader(self) -> bool:
        """True for one of all ranks that read the same sequences."""
        return all(self.coordinate(axis) == 0 for axis in ("cp", "tp", "pp"))

    @property
    def ring(self) -> int:
        return self.layout.cp // self.ulysses

    @property
    def shards(self) -> bool:
        """Whether FSDP shards or replicates the weights."""
        return self.layout.dp_replicate * self.layout.fsdp > 1

    @property
    def fsdp(self) -> DeviceMesh:
        assert self.root is not None
        replicated = self.layout.dp_replicate > 1
        return self.root["dp_replicate", "fsdp"] if replicated else self.root["fsdp"]

    @property
    def tp(self) -> DeviceMesh:
        assert self.root is not None
        return self.root["tp"]

    def sum_over(self, value: torch.Tensor, *views: str) -> torch.Tensor:
        """Sum a tensor in place over the ranks of these views."""
        for view in views:
            if (group := self.group(view)) is not None:
                dist.all_reduce(value, group=group)
        return value

    def sum_over_all(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor in place over all ranks."""
        if self.world.size > 1:
            dist.all_reduce(value)
        return value

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all ranks as rows."""
        if self.world.size == 1:
            return values[None]
        # gloo does not accept an output with more dimensions than the input
        rows = torch.empty(self.world.size * len(values), dtype=values.dtype, device=values.device)
        # torch 2.13 has a new name and warns about the old one
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(rows, values)
        return rows.view(self.world.size, len(values))

    def min_over_all(self, value: int) -> int:
        """Return the smallest value of all ranks."""
        return int(self.all_gather(torch.tensor([value])).min())

    def max_over_all(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return self.all_gather(torch.tensor([value], dtype=torch.float64)).max().item()

    def set_timeout(self, timeout: Span) -> None:
        """Set how long a collective of training waits for a rank; checkpoints keep their own timeout."""
        if self.root is None:
            return
        views = [group for view, group in self.groups.items() if view != "checkpoint"]
        for group in {dist.group.WORLD, *self.root.get_all_groups(), *views}:
            if dist.get_backend(group) != SHARED_GPU:
                _set_pg_timeout(timedelta(seconds=timeout.amount), group)

    def from_rank_0(self, value: float) -> float:
        """Return the value of rank 0, because clocks differ and all ranks must take the same decision."""
        if self.world.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(shared, src=0)
        return shared.item()


def make_mesh(layout: Layout, world: World, ulysses: int, device: torch.device) -> Mesh:
    if world.size == 1:
        return Mesh(layout, world, ulysses, None, {})
    ranks = torch.arange(layout.ranks).view(layout.pp, layout.dp_replicate, layout.fsdp, layout.tp)
    root = DeviceMesh(device.type, ranks, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    views = {
        "ulysses": [g[i : i + ulysses] for g in layout.groups("cp") for i in range(0, layout.cp, ulysses)],
        "ring": [g[i::ulysses] for g in layout.groups("cp") for i in range(ulysses)],
        "ends": [[g[0], g[-1]] if len(g) > 1 else g for g in layout.groups("pp")],
    }
    groups = {view: _own_group(lists, world.rank) for view, lists in views.items() if len(lists[0]) > 1}
    if (loss := layout.groups("dp_replicate", "dp_shard", "cp")) and len(loss[0]) > 1:
        # a group of all ranks costs each rank a connection to every other
        groups["loss"] = dist.group.WORLD if len(loss) == 1 else _own_group(loss, world.rank)
    # checkpoints are saved by a thread while other groups are used for training
    if dist.get_backend() != "fake":
        own = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        groups["checkpoint"] = own if isinstance(own, dist.ProcessGroup) else None
    if layout.pp > 1:
        groups["pp"] = root.get_group("pp")
    return Mesh(layout, world, ulysses, root, {k: g for k, g in groups.items() if g is not None})


def _own_group(lists: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Return this rank's group of `lists`, or None if it is in none."""
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is not None:
        # one call splits NCCL's communicator for all lists; DeviceMesh does the same for its axes
        return dist.split_group(world, lists)
    own = next((ranks for ranks in lists if rank in ranks), None)
    if own is None:
        return None
    # only the members take part: the number of groups does not matter
    group = dist.new_group(own, use_local_synchronization=True)
    return group if isinstance(group, dist.ProcessGroup) else None
