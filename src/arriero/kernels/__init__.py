"""What is worth a kernel of its own on a GPU. Each has a twin in plain PyTorch, which other devices use."""

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")

# bytes that are read at once
LINE = 16
_wanted = True


def want(kernels: bool) -> None:
    """For all that this process computes from here on."""
    global _wanted
    _wanted = kernels


def usable_on(device: torch.device) -> bool:
    return _wanted and device.type == "cuda" and _has_triton()


def usable(tensor: Tensor) -> bool:
    return usable_on(tensor.device)


def in_line(tensor: Tensor) -> bool:
    """Contiguous from the start of a line on, as kernels read it; a slice of another tensor may not be."""
    return tensor.is_contiguous() and tensor.data_ptr() % LINE == 0


def alike(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[list[Item]]:
    """In lists of one kind each: what is in one list goes into one launch."""
    lists: dict[Hashable, list[Item]] = {}
    for item in items:
        lists.setdefault(kind(item), []).append(item)
    return list(lists.values())


@cache
def kernels(name: str) -> ModuleType:
    """The module of that name here; asked for only where it is usable, as Triton comes with GPUs alone."""
    return import_module(f"arriero.kernels.{name}")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
