"""Triton kernels for GPUs, each with a measured gain (docs/log.md) and a PyTorch reference for other devices.

Modules that import Triton are loaded by `kernels(name)`: Triton is installed with GPU builds only.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")

# bytes; kernels use wide loads for tensors that start at a multiple
ALIGNMENT = 16
_enabled = True
# a constant, because the compiler warns of a cached function
_HAS_TRITON = find_spec("triton") is not None


def enable_kernels(enabled: bool) -> None:
    """Turn the kernels on or off for the rest of the process."""
    global _enabled
    _enabled = enabled


def usable_on(device: torch.device) -> bool:
    return _enabled and device.type == "cuda" and _HAS_TRITON


def usable(tensor: Tensor) -> bool:
    return usable_on(tensor.device)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous and aligned; a slice of another tensor may not be."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Group items by key; each group is one kernel launch."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


@cache
def kernels(name: str) -> ModuleType:
    """Import a module of this package; call it only where kernels are usable."""
    return import_module(f"arriero.kernels.{name}")


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function of tensors as an operator that the compiler looks into.

    The compiler launches the operator's Triton kernels itself, and under activation checkpointing recomputes
    only the parts it needs. A call of an opaque operator takes 100 us of Python.
    """

    def register(function: Callable[..., Any]) -> Any:
        if _HAS_TRITON:
            return torch.library.triton_op(name, function, mutates_args=())
        made = torch.library.custom_op(name, function, mutates_args=())
        made.register_fake(function)
        return made

    return register
