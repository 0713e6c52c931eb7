"""FSDP: weights sharded over dp_shard x cp ranks; with dp_replicate, HSDP (hybrid sharding), by FSDP2."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from arriero.model.language_model import LanguageModel
from arriero.parallel.mesh import Mesh


@dataclass(frozen=True)
class Sharding:
    """`reshard` (reshard after forward): True frees gathered weights after forward (ZeRO-3), False keeps them
    for all micro-batches of a step (ZeRO-1), a number keeps them sharded over groups of that many ranks.
    `prefetch` is the number of blocks whose weights are prefetched."""

    compute: torch.dtype
    reduce: torch.dtype
    reshard: bool | int
    prefetch: int
    offload: bool


def shard_weights(model: LanguageModel, mesh: Mesh, sharding: Sharding, on_gpu: bool) -> None:
    """Shard the model. The embedding, each block, and norm with head are gathered separately.

    A tied embedding is gathered with the whole model.
    """
    common = {
        "mesh": mesh.fsdp,
        # inputs are not cast: rotary angles need fp32
        "mp_policy": MixedPrecisionPolicy(sharding.compute, sharding.reduce, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if sharding.offload else OffloadPolicy(),
    }
    tied = model.spec.tied and model.embedding is not None and model.head is not None
    if model.embedding is not None and not tied:
        fully_shard(model.embedding, reshard_after_forward=sharding.reshard, **common)
    for block in model.blocks.values():
        fully_shard(block, reshard_after_forward=sharding.reshard, **common)
    if model.norm is not None and model.head is not None and not tied:
        # backward starts with them, so they stay gathered
        fully_shard([model.norm, model.head], reshard_after_forward=False, **common)
    fully_shard(model, reshard_after_forward=False, **common)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gradients are summed: each rank's loss is divided by the labels of the global batch
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch(model.blocks.values(), sharding.prefetch)


def _prefetch(modules: Iterable[nn.Module], ahead: int) -> None:
    blocks: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])


def synchronize_gradients(model: nn.Module, wanted: bool, each: bool, keeps: bool = False) -> None:
    """Set whether the next backward reduces gradients over ranks.

    With `each`, every micro-batch reduces over shards, which saves memory; only replicas wait for the last.
    With `keeps`, gathered weights stay until the last micro-batch of the step.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(wanted)
    model.set_reshard_after_backward(wanted or not keeps)
    if each:
        model.set_requires_all_reduce(wanted)
    else:
        model.set_requires_gradient_sync(wanted)


def reshard_weights(model: nn.Module) -> None:
    """Free gathered weights after a forward pass without backward; the next update would outdate them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
