"""The norm of all gradients of a run, however they are spread over ranks."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DeviceMesh, DTensor

from arriero.kernels import grouped, is_aligned, kernels, usable
from arriero.parallel.dtensor import local_part, sharded_dims

_Spread = tuple[DeviceMesh | None, tuple[int, ...]]


@torch.no_grad()
def global_norm(gradients: Iterable[Tensor], groups: Sequence[ProcessGroup] = ()) -> Tensor:
    """A plain tensor is alike on all ranks of its group and counts once, as does what a mesh replicates.

    `groups` are ranks that hold different parameters, as the stages of a pipeline do. On a rank without any
    gradient to count, pass an empty tensor on the run's device.
    """
    by_spread: dict[_Spread, list[Tensor]] = {}
    for gradient in gradients:
        spread = (
            (gradient.device_mesh, sharded_dims(gradient)) if isinstance(gradient, DTensor) else (None, ())
        )
        by_spread.setdefault(spread, []).append(local_part(gradient))
    sums = {spread: _sum_of_squares(parts) for spread, parts in by_spread.items()}
    _reduce_over_meshes(sums)
    total = torch.stack(list(sums.values())).sum()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.sqrt().float()


def factor_within(norm: Tensor, limit: float) -> Tensor:
    """What brings gradients of this norm down to the limit; 1 where they are within it."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _sum_of_squares(parts: list[Tensor]) -> Tensor:
    filled = [part for part in parts if part.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=parts[0].device)
    if usable(filled[0]):
        kinds = grouped(filled, lambda part: (part.dtype, is_aligned(part)))
        return torch.stack([kernels("multi_tensor").sum_of_squares(parts) for parts in kinds]).sum()
    # a long fp32 sum loses digits, and others in each layout
    norms = torch._foreach_norm(filled, 2, dtype=torch.float64)
    return torch.stack(list(norms)).double().square().sum()


def _reduce_over_meshes(sums: dict[_Spread, Tensor]) -> None:
    """One all-reduce for each group of ranks, whatever the number of spreads that need it."""
    waiting: dict[ProcessGroup, list[_Spread]] = {}
    for mesh, dims in sums:
        for dim in dims:
            if mesh is not None and mesh.size(dim) > 1:
                waiting.setdefault(mesh.get_group(dim), []).append((mesh, dims))
    for group, spreads in waiting.items():
        together = torch.stack([sums[spread] for spread in spreads])
        dist.all_reduce(together, group=group)
        sums.update(zip(spreads, together, strict=True))
