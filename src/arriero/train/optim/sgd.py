"""Gradient descent, with momentum if wanted."""

from collections.abc import Mapping

import torch
from torch import Tensor

from arriero.config.schema import OptimSection
from arriero.train.optim.rounding import Noise, low_half
from arriero.train.optim.states import SIGNED, Moment
from arriero.train.optim.weight import Update, Weight


class Sgd:
    def __init__(self, weights: Mapping[str, Weight], config: OptimSection, noise: Noise) -> None:
        self._weights, self._noise = weights, noise
        self._momentum = config.momentum or 0.0
        self.moments: dict[str, dict[str, Moment]] = {
            name: {"momentum": Moment(SIGNED[config.state], weight.local)} if self._momentum else {}
            for name, weight in weights.items()
        }

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], update: Update) -> None:
        for name, weight in self._weights.items():
            if name not in gradients or not gradients[name].numel():
                continue
            gradient = gradients[name].float() * update.factor
            if self._momentum:
                moment = self.moments[name]["momentum"]
                gradient = gathered(moment, gradient, self._momentum, weight, self._noise, update)
            values = weight.values() * (1 - update.lr * weight.decay) - update.lr * gradient
            bits = weight.bits(self._noise, update.number) if weight.rounds else None
            weight.write(values, bits, update.accepted)


def gathered(
    moment: Moment, gradient: Tensor, share: float, weight: Weight, noise: Noise, update: Update
) -> Tensor:
    """The momentum with this gradient in it: as computed, and stored in the precision it has."""
    total = moment.values().float() * share + gradient
    half = low_half(weight.bits(noise, update.number)) if moment.format.rounds else None
    moment.keep(moment.format.write(total.flatten(), half), update.accepted)
    return total
