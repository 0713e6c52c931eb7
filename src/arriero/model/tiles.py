"""A function of single tokens, applied to some of them at a time: what it makes on the way never exists for a
whole sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PerToken = Callable[[Tensor], Tensor]


@torch.compiler.disable
def in_tiles(function: PerToken, x_BTD: Tensor, tokens: int, weights: Sequence[Tensor]) -> Tensor:
    """`function(x)`, `tokens` of each sequence at a time, computed again tile by tile in the backward pass.
    `weights` are the parameters it uses."""
    if not torch.is_grad_enabled():
        return torch.cat([function(tile) for tile in x_BTD.split(tokens, dim=1)], dim=1)
    return _Tiles.apply(function, tokens, x_BTD, *weights)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: PerToken, tokens: int, x_BTD: Tensor, *weights: Tensor) -> Tensor:
        ctx.function, ctx.tokens = function, tokens
        ctx.save_for_backward(x_BTD, *weights)
        y_BTD = torch.empty_like(x_BTD)
        for x, y in zip(x_BTD.split(tokens, dim=1), y_BTD.split(tokens, dim=1), strict=True):
            y.copy_(function(x))
        return y_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        x_BTD, *weights = ctx.saved_tensors
        x_grad = torch.empty_like(x_BTD)
        # in fp32: tiles are many, and each adds little
        sums: list[Tensor] = []
        for x, slope, out in zip(
            *(t.split(ctx.tokens, dim=1) for t in (x_BTD, *grad_outputs, x_grad)), strict=True
        ):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                found, *own = torch.autograd.grad(ctx.function(x), [x, *weights], slope)
            out.copy_(found)
            sums = (
                [g.float() for g in own] if not sums else [a.add_(b) for a, b in zip(sums, own, strict=True)]
            )
        grads = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return None, None, x_grad, *grads
