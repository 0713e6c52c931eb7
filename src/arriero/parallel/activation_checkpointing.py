"""Activation checkpointing and activation offload: what a block keeps for its backward pass.

A block keeps all activations, recomputes some or all of them, or has them offloaded to CPU memory. Private
torch APIs used here, tested with 2.11 and 2.13: `_checkpoint.checkpoint_wrapper`, `_functorch.config`,
`_functional_collectives`, `_python_dispatch`, `_pytree`, `_cdata`, `_version`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from arriero.config.fields import ActivationCheckpointing, BlockMode, evenly
from arriero.kernels import float8 as _float8  # noqa: F401 - registers the operators named below
from arriero.model.language_model import LanguageModel

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
# float8 scales: one number for a pass over a whole tensor
_REDUCTIONS = ("max",)


def apply_activation_checkpointing(
    model: LanguageModel,
    checkpointing: ActivationCheckpointing,
    layers: int,
    offload: bool | float = False,
    keeps_rng: bool = False,
) -> None:
    """Wrap the blocks that recompute activations, and those that offload them.

    `layers` is the number of blocks of the whole model, and `offload` the fraction of them to offload. Blocks
    that draw random numbers need `keeps_rng`.
    """
    # set for every run, because it belongs to the process
    budget = float(checkpointing.amount) if checkpointing.kind == "budget" else 1.0
    torch._functorch.config.activation_memory_budget = budget
    modes, offloaded = checkpointing.modes(layers), evenly(Fraction(offload), layers)
    for name, block in model.blocks.items():
        if modes[int(name)] != "none":
            model.blocks[name] = _checkpointed(block, modes[int(name)], keeps_rng)
        if int(name) in offloaded:
            model.blocks[name] = OffloadedActivations(model.blocks[name])


def _checkpointed(block: nn.Module, mode: BlockMode, keeps_rng: bool) -> nn.Module:
    options: dict[str, Any] = {"preserve_rng_state": keeps_rng}
    if mode != "full":
        options["context_fn"] = partial(_selective_contexts, mode == "selective")
    return checkpoint_wrapper(block, **options)


def _selective_contexts(matmuls: bool) -> Any:
    """Create the contexts of one forward pass of a block, with a new count of its matmuls."""
    return create_selective_checkpoint_contexts(_SelectivePolicy(matmuls))


class _SelectivePolicy:
    """Keep what is expensive to recompute: attention, results of collectives, and optionally every second
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
    """Yield the operators that this build of torch has."""
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

# The last group that was offloaded. Backward asks for groups in reverse order; where a pipeline schedule does
# not, a group is prefetched early.
_last: "dict[torch.device, ref[OffloadGroup]]" = {}


class OffloadedActivations(ActivationWrapper):
    """Offload to CPU memory what a module saves for backward. Parameters and all arguments but the first stay
    on the device, because others hold them anyway."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        # only the module inside is compiled, because saved-tensor hooks run in eager code
        self._checkpoint_wrapped_module.compile(*args, **kwargs)

    def forward(self, x: Tensor, *others: Any) -> Any:
        kept = (*self.parameters(), *tree_leaves(others))
        group = OffloadGroup(
            {_storage(part) for tensor in kept for part in _plain_tensors(tensor)}, _last.get(x.device)
        )
        _last[x.device] = ref(group)
        try:
            with saved_tensors_hooks(group.pack, _unpack):
                return self._checkpoint_wrapped_module(x, *others)
        finally:
            group.close()


class OffloadedTensor:
    """A tensor in CPU memory. It is copied back for its first user in backward and released by its last."""

    def __init__(self, tensor: Tensor, group: "OffloadGroup") -> None:
        self.users = 0
        self._group = group
        self._served = 0
        self.on_device: Tensor | None = None
        self._device = tensor.device
        self._offloaded: Any = None
        self._returned: Any = None
        if tensor.device.type == "cpu":
            self._on_host = tensor.detach().clone()
            return
        self._on_host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        stream = _copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._on_host.copy_(tensor.detach(), non_blocking=True)
            self._offloaded = stream.record_event()
        tensor.record_stream(stream)

    def prefetch(self) -> None:
        if self.on_device is not None:
            return
        if self._offloaded is None:
            self.on_device = self._on_host.to(self._device)
            return
        stream = _copy_stream(self._device)
        with torch.cuda.stream(stream):
            self.on_device = self._on_host.to(self._device, non_blocking=True)
            self._returned = stream.record_event()

    def fetch(self) -> Tensor:
        self._group.prefetch()
        self.prefetch()
        tensor = self.on_device
        assert tensor is not None
        if self._returned is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(self._returned)
            tensor.record_stream(now)
        self._served += 1
        if self._served % self.users == 0:
            self.on_device = None
        return tensor


@dataclass(frozen=True)
class _Subclass:
    """A tensor subclass such as DTensor, whose plain inner tensors are offloaded."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    size: Any
    stride: Any


class OffloadGroup:
    """The tensors that one forward pass of a module saves; one that several operations save is copied once.

    The first that is fetched prefetches the rest, and the group that was offloaded `before`, which backward
    needs next.
    """

    def __init__(self, kept: set[int], before: "ref[OffloadGroup] | None") -> None:
        self._kept = kept
        self._before = before
        self._tensors: list[ref[OffloadedTensor]] = []
        self._packed: dict[tuple[Any, ...], tuple[Tensor, OffloadedTensor]] = {}

    def pack(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            # some releases list the mesh among the parts of a DTensor
            return tensor
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: self.pack(getattr(tensor, name)) for name in names}
            return _Subclass(type(tensor), parts, context, tensor.size(), tensor.stride())
        if _storage(tensor) in self._kept:
            return tensor
        view = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (*view, tensor._version)
        if key not in self._packed:
            # the tensor is held until the pass ends, so that no other gets its memory and its key
            self._packed[key] = (tensor, OffloadedTensor(tensor, self))
            self._tensors.append(ref(self._packed[key][1]))
        offloaded = self._packed[key][1]
        offloaded.users += 1
        return offloaded

    def prefetch(self) -> None:
        """Copy this group and the one before it back, on the first call."""
        before, self._before = self._before, None
        for group in (self, before() if before else None):
            if group is not None:
                group.prefetch_all()

    def prefetch_all(self) -> None:
        for reference in self._tensors:
            if (tensor := reference()) is not None:
                tensor.prefetch()
        self._tensors.clear()

    def close(self) -> None:
        """Release the tensors: the autograd graph may hold the hooks, and these must not hold tensors."""
        self._packed.clear()


def _unpack(packed: Any) -> Any:
    if isinstance(packed, OffloadedTensor):
        return packed.fetch()
    if not isinstance(packed, _Subclass):
        return packed
    parts = {name: _unpack(part) for name, part in packed.parts.items()}
    return packed.kind.__tensor_unflatten__(parts, packed.context, packed.size, packed.stride)


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors in a tensor or tensor subclass; nothing for other values."""
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
