"""Sharded and replicated data parallelism, by FSDP2 block by block."""

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
    """`reshard`: True frees gathered weights after forward (ZeRO-3), False keeps them (ZeRO-2), a number
    keeps them sharded over groups of so many ranks."""

    compute: torch.dtype
    reduce: torch.dtype
    reshard: bool | int
    prefetch: int
    offload: bool


def shard_weights(model: LanguageModel, mesh: Mesh, sharding: Sharding, on_gpu: bool) -> None:
    """Embedding, each block, and norm with head are gathered apart; a tied table belongs to the whole."""
    common = {
        "mesh": mesh.fsdp,
        # inputs stay as they are: rotary angles are fp32 for a reason
        "mp_policy": MixedPrecisionPolicy(sharding.compute, sharding.reduce, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if sharding.offload else OffloadPolicy(),
    }
    tied = model.spec.tied and model.embedding is not None and model.head is not None
    if model.embedding is not None and not tied:
        fully_shard(model.embedding, reshard_after_forward=sharding.reshard, **common)
    for block in model.blocks.values():
        fully_shard(block, reshard_after_forward=sharding.reshard, **common)
    if model.norm is not None and model.head is not None and not tied:
        # backward begins with them: freeing them first would be for nothing
        fully_shard([model.norm, model.head], reshard_after_forward=False, **common)
    fully_shard(model, reshard_after_forward=False, **common)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # each rank's loss is already divided by the labels of all
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch(model.blocks.values(), sharding.prefetch)


def _prefetch(modules: Iterable[nn.Module], ahead: int) -> None:
    blocks: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])


def synchronize_gradients(model: nn.Module, wanted: bool, each: bool) -> None:
    """Whether the next backward reduces gradients over ranks. With `each`, shards are reduced at every
    micro-batch, which saves memory, and only copies wait for the last."""
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(wanted)
    if each:
        model.set_requires_all_reduce(wanted)
    else:
        model.set_requires_gradient_sync(wanted)


def release(model: nn.Module) -> None:
    """Give gathered weights back after a forward without backward: kept, they would go stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
