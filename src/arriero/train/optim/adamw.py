"""AdamW: on a GPU one kernel for all parameters; elsewhere, and for moments in eight bits, one at a time."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from arriero.config.schema import OptimSection
from arriero.kernels import grouped, is_aligned, kernels, usable
from arriero.train.optim.rounding import (
    Noise,
    high_half,
    joined,
    low_half,
    random_bits,
    split,
    third_half,
    to_bf16,
)
from arriero.train.optim.states import SIGNED, UNSIGNED, Format, Moment, Plain
from arriero.train.optim.weight import Update, Weight, store


class AdamW:
    def __init__(self, weights: Mapping[str, Weight], config: OptimSection, noise: Noise) -> None:
        self._weights, self._noise = weights, noise
        (self._beta1, self._beta2), self._eps = config.betas, config.eps
        first, second = SIGNED[config.state], UNSIGNED[config.state]
        self.moments = {
            name: {"exp_avg": Moment(first, weight.local), "exp_avg_sq": Moment(second, weight.local)}
            for name, weight in weights.items()
        }
        self._known: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        self._plain = isinstance(first, Plain) and isinstance(second, Plain)
        self._exact = config.state == "fp32" and all(
            weight.parameter.dtype == torch.float32 for weight in weights.values()
        )

    def step(self, gradients: Mapping[str, Tensor], update: Update) -> None:
        """`gradients` are local; those of parameters that another rule updates are ignored."""
        names = [name for name in self._weights if name in gradients and gradients[name].numel()]
        if held := self._for_kernel(names, update.factor):
            scalars = self._scalars(update)
            for together in grouped(names, lambda name: _kind(held[name], gradients[name])):
                self._at_once(together, held, gradients, update, scalars)
        elif self._exact:
            for together in grouped(names, lambda name: self._weights[name].decay):
                self._by_torch(together, gradients, update)
        else:
            scalars = self._scalars(update)
            for name in names:
                self._one(name, gradients[name], update, scalars)

    def _for_kernel(self, names: Sequence[str], factor: Tensor) -> dict[str, Tensor] | None:
        """The weights as they are here, if the kernel takes them all."""
        if not self._plain or not usable(factor):
            return None
        held = {name: self._weights[name].local for name in names}
        shadowed = any(self._weights[name].shadow is not None for name in names)
        return held if not shadowed and all(local.is_contiguous() for local in held.values()) else None

    def _at_once(
        self,
        names: list[str],
        held: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        update: Update,
        scalars: Tensor,
    ) -> None:
        kernel = kernels("multi_tensor")
        lows = [self._weights[name].low for name in names]
        moments = [self.moments[name] for name in names]
        decays, keys = self._constants(tuple(names))
        parameters = kernel.Parameters(
            weights=[held[name] for name in names],
            lows=[low for low in lows if low is not None],
            gradients=[gradients[name].contiguous() for name in names],
            first=[moment["exp_avg"].stored[0] for moment in moments],
            second=[moment["exp_avg_sq"].stored[0] for moment in moments],
            decays=decays,
            keys=keys,
        )
        betas = (self._beta1, 1 - self._beta1, self._beta2, 1 - self._beta2)
        rates = kernel.Rates(update.lr, *betas, self._eps)
        kernel.adamw_(parameters, rates, scalars, self._noise.step_key(update.number))

    def _constants(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Decay and key of each parameter, on the device."""
        if names not in self._known:
            weights = [self._weights[name] for name in names]
            keys = torch.stack([weight.key(self._noise) for weight in weights])
            decays = torch.tensor([weight.decay for weight in weights], device=keys.device)
            self._known[names] = decays, keys
        return self._known[names]

    def _scalars(self, update: Update) -> Tensor:
        """fp32 on the device: gradient factor, learning rate over the bias of the first moment, one over the
        root of the second moment's bias, and 1 if the update is accepted."""
        taken = update.taken.double()
        rate = update.lr / (1 - self._beta1**taken)
        unbias = (1 - self._beta2**taken) ** -0.5
        return torch.stack([update.factor.double(), rate, unbias, update.accepted.double()]).float()

    def _by_torch(self, names: list[str], gradients: Mapping[str, Tensor], update: Update) -> None:
        scaled = [gradients[name] for name in names]
        torch._foreach_mul_(scaled, update.factor)
        torch._fused_adamw_(
            [self._weights[name].local for name in names],
            scaled,
            [self.moments[name]["exp_avg"].values() for name in names],
            [self.moments[name]["exp_avg_sq"].values() for name in names],
            [],
            [update.taken.float()] * len(names),
            lr=update.lr,
            beta1=self._beta1,
            beta2=self._beta2,
            weight_decay=self._weights[names[0]].decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            found_inf=(~update.accepted).float(),
        )

    def _one(self, name: str, gradient: Tensor, update: Update, scalars: Tensor) -> None:
        weight = self._weights[name]
        first, second = self.moments[name]["exp_avg"], self.moments[name]["exp_avg_sq"]
        device = gradient.device
        change = in_place if device.type == "cpu" else _compiled()
        local = weight.local
        # flat and no views, since each number of dimensions, here or of a base, would be a new compilation
        flat = (local if weight.shadow is None else weight.shadow).reshape(-1).data
        change(
            flat,
            None if weight.low is None else weight.low.reshape(-1).data,
            gradient.reshape(-1).data,
            first.stored,
            second.stored,
            first.format,
            second.format,
            weight.key(self._noise) if weight.rounds or first.format.rounds else None,
            torch.full((), self._noise.step_key(update.number), dtype=torch.int32, device=device),
            # tensors, for the same reason
            torch.full((), 1 - update.lr * weight.decay, device=device),
            scalars,
            self._beta1,
            self._beta2,
            self._eps,
        )
        if weight.shadow is not None or not local.is_contiguous():
            local.copy_(flat.view(local.shape))


