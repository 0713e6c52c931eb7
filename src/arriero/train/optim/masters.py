"""Weights that the model holds in fewer bits than training needs, and fp32 sums of their gradients."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arriero.parallel.dtensor import from_local, local_part, redistribute_like
from arriero.train.optim.rounding import split


class Masters:
    """In bf16 the model computes with the upper halves of the fp32 weights; `low` are the lower, so that both
    together are as large as fp32 alone. In fp16, which is no half of it, `shadows` are the fp32 weights."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        """Casts the parameters in place; each gives its gradient away as soon as it has one."""
        self._parameters = parameters
        self._gradients: dict[str, Tensor] = {}
        self.low: dict[str, Tensor] = {}
        self.shadows: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            exact = local_part(parameter).contiguous()
            if dtype == torch.bfloat16:
                cast, self.low[name] = split(exact)
            else:
                cast, self.shadows[name] = exact.to(dtype), exact.clone()
            # a DTensor's parts live in Python, where `parameter.data = ` does not reach
            torch.utils.swap_tensors(parameter, nn.Parameter(from_local(cast, parameter.detach())))
            parameter.register_post_accumulate_grad_hook(self._gather(name))

    def _gather(self, name: str):
        def hook(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            self._gradients[name] = _sum(self._gradients.get(name), gradient, parameter)

        return hook

    def take_gradients(self) -> dict[str, Tensor]:
        """In the order of the parameters: the one all ranks share. Pipelines that split the backward pass put
        gradients into place themselves, and no hook hears of those."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._gradients[name] = _sum(self._gradients.get(name), parameter.grad, parameter)
                parameter.grad = None
        taken = {name: self._gradients[name] for name in self._parameters if name in self._gradients}
        self._gradients.clear()
        return taken


@torch.no_grad()
def _sum(gathered: Tensor | None, gradient: Tensor, like: Tensor) -> Tensor:
    """A single gradient as it is, several in fp32. Partial sums are added up as such, and reduced once at the
    step: in fp32 too."""
    partial = isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)
    if gathered is None:
        return _fp32(gradient, like) if partial else gradient
    gathered = _fp32(gathered, like)
    if getattr(gathered, "placements", None) != getattr(gradient, "placements", None):
        gathered, gradient = redistribute_like(gathered, like), redistribute_like(gradient, like)
    local_part(gathered).add_(local_part(gradient))
    return gathered


def _fp32(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.dtype == torch.float32:
        return tensor
    placements = tensor.placements if isinstance(tensor, DTensor) else None
    return from_local(local_part(tensor).float(), like, placements)
