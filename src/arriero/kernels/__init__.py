"""What is worth a kernel of its own on a GPU. Each has a twin in plain PyTorch, which other devices use."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def usable(tensor: Tensor) -> bool:
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
