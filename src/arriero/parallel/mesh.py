"""The ranks of a run as one object with named axes; nothing else makes process groups."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from arriero.parallel.world import World
from arriero.plan.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """Axes pp, dp_replicate, dp_shard, cp (a ring of Ulysses groups), tp; and views over several of them.

    A group is None where it would hold this process alone.
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
        """Which of the batch's parts this rank reads."""
        return self.coordinate("dp_replicate") * self.layout.dp_shard + self.coordinate("dp_shard")

    @property
    def speaks_for_sequences(self) -> bool:
        """True for one of the ranks in each loss view that share their sequences."""
        return self.coordinate("cp") == 0

    @property
    def counts_batch(self) -> bool:
        """True for one of the ranks of the whole run that read the same sequences."""
        return all(self.coordinate(axis) == 0 for axis in ("cp", "tp", "pp"))

    @property
    def ring(self) -> int:
        return self.layout.cp // self.ulysses

    @property
    def shards(self) -> bool:
        """Whether weights are sharded or replicated by FSDP."""
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

    def total(self, value: torch.Tensor, *views: str) -> torch.Tensor:
        """The sum over the ranks of these views, in place."""
        for view in views:
            if (group := self.group(view)) is not None:
                dist.all_reduce(value, group=group)
        return value

    def total_of_run(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.world.size > 1:
            dist.all_reduce(value)
        return value

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """The vectors of all ranks as rows, by one collective on the tensor's device."""
        if self.world.size == 1:
            return values[None]
        # gloo takes no output with a dimension more than the input
        rows = torch.empty(self.world.size * len(values), dtype=values.dtype, device=values.device)
        dist.all_gather_into_tensor(rows, values)
        return rows.view(self.world.size, len(values))

    def least(self, value: int) -> int:
        """The smallest over all ranks."""
        return int(self.gathered(torch.tensor([value])).min())

    def largest(self, value: float) -> float:
        return self.gathered(torch.tensor([value], dtype=torch.float64)).max().item()

    def agreed(self, value: float) -> float:
        """What rank 0 measured: clocks differ, and ranks must decide alike."""
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
        "loss": layout.groups("dp_replicate", "dp_shard", "cp"),
        "ulysses": [g[i : i + ulysses] for g in layout.groups("cp") for i in range(0, layout.cp, ulysses)],
        "ring": [g[i::ulysses] for g in layout.groups("cp") for i in range(ulysses)],
        "ends": [[g[0], g[-1]] if len(g) > 1 else g for g in layout.groups("pp")],
    }
    groups = {view: _own_group(lists) for view, lists in views.items() if len(lists[0]) > 1}
    # used by a thread of its own, while the others carry training
    own = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
    groups["checkpoint"] = own if isinstance(own, dist.ProcessGroup) else None
    if layout.pp > 1:
        groups["pp"] = root.get_group("pp")
    return Mesh(layout, world, ulysses, root, {k: g for k, g in groups.items() if g is not None})


def _own_group(lists: list[list[int]]) -> dist.ProcessGroup | None:
    """None for a rank that is in none of them."""
    group = dist.new_subgroups_by_enumeration(lists)[0]
    return group if isinstance(group, dist.ProcessGroup) else None