def _kind(local: Tensor, gradient: Tensor) -> tuple[Any, ...]:
    """What the kernel must know of a parameter before it is compiled."""
    return local.dtype, gradient.dtype, is_aligned(local) and is_aligned(gradient)


@cache
def _compiled():
    return torch.compile(in_place)


@torch.no_grad()
def in_place(
    weight: Tensor,
    low: Tensor | None,
    gradient: Tensor,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    first_format: Format,
    second_format: Format,
    key: Tensor | None,
    step_key: Tensor,
    left: Tensor,
    scalars: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """`left` is what weight decay leaves of the weight. A key is given where anything is stochastically
    rounded."""
    count = gradient.numel()
    factor, rate, unbias, accepted = scalars.unbind()
    taken = accepted > 0
    values, m, v = adamw(
        weight.float() if low is None else joined(weight, low),
        gradient.float() * factor,
        first_format.read(first, count),
        second_format.read(second, count),
        (left, rate, unbias),
        beta1,
        beta2,
        eps,
    )
    bits = None if key is None else random_bits(key, step_key, count)
    _store_all(first, first_format.write(m, None if bits is None else low_half(bits)), taken)
    _store_all(second, second_format.write(v, None if bits is None else high_half(bits)), taken)
    if low is not None:
        upper, lower = split(values)
        store(low, lower, taken)
        store(weight, upper, taken)
    elif bits is not None and weight.dtype == torch.bfloat16:
        store(weight, to_bf16(values, third_half(bits)), taken)
    else:
        store(weight, values.to(weight.dtype), taken)


def adamw(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, rates: Sequence[Tensor], beta1, beta2, eps
) -> tuple[Tensor, Tensor, Tensor]:
    """`rates`: what decay leaves, the rate over the bias of m, one over the root of that of v."""
    left, rate, unbias = rates
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient * gradient
    return weight * left - rate * m / (v.sqrt() * unbias + eps), m, v


def _store_all(stored: Sequence[Tensor], new: Sequence[Tensor], accepted: Tensor) -> None:
    for mine, written in zip(stored, new, strict=True):
        store(mine, written, accepted)
