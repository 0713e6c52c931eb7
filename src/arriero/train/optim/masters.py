"""fp32 copies of weights that the model holds in fewer bits, and fp32 sums of their gradients."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arriero.train.optim.shards import as_placed, local_of, placed


class Masters:
    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        """Casts the parameters in place; each gives its gradient away as soon as it has one."""
        self._parameters = parameters
        self._gradients: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            self.tensors[name] = parameter.detach().clone()
            # a DTensor's parts live in Python, where `parameter.data = ` does not reach
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(dtype)))
            parameter.register_post_accumulate_grad_hook(self._gather(name))

    def _gather(self, name: str):
        def hook(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            self._gradients[name] = _sum(self._gradients.get(name), gradient, self.tensors[name])

        return hook

    def take_gradients(self) -> dict[str, Tensor]:
        """In the order of the parameters: the one all ranks share. Pipelines that split the backward pass put
        gradients into place themselves, and no hook hears of those."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._gradients[name] = _sum(self._gradients.get(name), parameter.grad, self.tensors[name])
                parameter.grad = None
        taken = {name: self._gradients[name] for name in self._parameters if name in self._gradients}
        self._gradients.clear()
        return taken

    @torch.no_grad()
    def copy_back(self) -> None:
        for name, parameter in self._parameters.items():
            local_of(parameter).copy_(local_of(self.tensors[name]))


@torch.no_grad()
def _sum(gathered: Tensor | None, gradient: Tensor, like: Tensor) -> Tensor:
    """In fp32. Partial sums are added up as such, and reduced once at the step."""
    if gathered is None:
        placements = gradient.placements if isinstance(gradient, DTensor) else None
        return placed(local_of(gradient).float(), like, placements)
    if getattr(gathered, "placements", None) != getattr(gradient, "placements", None):
        gathered, gradient = as_placed(gathered, like), as_placed(gradient, like)
    local_of(gathered).add_(local_of(gradient))
    return gathered
