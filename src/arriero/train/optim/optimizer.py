"""The optimizer of a run: gradients in, weights updated, whatever the precision and the layout of either."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from arriero.checkpoint.lazily import OneByOne
from arriero.config.schema import OptimSection
from arriero.model.init import plain_name
from arriero.parallel.dtensor import from_local, local_part, redistribute_like
from arriero.train.optim.adamw import AdamW
from arriero.train.optim.clip import factor_within, global_norm
from arriero.train.optim.masters import Masters
from arriero.train.optim.muon import Muon
from arriero.train.optim.rounding import Noise
from arriero.train.optim.scaling import LossScale
from arriero.train.optim.sgd import Sgd
from arriero.train.optim.states import Moment
from arriero.train.optim.weight import Update, Weight
from arriero.train.ranges import OPTIMIZER

OWN = "optimizer"


def named_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of a model, or of the parts of it that are here, as the whole model calls them."""
    return {plain_name(name): p for part in parts for name, p in part.named_parameters()}


class Optimizer:
    """Parameters in fp32 are updated as they are; in bf16, with stochastic rounding.

    `masters_of`: the parameters are fp32 and become this type; the optimizer keeps the rest of their bits.
    `groups`: ranks that hold other parameters, over which the norm is summed too (a pipeline's stages).
    `copies`: parameters that repeat one of another name (the head of a tied model, on the pipeline's last
    stage): they count once in the norm, and go by that name in checkpoints. `join` sums their gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimSection,
        *,
        masters_of: torch.dtype | None = None,
        scaled_loss: bool = False,
        seed: int = 0,
        groups: Sequence[ProcessGroup] = (),
        copies: Mapping[str, str] | None = None,
        join: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> None:
        self.clip = config.clip
        self.attempts = 0
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._groups, self._copies, self._join = groups, copies or {}, join
        self._scale = LossScale() if scaled_loss else None
        self._masters = masters = Masters(self._parameters, masters_of) if masters_of else None
        self._weights = {
            name: Weight(
                self._copies.get(name, name),
                parameter,
                config.weight_decay if parameter.ndim > 1 else 0.0,
                masters.low.get(name) if masters else None,
                masters.shadows.get(name) if masters else None,
            )
            for name, parameter in self._parameters.items()
        }
        self._device = next(iter(self._weights.values())).local.device
        self.taken = torch.zeros((), dtype=torch.int64, device=self._device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=self._device)
        self._rules = _rules(self._weights, config, Noise(seed, self._device))

    @property
    def loss_scale(self) -> float:
        """What to multiply the loss by before going backward."""
        return self._scale.value if self._scale else 1.0

    @property
    def steps(self) -> int:
        """Updates that changed the weights. Waits for the device, where `taken` is the same number."""
        return int(self.taken)

    @property
    def skipped(self) -> int:
        return self.attempts - self.steps

    @torch.no_grad()
    @record_function(OPTIMIZER)
    def step(self, lr: float, loss: Tensor | None = None) -> Tensor:
        """Clip, update, drop the gradients. Returns the gradient norm before clipping.

        Where the norm or the loss is not finite nothing changes: weights, state and step count stay. This is
        decided on the device, alike on all ranks, since both numbers are global.
        """
        gradients = self._take_gradients()
        if self._join is not None:
            self._join(gradients)
        counted = [g for name, g in gradients.items() if name not in self._copies]
        empty = torch.empty(0, device=self._device)
        scaled_by = self.loss_scale
        norm = global_norm([*counted, empty], self._groups) / scaled_by
        accepted = norm.isfinite()
        if loss is not None:
            accepted &= loss.to(norm.device).isfinite()
        if self._scale:
            self._scale.saw(finite=bool(accepted))
        factor = factor_within(norm, self.clip) if self.clip else torch.ones_like(norm)
        self.attempts += 1
        self.taken += accepted
        self.skipped_in_a_row.add_(1).mul_(~accepted)
        # a skipped first update has taken none, and its bias correction divides by zero: its result is unused
        update = Update(lr, factor / scaled_by, accepted, self.taken, self.attempts)
        local = {name: local_part(gradient) for name, gradient in gradients.items()}
        for rule in self._rules:
            rule.step(local, update)
        return norm

    def _take_gradients(self) -> dict[str, Tensor]:
        if self._masters:
            found = self._masters.take_gradients()
        else:
            found = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            for parameter in self._parameters.values():
                parameter.grad = None
        return {name: redistribute_like(g, self._weights[name].parameter) for name, g in found.items()}

    def weights(self) -> Mapping[str, Tensor]:
        """The model's parameters with all their bits, by their name in checkpoints; not copies. Each is put
        together when it is asked for."""
        return OneByOne({weight.known_as: weight.kept for weight in self._weights.values()})

    @torch.no_grad()
    def load_weight(self, known_as: str, kept: Tensor) -> None:
        for weight in self._weights.values():
            if weight.known_as == known_as:
                weight.load(kept)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """By parameter, what is remembered about it, placed as it is; under 'optimizer' the counters.

        Read back by `load_moment` on any layout; on the same one a run goes on to the bit.
        """
        state: dict[str, Mapping[str, Tensor]] = {}
        for rule in self._rules:
            for name, moments in rule.moments.items():
                weight = self._weights[name]
                makers = {kind: partial(_placed, moment, weight) for kind, moment in moments.items()}
                state[weight.known_as] = OneByOne(makers)
        counters = {"step": torch.tensor(self.steps)}
        if self._scale:
            counters["loss_scale"] = torch.tensor(self._scale.value, dtype=torch.float64)
            counters["good_steps"] = torch.tensor(self._scale.good_steps)
            counters["skipped"] = torch.tensor(self.skipped)
        return state | {OWN: counters}

    @torch.no_grad()
    def load_moment(self, known_as: str, kind: str, values: Tensor) -> None:
        """One of what `state` tells: of a parameter, or of the counters."""
        if known_as == OWN:
            self._load_counter(kind, values)
        for rule in self._rules:
            for name, moments in rule.moments.items():
                weight = self._weights[name]
                if weight.known_as == known_as:
                    moments[kind].load(local_part(redistribute_like(values, weight.parameter)))

    def _load_counter(self, kind: str, value: Tensor) -> None:
        if kind == "step":
            self.attempts = int(value)
            self.taken.fill_(int(value))
        elif self._scale and kind == "loss_scale":
            self._scale.value = float(value)
        elif self._scale and kind == "good_steps":
            self._scale.good_steps = int(value)


@torch.no_grad()
def _placed(moment: Moment, weight: Weight) -> Tensor:
    return from_local(moment.values(), weight.parameter)


def _rules(weights: Mapping[str, Weight], config: OptimSection, noise: Noise) -> list[AdamW | Muon | Sgd]:
    """Muon takes the matrices inside blocks; embeddings, head, norms and biases stay with AdamW."""
    if config.name == "sgd":
        return [Sgd(weights, config, noise)]
    hidden = {
        name: weight
        for name, weight in weights.items()
        if config.name == "muon" and name.startswith("blocks.") and weight.parameter.ndim == 2
    }
    others = {name: weight for name, weight in weights.items() if name not in hidden}
    muon = [Muon(hidden, config, noise)] if hidden else []
    return [*muon, AdamW(others, config, noise)]
