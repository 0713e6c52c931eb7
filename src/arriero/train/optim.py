"""AdamW over fp32 weights; where the model computes in bf16 the optimizer holds the fp32 masters."""

from collections.abc import Iterable

import torch
from torch import nn

from arriero.config.schema import OptimSection


class Optimizer:
    def __init__(self, model: nn.Module, config: OptimSection, compute: torch.dtype) -> None:
        self.clip = config.clip
        self._names = [name for name, _ in model.named_parameters()]
        self._working = list(model.parameters())
        self._masters = self._working
        if compute != torch.float32:
            self._masters = _masters_of(self._working, compute)
        decayed = [m for m in self._masters if m.ndim > 1]
        plain = [m for m in self._masters if m.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def step(self, lr: float) -> torch.Tensor:
        """Clip, update, forget the gradients. Returns the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self.clip or float("inf"))
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        if self._masters is not self._working:
            self._copy_back()
        return norm

    @torch.no_grad()
    def _copy_back(self) -> None:
        for weight, master in zip(self._working, self._masters, strict=True):
            weight.copy_(master)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's parameters in full precision."""
        return {name: m.detach() for name, m in zip(self._names, self._masters, strict=True)}


def _masters_of(working: Iterable[nn.Parameter], compute: torch.dtype) -> list[nn.Parameter]:
    """Cast the model's weights to the compute type in place; the fp32 copies gather fp32 gradients."""
    masters = []
    for weight in working:
        master = nn.Parameter(weight.detach().clone())
        weight.data = weight.data.to(compute)
        weight.register_post_accumulate_grad_hook(_gather_into(master))
        masters.append(master)
    return masters


def _gather_into(master: nn.Parameter):
    def hook(weight: torch.Tensor) -> None:
        gradient = weight.grad
        assert gradient is not None
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
        weight.grad = None

    return hook
