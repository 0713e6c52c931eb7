"""Which part of a tensor is local: shards of DTensors and their place in the whole.

A plain tensor is its own local part. `compute_local_shape_and_global_offset` and `_StridedShard` are private
torch APIs, tested with torch 2.11 and 2.13, and `_clear_sharding_prop_cache` is one tested with 2.13; nothing
else in Arriero uses them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, debug
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def forget_meshes() -> None:
    """Clear torch's cache of placements, which keeps the groups of meshes that no longer exist.

    A later run in this process has an equal mesh, and torch would use the groups of the earlier one.
    """
    # an older torch may not have it
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()


def local_part(tensor: Tensor) -> Tensor:
    """Return the local part as an ordinary tensor that shares storage with the given one."""
    # the optimizer calls this for every tensor of every step
    tensor = tensor.detach() if tensor.requires_grad else tensor
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # weights that are all-gathered as float8 have torchao's class, which wraps the memory
    return getattr(local, "_tensor", local)


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the local part and its offset in the whole tensor."""
    local = local_part(tensor)
    if not isinstance(tensor, DTensor) or local.numel() == 0:
        return local, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local, tuple(offset)


def from_local(local: Tensor, like: Tensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """Wrap a local part into a DTensor placed as `like` is, or as `placements` say."""
    if not isinstance(like, DTensor):
        return local
    placements = like.placements if placements is None else placements
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def redistribute_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Give a gradient its parameter's placements: autograd leaves some as partial sums or replicated."""
    if isinstance(tensor, DTensor) and isinstance(like, DTensor) and tensor.placements != like.placements:
        return tensor.redistribute(placements=like.placements)
    return tensor


def sharded_dims(tensor: DTensor) -> tuple[int, ...]:
    """Return the dimensions of its mesh over which the tensor is sharded."""
    for placement in tensor.placements:
        if placement.is_partial():
            raise ValueError(f"a gradient is a partial sum ({tensor.placements}): reduce it first")
    return tuple(i for i, p in enumerate(tensor.placements) if not p.is_replicate())


def shard_index(tensor: Tensor) -> int:
    """Return the number of the local shard; ranks that hold the same shard have the same number."""
    if not isinstance(tensor, DTensor):
        return 0
    number = 0
    for dim in sharded_dims(tensor):
        number = number * tensor.device_mesh.size(dim) + tensor.device_mesh.get_local_rank(dim)
    return number


def shard_count(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    return math.prod(tensor.device_mesh.size(dim) for dim in sharded_dims(tensor))


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """Cut this rank's shard out of a whole tensor, which is to be placed as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    # a strided shard cuts what the shards to its right have left
    for dim in sorted(sharded_dims(like), key=lambda dim: isinstance(like.placements[dim], _StridedShard)):
        whole = _chunk(whole, like.placements[dim], like.device_mesh, dim)
    assert whole.shape == local_part(like).shape, (whole.shape, like)
    return whole


def _chunk(tensor: Tensor, placement: Placement, mesh: DeviceMesh, dim: int) -> Tensor:
    along = placement.dim  # pyrefly: ignore[missing-attribute]
    parts = torch.chunk(tensor, mesh.size(dim), along)
    here = mesh.get_local_rank(dim)
    return parts[here] if here < len(parts) else tensor.narrow(along, 0, 0)
