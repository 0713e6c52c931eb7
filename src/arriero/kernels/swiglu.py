"""silu(gate) x up, of gate and up side by side in one matrix.

The compiler makes as good a kernel of it forward; backward it reads everything twice to write the halves of
one matrix.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from arriero.kernels import kernels, usable

_BLOCK = 4096
_WARPS = 8


def swiglu(y: Tensor) -> Tensor:
    if usable(y):
        return torch.ops.arriero.swiglu(y.contiguous())
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


@torch.library.custom_op("arriero::swiglu", mutates_args=())
def _swiglu(y: Tensor) -> Tensor:
    h = y.new_empty(*y.shape[:-1], y.shape[-1] // 2)
    launch = kernels("swiglu_triton").swiglu_forward[_grid(h)]
    launch(y, h, h.shape[-1], BLOCK=_BLOCK, num_warps=_WARPS)
    return h


@torch.library.custom_op("arriero::swiglu_backward", mutates_args=())
def _swiglu_backward(gradient: Tensor, y: Tensor) -> Tensor:
    y_grad = torch.empty_like(y)
    launch = kernels("swiglu_triton").swiglu_backward[_grid(gradient)]
    launch(gradient, y, y_grad, gradient.shape[-1], BLOCK=_BLOCK, num_warps=_WARPS)
    return y_grad


@_swiglu.register_fake
def _(y):
    return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)


@_swiglu_backward.register_fake
def _(gradient, y):  # noqa: ARG001
    return torch.empty_like(y)


def _keep(ctx, inputs, output) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):
    return torch.ops.arriero.swiglu_backward(gradient.contiguous(), *ctx.saved_tensors)


_swiglu.register_autograd(_backward, setup_context=_keep)


def _grid(h: Tensor) -> tuple[int, int]:
    width = h.shape[-1]
    return h.numel() // width, -(-width // _BLOCK)
