"""What a block keeps for its backward pass: all, some to be computed again, or all of it in host memory."""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from arriero.config.fields import ActivationCheckpointing, evenly
from arriero.kernels import float8 as _float8  # noqa: F401 - names its operations
from arriero.model.language_model import LanguageModel
from arriero.parallel.offload import Offloaded

_MATMULS = ("mm", "addmm", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
_COLLECTIVES = ("reduce_scatter_tensor", "all_to_all_single")
# float8 scales by it: a pass over the whole tensor for one number
_REDUCTIONS = ("max",)


def apply_activation_checkpointing(
    model: LanguageModel, checkpointing: ActivationCheckpointing, layers: int, offload: bool | float = False
) -> None:
    """`layers` are those of the whole model, of which this may be a part; `offload` is a share of them."""
    # of the whole process: a run after one with a budget must not inherit it
    budget = float(checkpointing.amount) if checkpointing.kind == "budget" else 1.0
    torch._functorch.config.activation_memory_budget = budget
    chosen, leaving = checkpointing.blocks(layers), evenly(Fraction(offload), layers)
    for name, block in model.blocks.items():
        if int(name) in chosen:
            model.blocks[name] = _checkpointed(block, checkpointing)
        if int(name) in leaving:
            model.blocks[name] = Offloaded(model.blocks[name])


def _checkpointed(block: nn.Module, checkpointing: ActivationCheckpointing) -> nn.Module:
    # nothing in a block is drawn by lot, so there is no random state to bring back
    options: dict[str, Any] = {"preserve_rng_state": False}
    if checkpointing.is_selective:
        options["context_fn"] = partial(_selective_contexts, checkpointing.kind == "selective")
    return checkpoint_wrapper(block, **options)


def _selective_contexts(matmuls: bool) -> Any:
    """TensorRule anew for each forward pass of a block, whose matmuls are counted from the first."""
    return create_selective_checkpoint_contexts(_Selection(matmuls))


class _Selection:
    """Keeps what costs most to make: attention, what came over the network, and if wanted every second
    matmul."""

    def __init__(self, matmuls: bool) -> None:
        self._keeps_matmuls = matmuls
        self._matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keeps = operation in _KEPT
        if operation in _COUNTED:
            self._matmuls[context.is_recompute] += 1
            keeps = self._keeps_matmuls and self._matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _operations(library: Any, names: Iterable[str]) -> Iterator[Any]:
    """Those this torch has; their sets differ between releases and builds."""
    for name in names:
        if packet := getattr(library, name, None):
            yield from (getattr(packet, overload) for overload in packet.overloads() if overload == "default")


_COUNTED = frozenset(
    [*_operations(torch.ops.aten, _MATMULS), *_operations(torch.ops.arriero, ("float8_linears",))]
)
_KEPT = frozenset(
    [
        *_operations(torch.ops.aten, (*_ATTENTION, *_REDUCTIONS)),
        *_operations(torch.ops._c10d_functional, _COLLECTIVES),
        *filter(None, [getattr(torch.ops.higher_order, "flex_attention", None)]),
    ]
)
