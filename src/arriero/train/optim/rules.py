"""Update rules: AdamW, Muon and SGD. Each updates local parts of weights and keeps their moments."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from arriero.config.schema import OptimSection
from arriero.kernels import grouped, is_aligned, kernels, usable
from arriero.parallel.dtensor import from_local, shard_count, shard_index, shard_of, sharded_dims
from arriero.train.model_state import Weight
from arriero.train.optim.number_formats import (
    SIGNED,
    UNSIGNED,
    Format,
    Moment,
    Noise,
    PlainFormat,
    high_half,
    low_half,
    merge_fp32,
    random_bits,
    split_fp32,
    store,
    store_all,
    third_half,
    to_bf16,
)

_MUON_MOMENTUM = 0.95
# Newton-Schulz iteration of degree five, tuned for speed: singular values end between about 0.7 and 1.2
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class Update:
    """One optimizer step. Tensors are scalars on the device, so that deciding needs no host sync.

    Gradients are multiplied by `factor`. If `accepted` is false, no weight and no state may change. `taken`
    counts the accepted updates including this one; `number` counts all, and keys the random bits.
    """

    lr: float
    factor: Tensor
    accepted: Tensor
    taken: Tensor
    number: int


class GroupRates(NamedTuple):
    """Learning-rate factor and weight decay of a parameter."""

    lr_factor: float
    weight_decay: float


@dataclass(eq=False)
class Rule:
    """`weights` are those that this rule updates, `rates` has the group settings of all weights."""

    weights: Mapping[str, Weight]
    rates: Mapping[str, GroupRates]
    config: OptimSection
    noise: Noise

    def __post_init__(self) -> None:
        self.moments = {name: self._new_moments(weight.local) for name, weight in self.weights.items()}

    def _new_moments(self, like: Tensor) -> dict[str, Moment]:
        """Return the initial state of a parameter."""
        return {"momentum": Moment(SIGNED[self.config.state], like)}

    def step(self, gradients: Mapping[str, Tensor], update: Update) -> None:
        """Update the weights with local gradients; those of other rules' weights are ignored."""
        raise NotImplementedError

    def _apply(self, name: str, direction: Tensor, update: Update, scale: float = 1.0) -> None:
        """Decay the weight and subtract the direction times learning rate and scale."""
        weight, (factor, decay) = self.weights[name], self.rates[name]
        lr = update.lr * factor
        values = weight.values() * (1 - lr * decay) - lr * scale * direction
        bits = weight.noise_bits(self.noise, update.number) if weight.is_rounded else None
        weight.write(values, bits, update.accepted)

    def _add_to_momentum(self, name: str, gradient: Tensor, decay: float, update: Update) -> Tensor:
        """Return the momentum with this gradient added, before it is rounded to its stored precision."""
        moment = self.moments[name]["momentum"]
        total = moment.values().float() * decay + gradient
        half = None
        if moment.format.is_rounded:
            half = low_half(self.weights[name].noise_bits(self.noise, update.number))
        store_all(moment.stored, moment.format.write(total.flatten(), half), update.accepted)
        return total


class Sgd(Rule):
    """Stochastic gradient descent, with or without momentum."""

    def _new_moments(self, like: Tensor) -> dict[str, Moment]:
        return super()._new_moments(like) if self.config.momentum else {}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], update: Update) -> None:
        for name in self.weights:
            if name not in gradients or not gradients[name].numel():
                continue
            gradient = gradients[name].float() * update.factor
            if momentum := self.config.momentum:
                gradient = self._add_to_momentum(name, gradient, momentum, update)
            self._apply(name, gradient, update)


