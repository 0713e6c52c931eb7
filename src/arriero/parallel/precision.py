"""Float8 matmuls in the blocks: which linear layers are converted, and by which implementation.

Tensorwise float8 of unsplit weights uses the kernels of `arriero.kernels.float8`; tensor parallelism, float8
all-gathers and rowwise scaling use torchao.
"""

import importlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from arriero.config.schema import PrecisionSection
from arriero.errors import UserError, nearest
from arriero.kernels.float8 import MULTIPLE, linears, swiglu
from arriero.model.language_model import LanguageModel
from arriero.model.layers import Attention, SwiGLU, converted

_RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp"}
# log messages at the import of torchao about kernels that are not used here
_NOISE = {"torchao": "Failed to load", "torch.utils._pytree": "Enum subclass"}


@dataclass(frozen=True)
class Float8Layers:
    """The linear layers that were converted to float8, and for each other one the reason (`left`)."""

    converted: tuple[str, ...]
    left: dict[str, str]

    @property
    def summary(self) -> str:
        total = len(self.converted) + len(self.left)
        reasons = (f"{count} left: {reason}" for reason, count in Counter(self.left.values()).items())
        return "; ".join([f"{len(self.converted)} of {total} linear layers", *reasons])

    @classmethod
    def of_stages(cls, stages: Iterable["Float8Layers"]) -> "Float8Layers":
        """Combine those of several pipeline stages."""
        stages = list(stages)
        left = {name: reason for stage in stages for name, reason in stage.left.items()}
        return cls(tuple(name for stage in stages for name in stage.converted), left)


class Float8Linear(nn.Linear):
    """Linear layer in tensorwise float8, for weights that are plain tensors in the forward pass."""

    def forward(self, input: Tensor) -> Tensor:
        (y,) = _project(input, (self,))
        return y


class Float8QKVAttention(Attention):
    """Attention with q, k and v in one float8 product."""

    def project(self, x_BTD: Tensor) -> Iterable[Tensor]:
        return _project(x_BTD, (self.q, self.k, self.v))


class Float8SwiGLU(SwiGLU):
    """SwiGLU with gate and up in one float8 product."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(swiglu(linears(x_BTD, [self.gate.weight, self.up.weight])))


def _project(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    together = linears(x, [layer.weight for layer in layers])
    products = together.split([layer.out_features for layer in layers], dim=-1)
    return [y if layer.bias is None else y + layer.bias for y, layer in zip(products, layers, strict=True)]


def apply_float8(
    model: LanguageModel, settings: PrecisionSection, emulate: bool, tp: int = 1, sharded: bool = False
) -> Float8Layers:
    """Convert linear layers of the blocks. It must precede transformations that add hooks to modules.

    `tp` is the tensor-parallel degree, `sharded` whether FSDP will shard the weights.
    """
    if settings.float8 == "off":
        return Float8Layers((), {})
    assert sharded or not settings.float8_all_gather, "no weights are gathered in this layout"
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("blocks.")}
    _check_patterns(settings.float8_exclude, list(found), model.spec.layers)
    reasons = {name: _reason_to_leave(name, linear, settings, tp) for name, linear in found.items()}
    chosen = tuple(name for name, reason in reasons.items() if reason is None)
    if hooked := [n for n in chosen if found[n]._forward_pre_hooks or found[n]._forward_hooks]:
        raise RuntimeError(f"float8 would lose the hooks of {hooked[0]}: it comes before tensor parallelism")
    plain = tp == 1 and not settings.float8_all_gather
    # AMD's float8 format is another one, which torchao supports
    if settings.float8 == "tensorwise" and plain and (emulate or torch.version.hip is None):
        for number, block in model.blocks.items():
            prefix = f"blocks.{number}."
            _convert_block(block, {n.removeprefix(prefix) for n in chosen if n.startswith(prefix)})
    else:
        torchao = _torchao()
        torchao.convert_to_float8_training(
            model, config=_recipe(torchao, settings, emulate), module_filter_fn=lambda _, name: name in chosen
        )
    return Float8Layers(chosen, {name: reason for name, reason in reasons.items() if reason is not None})


def _convert_block(block: nn.Module, chosen: Collection[str]) -> None:
    """Replace the chosen linear layers; those that share their input become one product."""
    for name in chosen:
        parent, _, child = name.rpartition(".")
        linear = block.get_submodule(name)
        setattr(block.get_submodule(parent), child, converted(linear, Float8Linear))
    attention, ffn = getattr(block, "attention", None), getattr(block, "ffn", None)
    if type(attention) is Attention and {"attention.q", "attention.k", "attention.v"} <= set(chosen):
        block.attention = converted(attention, Float8QKVAttention)
    if type(ffn) is SwiGLU and isinstance(ffn.activation, nn.SiLU) and {"ffn.gate", "ffn.up"} <= set(chosen):
        block.ffn = converted(ffn, Float8SwiGLU)


def renew_scales(model: nn.Module, settings: PrecisionSection) -> None:
    """Compute the scales of weights that are gathered in float8, by one all-reduce, after each update.

    Without it the next forward pass would compute scales of its own, which differ under tensor parallelism.
    """
    if settings.float8 != "off" and settings.float8_all_gather:
        _torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def _reason_to_leave(name: str, linear: nn.Linear, settings: PrecisionSection, tp: int) -> str | None:
    if any(fnmatchcase(name, pattern) for pattern in settings.float8_exclude):
        return "named by precision.float8_exclude"
    # tensor parallelism may split either width
    multiple = MULTIPLE * tp
    if linear.in_features % multiple or linear.out_features % multiple:
        wide = f"{linear.in_features} x {linear.out_features}"
        return f"{wide} is not in multiples of {MULTIPLE}" + (f" on each of {tp} ranks" if tp > 1 else "")
    return None


def _check_patterns(patterns: Sequence[str], here: list[str], layers: int) -> None:
    """Raise UserError for a pattern that matches no linear layer of the whole model."""
    in_a_block = {name.split(".", 2)[2] for name in here}
    everywhere = [f"blocks.{i}.{name}" for i in range(layers) for name in sorted(in_a_block)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in everywhere):
            meant = nearest(pattern, everywhere) or everywhere[0]
            raise UserError(
                f"precision.float8_exclude: '{pattern}' names no linear layer",
                f"names look like '{meant}'; '*' stands for anything",
            )


def _recipe(torchao: Any, settings: PrecisionSection, emulate: bool) -> Any:
    recipe = torchao.Float8LinearConfig.from_recipe_name(_RECIPES[settings.float8])
    return replace(recipe, emulate=emulate, enable_fsdp_float8_all_gather=settings.float8_all_gather)


def _torchao() -> Any:
    """Import torchao, which takes seconds, only when float8 needs it."""
    try:
        with _quiet():
            return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise UserError(
            f"precision.float8 needs torchao, which cannot be imported ({error})",
            "pip install 'arriero[float8]', or set precision.float8 = 'off'",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    filters = {
        logging.getLogger(name): lambda record, start=start: start not in record.getMessage()
        for name, start in _NOISE.items()
    }
    for logger, keep in filters.items():
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger, keep in filters.items():
            logger.removeFilter(keep)
