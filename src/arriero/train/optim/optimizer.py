"""The optimizer of a run: turn gradients into updates of a model's trainable weights, in any layout."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.profiler import record_function

from arriero.checkpoint.state import LazyMapping
from arriero.config.schema import OptimSection
from arriero.errors import UserError
from arriero.kernels import grouped, is_aligned, kernels, usable
from arriero.parallel.dtensor import from_local, local_part, redistribute_like, sharded_dims
from arriero.train.model_state import ModelState, Weight
from arriero.train.optim.number_formats import Moment, Noise
from arriero.train.optim.rules import AdamW, GroupRates, Muon, Rule, Sgd, Update

COUNTERS = "optimizer"
# the name of the update in profiles
OPTIMIZER = "arriero.optimizer"

_FIRST_SCALE = 2.0**16
_SMALLEST_SCALE = 2.0**-14
_STEPS_TO_GROW = 2000

_Sharding = tuple[DeviceMesh | None, tuple[int, ...]]


class Optimizer:
    """Updates the trainable weights of a model state and keeps their moments.

    fp32 weights are updated as they are, bf16 weights without master weights with stochastic rounding.
    `stage_groups` are process groups whose ranks hold other parameters (pipeline stages), over which the
    gradient norm is summed. `join_tied` sums the gradients of tied copies. `scaled_loss` enables dynamic loss
    scaling, for fp16.
    """

    def __init__(
        self,
        model: ModelState,
        config: OptimSection,
        *,
        scaled_loss: bool = False,
        seed: int = 0,
        stage_groups: Sequence[ProcessGroup] = (),
        join_tied: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> None:
        self.clip = config.clip
        self.attempts = 0
        self.model = model
        self._weights = model.trainable
        self._stage_groups, self._join_tied = stage_groups, join_tied
        self._scale = LossScale() if scaled_loss else None
        self._accumulator = GradientAccumulator(self._weights)
        self._device = model.device
        self.taken = torch.zeros((), dtype=torch.int64, device=self._device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=self._device)
        self._rules = _rules(self._weights, config, Noise(seed, self._device))

    @property
    def loss_scale(self) -> float:
        """Return the factor by which the loss must be multiplied before the backward pass."""
        return self._scale.value if self._scale else 1.0

    @property
    def steps(self) -> int:
        """Return the number of updates that changed the weights; waits for the device, unlike `taken`."""
        return int(self.taken)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the moments on this rank."""
        moments = [
            moment for rule in self._rules for each in rule.moments.values() for moment in each.values()
        ]
        return sum(tensor.nbytes for moment in moments for tensor in moment.stored)

    @property
    def skipped(self) -> int:
        return self.attempts - self.steps

    @torch.no_grad()
    @record_function(OPTIMIZER)
    def step(self, lr: float, loss: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
        """Clip, update and drop the gradients. Returns the gradient norm before clipping.

        If the norm or the loss is not finite, or `allowed` is false, weights, state and step count stay
        unchanged. This is decided on the device, identically on all ranks, since all three are global.
        """
        found = self._accumulator.take()
        gradients = {name: redistribute_like(g, self._weights[name].parameter) for name, g in found.items()}
        if self._join_tied is not None:
            self._join_tied(gradients)
        counted = [g for name, g in gradients.items() if name not in self.model.tied]
        empty = torch.empty(0, device=self._device)
        scaled_by = self.loss_scale
        norm = global_norm([*counted, empty], self._stage_groups) / scaled_by
        accepted = norm.isfinite()
        if loss is not None:
            accepted &= loss.to(norm.device).isfinite()
        if allowed is not None:
            accepted &= allowed.to(norm.device)
        self.accepted = accepted
        if self._scale:
            self._scale.update(finite=bool(accepted))
        factor = clip_factor(norm, self.clip) if self.clip else torch.ones_like(norm)
        self.attempts += 1
        self.taken += accepted
        self.skipped_in_a_row.add_(1).mul_(~accepted)
        # if the first update is skipped, its bias correction divides by zero: the result is not stored
        update = Update(lr, factor / scaled_by, accepted, self.taken, self.attempts)
        local = {name: local_part(gradient) for name, gradient in gradients.items()}
        for rule in self._rules:
            rule.step(local, update)
        return norm

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the moments by parameter name, placed as the parameter is, and counters as 'optimizer'.

        `load_moment` reads them back in any layout; in the same layout training resumes bit-identically.
        """
        state: dict[str, Mapping[str, Tensor]] = {}
        for rule in self._rules:
            for name, moments in rule.moments.items():
                weight = self._weights[name]
                makers = {kind: partial(_placed, moment, weight) for kind, moment in moments.items()}
                state[weight.name] = LazyMapping(makers)
        counters = {"step": torch.tensor(self.steps)}
        if self._scale:
            counters["loss_scale"] = torch.tensor(self._scale.value, dtype=torch.float64)
            counters["good_steps"] = torch.tensor(self._scale.good_steps)
            counters["skipped"] = torch.tensor(self.skipped)
        return state | {COUNTERS: counters}

    @torch.no_grad()
    def load_moment(self, name: str, kind: str, values: Tensor) -> None:
        """Load one tensor of `state`: a moment of a parameter, or a counter."""
        if name == COUNTERS:
            self._load_counter(kind, values)
        for rule in self._rules:
            for parameter, moments in rule.moments.items():
                weight = self._weights[parameter]
                if weight.name == name:
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


def _rules(weights: Mapping[str, Weight], config: OptimSection, noise: Noise) -> list[Rule]:
    """Assign weights to rules: Muon takes the matrices inside blocks, AdamW everything else."""
    rates = {name: group_rates(weight, config) for name, weight in weights.items()}
    if config.name == "sgd":
        return [Sgd(weights, rates, config, noise)]
    hidden = {
        name: weight
        for name, weight in weights.items()
        if config.name == "muon" and name.startswith("blocks.") and weight.parameter.ndim == 2
    }
    others = {name: weight for name, weight in weights.items() if name not in hidden}
    muon = [Muon(hidden, rates, config, noise)] if hidden else []
    return [*muon, AdamW(others, rates, config, noise)]


def group_rates(weight: Weight, config: OptimSection) -> GroupRates:
    """Return learning-rate factor and weight decay of a parameter: those of the first group that matches.

    By default only matrices are decayed.
    """
    decay = config.weight_decay if weight.parameter.ndim > 1 else 0.0
    for group in config.groups:
        if fnmatchcase(weight.name, group.match):
            return GroupRates(group.lr_factor, decay if group.weight_decay is None else group.weight_decay)
    return GroupRates(1.0, decay)


class GradientAccumulator:
    """Gradient accumulation over micro-batches: in fp32 for parameters that have master weights.

    Such a parameter's gradient is taken as soon as the backward pass has computed it, and added in fp32.
    Other gradients are accumulated by autograd.
    """

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = weights
        self._sums: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if weight.has_master:
                weight.parameter.register_post_accumulate_grad_hook(partial(self.add, name))

    def add(self, name: str, parameter: Tensor) -> None:
        """Move the gradient of a parameter to the sums."""
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self._sums[name] = _add_gradients(self._sums.get(name), gradient, parameter)

    def take(self) -> dict[str, Tensor]:
        """Return the gradients in the order of the parameters, which all ranks share, and drop them."""
        for name, weight in self._weights.items():
            if weight.parameter.grad is None:
                continue
            # pipeline schedules that split the backward pass set gradients without calling hooks
            if weight.has_master:
                self.add(name, weight.parameter)
            else:
                self._sums[name] = weight.parameter.grad
                weight.parameter.grad = None
        taken = {name: self._sums[name] for name in self._weights if name in self._sums}
        self._sums.clear()
        return taken


@torch.no_grad()
def _add_gradients(total: Tensor | None, gradient: Tensor, like: Tensor) -> Tensor:
    """Add in fp32; a single gradient stays as it is, unless it is a partial sum that is reduced later."""
    partial_sum = isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)
    if total is None:
        return _to_fp32(gradient, like) if partial_sum else gradient
    total = _to_fp32(total, like)
    if getattr(total, "placements", None) != getattr(gradient, "placements", None):
        total, gradient = redistribute_like(total, like), redistribute_like(gradient, like)
    local_part(total).add_(local_part(gradient))
    return total


def _to_fp32(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.dtype == torch.float32:
        return tensor
    placements = tensor.placements if isinstance(tensor, DTensor) else None
    return from_local(local_part(tensor).float(), like, placements)


@dataclass
class LossScale:
    """Dynamic loss scaling: fp16 loses gradients below 6e-8 and overflows above 65504."""

    value: float = _FIRST_SCALE
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Halve the scale after an overflow; double it after 2000 updates without one."""
        if not finite and self.value < _SMALLEST_SCALE:
            raise UserError(
                "fp16 gradients overflow at any loss scale",
                "set precision.compute to 'bf16' or 'fp32', or lower optim.lr",
            )
        if not finite:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == _STEPS_TO_GROW:
            self.value, self.good_steps = self.value * 2, 0


@torch.no_grad()
def global_norm(gradients: Iterable[Tensor], stage_groups: Sequence[ProcessGroup] = ()) -> Tensor:
    """Return the norm of the gradients of the whole model; replicated tensors count once.

    The ranks of `stage_groups` hold different parameters. A rank without gradients must pass an empty tensor
    on the run's device.
    """
    by_sharding: dict[_Sharding, list[Tensor]] = {}
    for gradient in gradients:
        is_dtensor = isinstance(gradient, DTensor)
        sharding = (gradient.device_mesh, sharded_dims(gradient)) if is_dtensor else (None, ())
        by_sharding.setdefault(sharding, []).append(local_part(gradient))
    sums = {sharding: _sum_of_squares(parts) for sharding, parts in by_sharding.items()}
    _reduce_over_meshes(sums)
    total = torch.stack(list(sums.values())).sum()
    for group in stage_groups:
        dist.all_reduce(total, group=group)
    return total.sqrt().float()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that reduces gradients of this norm to the limit; 1 if they are within it."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _sum_of_squares(parts: list[Tensor]) -> Tensor:
    filled = [part for part in parts if part.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=parts[0].device)
    if usable(filled[0]):
        groups = grouped(filled, lambda part: (part.dtype, is_aligned(part)))
        return torch.stack([kernels("multi_tensor").sum_of_squares(parts) for parts in groups]).sum()
    # the error of a long fp32 sum would depend on the layout
    norms = torch._foreach_norm(filled, 2, dtype=torch.float64)
    return torch.stack(list(norms)).double().square().sum()


def _reduce_over_meshes(sums: dict[_Sharding, Tensor]) -> None:
    """Sum over the ranks that share tensors, with one all-reduce per process group."""
    waiting: dict[ProcessGroup, list[_Sharding]] = {}
    for mesh, dims in sums:
        for dim in dims:
            if mesh is not None and mesh.size(dim) > 1:
                waiting.setdefault(mesh.get_group(dim), []).append((mesh, dims))
    for group, shardings in waiting.items():
        together = torch.stack([sums[sharding] for sharding in shardings])
        dist.all_reduce(together, group=group)
        sums.update(zip(shardings, together, strict=True))