class Muon(Rule):
    """Muon: the update of a matrix is its momentum, made orthogonal by a Newton-Schulz iteration.

    Ranks that share a matrix take turns: each orthogonalises every n-th matrix and broadcasts the result.
    """

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], update: Update) -> None:
        momentum = _MUON_MOMENTUM if self.config.momentum is None else self.config.momentum
        names = [name for name in self.weights if name in gradients]
        done: dict[str, Tensor] = {}
        for turn, name in enumerate(names):
            parameter, gradient = self.weights[name].parameter, gradients[name].float() * update.factor
            nesterov = gradient
            if gradient.numel():
                nesterov = gradient + momentum * self._add_to_momentum(name, gradient, momentum, update)
            whole = from_local(nesterov, parameter)
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            if shard_index(parameter) == turn % shard_count(parameter):
                done[name] = orthogonalize(whole)
        for turn, name in enumerate(names):
            parameter = self.weights[name].parameter
            direction = _broadcast(done.pop(name, None), parameter, turn % shard_count(parameter))
            # the root mean square of an AdamW update is about 0.2
            scale = 0.2 * math.sqrt(max(parameter.shape))
            self._apply(name, shard_of(direction, parameter).float(), update, scale)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the nearest matrix with singular values near one; bf16 on a GPU, for fast matmuls."""
    x = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


def _broadcast(direction: Tensor | None, like: Tensor, source_shard: int) -> Tensor:
    """Send a direction from the rank with that shard to all others, one mesh dimension at a time."""
    if not isinstance(like, DTensor):
        assert direction is not None
        return direction
    mesh, left, source = like.device_mesh, source_shard, {}
    for dim in reversed(sharded_dims(like)):
        left, source[dim] = divmod(left, mesh.size(dim))
    if direction is None:
        dtype = torch.float32 if like.device.type == "cpu" else torch.bfloat16
        direction = torch.empty(like.shape, dtype=dtype, device=like.device)
    direction = direction.contiguous()
    open_dims = list(source)
    while open_dims:
        dim = open_dims.pop()
        if all(mesh.get_local_rank(other) == source[other] for other in open_dims):
            dist.broadcast(direction, group=mesh.get_group(dim), group_src=source[dim])
    return direction


class AdamW(Rule):
    """AdamW: one fused kernel for all parameters on a GPU; elsewhere, and for 8-bit state, one at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        (self._beta1, self._beta2), self._eps = config.betas, config.eps
        self._constants: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        self._plain = isinstance(SIGNED[config.state], PlainFormat)
        self._all_fp32 = config.state == "fp32" and all(
            weight.parameter.dtype == torch.float32 for weight in self.weights.values()
        )

    def _new_moments(self, like: Tensor) -> dict[str, Moment]:
        state = self.config.state
        return {"exp_avg": Moment(SIGNED[state], like), "exp_avg_sq": Moment(UNSIGNED[state], like)}

    def step(self, gradients: Mapping[str, Tensor], update: Update) -> None:
        names = [name for name in self.weights if name in gradients and gradients[name].numel()]
        scalars: dict[float, Tensor] = {}
        if local := self._kernel_weights(names, update.factor):
            for group in grouped(names, lambda name: self._kernel_group(name, local[name], gradients[name])):
                lr = update.lr * self.rates[group[0]].lr_factor
                self._step_by_kernel(group, local, gradients, update, lr, self._scalars(update, lr, scalars))
        elif self._all_fp32:
            for group in grouped(names, lambda name: self.rates[name]):
                self._step_by_torch(group, gradients, update)
        else:
            for name in names:
                lr = update.lr * self.rates[name].lr_factor
                self._step_one(name, gradients[name], update, lr, self._scalars(update, lr, scalars))

    def _kernel_weights(self, names: Sequence[str], factor: Tensor) -> dict[str, Tensor] | None:
        """Return the local weights if the fused kernel supports them all."""
        if not self._plain or not usable(factor):
            return None
        local = {name: self.weights[name].local for name in names}
        has_masters = any(self.weights[name].master is not None for name in names)
        return local if not has_masters and all(part.is_contiguous() for part in local.values()) else None

    def _kernel_group(self, name: str, local: Tensor, gradient: Tensor) -> tuple[Any, ...]:
        """Return what is constant in a launch: the learning rate and what the kernel is compiled for."""
        aligned = is_aligned(local) and is_aligned(gradient)
        return self.rates[name].lr_factor, local.dtype, gradient.dtype, aligned

    def _step_by_kernel(
        self,
        names: list[str],
        local: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        update: Update,
        lr: float,
        scalars: Tensor,
    ) -> None:
        kernel = kernels("multi_tensor")
        lows = [self.weights[name].low for name in names]
        moments = [self.moments[name] for name in names]
        decays, keys = self._constants_of(tuple(names))
        parameters = kernel.Parameters(
            weights=[local[name] for name in names],
            lows=[low for low in lows if low is not None],
            gradients=[gradients[name].contiguous() for name in names],
            first=[moment["exp_avg"].stored[0] for moment in moments],
            second=[moment["exp_avg_sq"].stored[0] for moment in moments],
            decays=decays,
            keys=keys,
        )
        betas = (self._beta1, 1 - self._beta1, self._beta2, 1 - self._beta2)
        rates = kernel.Rates(lr, *betas, self._eps)
        kernel.adamw_(parameters, rates, scalars, self.noise.step_key(update.number))

    def _constants_of(self, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return weight decay and noise key of each parameter, on the device."""
        if names not in self._constants:
            keys = torch.stack([self.weights[name].noise_key(self.noise) for name in names])
            decays = torch.tensor([self.rates[name].weight_decay for name in names], device=keys.device)
            self._constants[names] = decays, keys
        return self._constants[names]

    def _scalars(self, update: Update, lr: float, known: dict[float, Tensor]) -> Tensor:
        """Return four fp32 numbers on the device, computed once per step and learning rate.

        They are the gradient factor, the learning rate over the bias correction of the first moment, one over
        the root of the second moment's, and 1 if the update is accepted.
        """
        if lr not in known:
            taken = update.taken.double()
            rate = lr / (1 - self._beta1**taken)
            unbias = (1 - self._beta2**taken) ** -0.5
            known[lr] = torch.stack([update.factor.double(), rate, unbias, update.accepted.double()]).float()
        return known[lr]

    def _step_by_torch(self, names: list[str], gradients: Mapping[str, Tensor], update: Update) -> None:
        scaled = [gradients[name] for name in names]
        torch._foreach_mul_(scaled, update.factor)
        lr_factor, weight_decay = self.rates[names[0]]
        torch._fused_adamw_(
            [self.weights[name].local for name in names],
            scaled,
            [self.moments[name]["exp_avg"].values() for name in names],
            [self.moments[name]["exp_avg_sq"].values() for name in names],
            [],
            [update.taken.float()] * len(names),
            lr=update.lr * lr_factor,
            beta1=self._beta1,
            beta2=self._beta2,
            weight_decay=weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            found_inf=(~update.accepted).float(),
        )

    def _step_one(self, name: str, gradient: Tensor, update: Update, lr: float, scalars: Tensor) -> None:
        weight = self.weights[name]
        first, second = self.moments[name]["exp_avg"], self.moments[name]["exp_avg_sq"]
        device = gradient.device
        change = adamw_reference_ if device.type == "cpu" else _compiled()
        local = weight.local
        # flat and no views, since each number of dimensions, here or of a base, would be a new compilation
        flat = (local if weight.master is None else weight.master).reshape(-1).data
        change(
            flat,
            None if weight.low is None else weight.low.reshape(-1).data,
            gradient.reshape(-1).data,
            first.stored,
            second.stored,
            first.format,
            second.format,
            weight.noise_key(self.noise) if weight.is_rounded or first.format.is_rounded else None,
            torch.full((), self.noise.step_key(update.number), dtype=torch.int32, device=device),
            # tensors, for the same reason
            torch.full((), 1 - lr * self.rates[name].weight_decay, device=device),
            scalars,
            self._beta1,
            self._beta2,
            self._eps,
        )
        if weight.master is not None or not local.is_contiguous():
            local.copy_(flat.view(local.shape))


@cache
def _compiled():
    return torch.compile(adamw_reference_)


@torch.no_grad()
def adamw_reference_(
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
    """Update a weight and its moments in place: the PyTorch reference of the fused kernel.

    `left` is what weight decay leaves of the weight, `scalars` are those of `AdamW._scalars`. A key is given
    if anything is rounded stochastically.
    """
    count = gradient.numel()
    factor, rate, unbias, accepted = scalars.unbind()
    taken = accepted > 0
    gradient = gradient.float() * factor
    m = beta1 * first_format.read(first, count) + (1 - beta1) * gradient
    v = beta2 * second_format.read(second, count) + (1 - beta2) * gradient * gradient
    values = weight.float() if low is None else merge_fp32(weight, low)
    values = values * left - rate * m / (v.sqrt() * unbias + eps)
    bits = None if key is None else random_bits(key, step_key, count)
    store_all(first, first_format.write(m, None if bits is None else low_half(bits)), taken)
    store_all(second, second_format.write(v, None if bits is None else high_half(bits)), taken)
    if low is not None:
        upper, lower = split_fp32(values)
        store(low, lower, taken)
        store(weight, upper, taken)
    elif bits is not None and weight.dtype == torch.bfloat16:
        store(weight, to_bf16(values, third_half(bits)), taken)
    else:
        store(weight, values.to(weight.dtype), taken)
