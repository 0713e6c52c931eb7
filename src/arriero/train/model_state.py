"""The weights of a model on this rank: parameters, master weights, names in checkpoints and tied copies.

Checkpointing, export, evaluation and the optimizer reach the weights through a `ModelState`. It needs no
optimizer. Where the shards of its tensors lie is known to `arriero.parallel.dtensor`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from arriero.checkpoint.state import LazyMapping
from arriero.config.schema import OptimSection, RunConfig, SpeculatorSection
from arriero.errors import UserError, nearest
from arriero.model.adapters import SECTIONS, AdapterSettings, adapter_of
from arriero.model.language_model import LanguageModel, plain_name
from arriero.model.name_maps import own_tensors
from arriero.model.spec import ModelSpec
from arriero.model.speculator.settings import is_speculator, speculator_shapes
from arriero.parallel.dtensor import from_local, local_part, redistribute_like, shard_index
from arriero.plan.resolve import Decision
from arriero.train.optim.number_formats import Noise, merge_fp32, split_fp32, store, third_half, to_bf16
from arriero.units import human_count


@dataclass(frozen=True)
class Weight:
    """A parameter and its master weight: the value that the optimizer updates and checkpoints store.

    `name` is the parameter's name in checkpoints. A bf16 parameter may be the upper half of an fp32 master
    weight; `low` then holds the lower 16 bits. Beside an fp16 parameter, `master` is the whole fp32 weight.
    A bf16 parameter with neither is its own master weight and is updated with stochastic rounding.
    """

    name: str
    parameter: nn.Parameter
    low: Tensor | None = None
    master: Tensor | None = None

    @property
    def local(self) -> Tensor:
        return local_part(self.parameter)

    @property
    def has_master(self) -> bool:
        return self.low is not None or self.master is not None

    @property
    def is_rounded(self) -> bool:
        """Whether updates need stochastic rounding."""
        return self.parameter.dtype != torch.float32 and not self.has_master

    def noise_key(self, noise: Noise) -> Tensor:
        return noise.key(self.name, shard_index(self.parameter))

    def noise_bits(self, noise: Noise, step: int) -> Tensor:
        return noise.bits(step, self.name, shard_index(self.parameter), self.local.numel())

    def values(self) -> Tensor:
        """Return the local fp32 values; those of an fp32 parameter are not copied."""
        if self.low is not None:
            return merge_fp32(self.local, self.low)
        return (self.local if self.master is None else self.master).float()

    def write(self, values: Tensor, bits: Tensor | None = None, accepted: Tensor | None = None) -> None:
        """Store new local fp32 values; without random bits they are rounded to nearest."""
        if self.low is not None:
            upper, lower = split_fp32(values.contiguous())
            store(self.low, lower, accepted)
            values = upper
        elif self.master is not None:
            store(self.master, values, accepted)
        elif bits is not None and self.is_rounded:
            values = to_bf16(values.flatten(), third_half(bits))
        local = self.local
        store(local, values.view(local.shape).to(local.dtype), accepted)

    @torch.no_grad()
    def tensor(self) -> Tensor:
        """Return the master weight, placed as the parameter is."""
        return from_local(self.values(), self.parameter) if self.has_master else self.parameter.detach()

    @torch.no_grad()
    def load(self, tensor: Tensor) -> None:
        self.write(local_part(redistribute_like(tensor, self.parameter)).to(self.local.device, torch.float32))


class ModelState:
    """This rank's parameters by name, trainable and frozen.

    `parts` are the pipeline stages on this rank: one, the whole model, without a pipeline. With
    `compute_dtype`, the fp32 parameters are cast to it in place, and what the cast loses is kept beside them
    as master weights. `tied` maps a parameter that repeats another one (the head of a tied model, on the last
    pipeline stage) to the name under which checkpoints hold both.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        parts: Sequence[LanguageModel] = (),
        compute_dtype: torch.dtype | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.parts, self.tied = parts, tied or {}
        # where the frozen model of a speculator is stored, and its checksum
        self.base: Mapping[str, Any] | None = None
        self.weights = {
            name: _with_master(self.tied.get(name, name), parameter, compute_dtype)
            for name, parameter in parameters.items()
        }

    @staticmethod
    def of(
        parts: Sequence[LanguageModel],
        compute_dtype: torch.dtype | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> "ModelState":
        return ModelState(named_parameters(parts), parts=parts, compute_dtype=compute_dtype, tied=tied)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights: the CPU if they are offloaded."""
        return next(iter(self.weights.values())).local.device

    @property
    def trainable(self) -> dict[str, Weight]:
        """Return the weights that an optimizer updates, by parameter name; tied copies are among them."""
        return {name: weight for name, weight in self.weights.items() if weight.parameter.requires_grad}

    def freeze(self, patterns: Iterable[str], spared: Callable[[str], bool] = lambda _: False) -> None:
        """Exclude the weights whose names in checkpoints match a pattern from training, but for some."""
        for weight in self.weights.values():
            if any(fnmatchcase(weight.name, pattern) for pattern in patterns) and not spared(weight.name):
                weight.parameter.requires_grad_(False)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all master weights by their names in checkpoints; each is assembled when it is read."""
        return LazyMapping({weight.name: weight.tensor for weight in self.weights.values()})

    def stored(self) -> Mapping[str, Tensor]:
        """Return the weights that a checkpoint holds: all, or the speculator alone where there is one."""
        every = {weight.name: weight.tensor for weight in self.weights.values()}
        alone = {name: tensor for name, tensor in every.items() if is_speculator(name)}
        return LazyMapping(alone or every)

    def load(self, name: str, tensor: Tensor) -> None:
        """Overwrite a weight and its tied copies, low bits of the master weight included."""
        for weight in self.weights.values():
            if weight.name == name:
                weight.load(tensor)


def named_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of all parts by their names in the whole model."""
    return {plain_name(name): p for part in parts for name, p in part.named_parameters()}


def _matching(key: str, pattern: str, names: Iterable[str]) -> list[str]:
    """Return the parameter names that match a pattern of the run file; raise UserError if none does."""
    names = list(names)
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise UserError(
            f"{key}: '{pattern}' matches no parameter",
            f"names look like '{nearest(pattern, names, cutoff=0.3) or names[0]}'; '*' stands for anything",
        )
    return found


def adapter_settings(config: RunConfig) -> AdapterSettings | None:
    """Return the adapter of a run; None if it trains the model itself."""
    return adapter_of(config.model_dump(include=set(SECTIONS)))


def speculator_section(config: RunConfig) -> SpeculatorSection | None:
    """Return the speculator of a run; None if it trains no speculator."""
    return config.speculator if config.speculator.n_predict else None


def parameter_decisions(
    optim: OptimSection,
    spec: ModelSpec,
    adapter: AdapterSettings | None = None,
    base: str = "master",
    speculator: SpeculatorSection | None = None,
) -> list[Decision]:
    """Report frozen parameters, adapters and parameter groups; reject patterns that match nothing."""
    own = own_tensors(spec)
    trained = own if adapter is None else adapter.tensors(own)
    sizes = {name: tensor.numel() for name, tensor in trained.items()}
    if speculator is not None:
        sizes = {name: prod(shape) for name, shape in speculator_shapes(speculator, spec).items()}
    frozen = {name for pattern in optim.freeze for name in _matching("optim.freeze", pattern, sizes)}
    if len(frozen) == len(sizes):
        raise UserError("optim.freeze leaves no parameter to train", "remove a pattern")
    decisions: list[Decision] = []
    if speculator is not None:
        count, whole = human_count(sum(sizes.values())), human_count(spec.parameters)
        why = f"{count} parameters are trained, the {whole} of the base model are frozen"
        decisions.append(Decision("speculator", f"{speculator.n_predict} heads", why))
    if adapter is not None:
        count, whole = human_count(sum(sizes.values())), human_count(spec.parameters)
        form = "in the precision of the computation" if base == "compute" else f"as {base}"
        stored = "" if base == "master" else f" and stored {form}"
        why = f"{count} parameters in {len(sizes) // 2} layers are trained, {whole} are frozen{stored}"
        decisions.append(Decision(adapter.label, adapter.summary, why))
    left = {name: size for name, size in sizes.items() if name not in frozen}
    if frozen:
        count, total = (human_count(sum(sizes[name] for name in names)) for names in (frozen, sizes))
        why = f"{count} of {total} parameters are not trained"
        decisions.append(Decision("frozen", ", ".join(optim.freeze), why))
    for i, group in enumerate(optim.groups):
        key = f"optim.groups[{i}].match"
        names = [name for name in _matching(key, group.match, sizes) if name in left]
        if not names:
            what = f"{key}: '{group.match}' matches only parameters that are frozen or in an earlier group"
            raise UserError(what, "move the group up, or remove it")
        decay = "" if group.weight_decay is None else f", weight decay {group.weight_decay:g}"
        value = f"learning rate x {group.lr_factor:g}{decay}"
        why = f"{human_count(sum(left.pop(name) for name in names))} parameters"
        decisions.append(Decision(f"group {group.match}", value, why))
    return decisions


def _with_master(name: str, parameter: nn.Parameter, dtype: torch.dtype | None) -> Weight:
    # frozen weights beside an adapter may be stored in fewer bits
    if dtype is None or parameter.dtype != torch.float32:
        return Weight(name, parameter)
    low = master = None
    exact = local_part(parameter).contiguous()
    if dtype == torch.bfloat16:
        cast, low = split_fp32(exact)
    else:
        cast, master = exact.to(dtype), exact.clone()
    # assigning to `parameter.data` does not reach the local part of a DTensor
    new = nn.Parameter(from_local(cast, parameter.detach()), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, new)
    return Weight(name, parameter, low, master)
