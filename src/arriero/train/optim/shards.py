"""Tensors as this rank holds them: the local part of a DTensor, and back. Plain tensors are their own."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from arriero.parallel.precision import bare


def local_of(tensor: Tensor) -> Tensor:
    """Shares storage with the tensor; updates of it are updates of the tensor."""
    # one of thousands of tensors a step: each call counts
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return bare(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def placed(local: Tensor, like: Tensor, placements: Sequence[Placement] | None = None) -> Tensor:
    """A local part as a whole tensor, placed as `like` is unless told otherwise."""
    if not isinstance(like, DTensor):
        return local
    placements = like.placements if placements is None else placements
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def as_placed(tensor: Tensor, like: Tensor) -> Tensor:
    """Autograd leaves some gradients as partial sums, or whole on every rank."""
    if isinstance(tensor, DTensor) and isinstance(like, DTensor) and tensor.placements != like.placements:
        return tensor.redistribute(placements=like.placements)
    return tensor


def split_dims(tensor: DTensor) -> tuple[int, ...]:
    """The dimensions of its mesh over which the tensor is split."""
    for placement in tensor.placements:
        if placement.is_partial():
            raise ValueError(f"a gradient is a partial sum ({tensor.placements}): reduce it first")
    return tuple(i for i, p in enumerate(tensor.placements) if not p.is_replicate())


def piece_number(tensor: Tensor) -> int:
    """Which piece of the tensor is here: alike on ranks that hold the same one."""
    if not isinstance(tensor, DTensor):
        return 0
    number = 0
    for dim in split_dims(tensor):
        number = number * tensor.device_mesh.size(dim) + tensor.device_mesh.get_local_rank(dim)
    return number


def pieces(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    return math.prod(tensor.device_mesh.size(dim) for dim in split_dims(tensor))


def piece_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor held whole, cut as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    # a strided shard cuts what the shards to its right have left
    for dim in sorted(split_dims(like), key=lambda dim: isinstance(like.placements[dim], _StridedShard)):
        whole = _cut(whole, like.placements[dim], like.device_mesh, dim)
    assert whole.shape == local_of(like).shape, (whole.shape, like)
    return whole


def _cut(tensor: Tensor, placement: Placement, mesh: DeviceMesh, dim: int) -> Tensor:
    along = placement.dim  # pyrefly: ignore[missing-attribute]
    parts = torch.chunk(tensor, mesh.size(dim), along)
    here = mesh.get_local_rank(dim)
    return parts[here] if here < len(parts) else tensor.narrow(along, 0, 0)
