"""AdamW: torch's fused kernel where all is fp32, else an element-wise update over stored moments."""

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from arriero.config.schema import OptimSection
from arriero.train.optim.rounding import Noise, high_half, low_half
from arriero.train.optim.states import SIGNED, UNSIGNED, Format, Moment
from arriero.train.optim.weight import Weight, write


class AdamW:
    def __init__(self, weights: Mapping[str, Weight], config: OptimSection, noise: Noise) -> None:
        self._weights, self._noise = weights, noise
        (self._beta1, self._beta2), self._eps = config.betas, config.eps
        first, second = SIGNED[config.state], UNSIGNED[config.state]
        self.moments = {
            name: {"exp_avg": Moment(first, weight.local), "exp_avg_sq": Moment(second, weight.local)}
            for name, weight in weights.items()
        }
        self._plain = config.state == "fp32" and not any(weight.rounds for weight in weights.values())

    def step(self, gradients: Mapping[str, Tensor], lr: float, step: int) -> None:
        """`gradients` are local; names of other rules' weights are passed over."""
        names = [name for name in self._weights if name in gradients and gradients[name].numel()]
        if self._plain:
            for decay in dict.fromkeys(self._weights[name].decay for name in names):
                chosen = [name for name in names if self._weights[name].decay == decay]
                self._fused(chosen, gradients, lr, step, decay)
            return
        for name in names:
            self._one(name, gradients[name], lr, step)

    def _fused(self, names: list[str], gradients: Mapping[str, Tensor], lr: float, step: int, decay: float):
        counter = torch.full((), float(step), device=gradients[names[0]].device)
        torch._fused_adamw_(
            [self._weights[name].local for name in names],
            [gradients[name].to(torch.float32) for name in names],
            [self.moments[name]["exp_avg"].values() for name in names],
            [self.moments[name]["exp_avg_sq"].values() for name in names],
            [],
            [counter] * len(names),
            lr=lr,
            beta1=self._beta1,
            beta2=self._beta2,
            weight_decay=decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )

    def _one(self, name: str, gradient: Tensor, lr: float, step: int) -> None:
        weight = self._weights[name]
        first, second = self.moments[name]["exp_avg"], self.moments[name]["exp_avg_sq"]
        numbers = (
            1 - lr * weight.decay,
            lr / (1 - self._beta1**step),
            (1 - self._beta2**step) ** -0.5,
        )
        local = weight.local
        update = in_place if gradient.device.type == "cpu" else _compiled()
        # flat and no views, since each number of dimensions, here or of a base, would be a new compilation
        flat = local.reshape(-1).data
        update(
            flat,
            gradient.reshape(-1).data,
            first.stored,
            second.stored,
            first.format,
            second.format,
            weight.bits(self._noise, step, "moments") if first.format.rounds else None,
            weight.bits(self._noise, step, "weight") if weight.rounds else None,
            # tensors, for the same reason
            [torch.full((), number, device=gradient.device) for number in numbers],
            self._beta1,
            self._beta2,
            self._eps,
        )
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))


@cache
def _compiled():
    return torch.compile(in_place)


@torch.no_grad()
def in_place(
    weight: Tensor,
    gradient: Tensor,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    first_format: Format,
    second_format: Format,
    moment_bits: Tensor | None,
    weight_bits: Tensor | None,
    numbers: Sequence[Tensor],
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    count = gradient.numel()
    values, m, v = adamw(
        weight.float(),
        gradient.float(),
        first_format.read(first, count),
        second_format.read(second, count),
        numbers,
        beta1,
        beta2,
        eps,
    )
    first_half = None if moment_bits is None else low_half(moment_bits)
    second_half = None if moment_bits is None else high_half(moment_bits)
    _copy(first, first_format.write(m, first_half))
    _copy(second, second_format.write(v, second_half))
    write(weight, values, weight_bits)


def adamw(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, numbers: Sequence[Tensor], beta1, beta2, eps
) -> tuple[Tensor, Tensor, Tensor]:
    """`numbers`: what decay leaves, the rate over the bias of m, one over the root of that of v."""
    left, rate, unbias = numbers
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient * gradient
    return weight * left - rate * m / (v.sqrt() * unbias + eps), m, v


def _copy(stored: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    for mine, written in zip(stored, new, strict=True):
        mine.copy_(written)
