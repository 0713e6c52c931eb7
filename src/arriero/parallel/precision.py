"""Float8 matmuls in the blocks: which layers, on which device, with whose scales and by whose kernels."""

import importlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn

from arriero.config.schema import PrecisionSection
from arriero.errors import UserError, nearest
from arriero.kernels.float8 import MULTIPLE
from arriero.model.float8 import use_float8
from arriero.model.language_model import LanguageModel
from arriero.model.layers import Block

_RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp"}

# kernels of other precisions than these, and a remark from one part of torch's making to another
_NOISE = {"torchao": "Failed to load", "torch.utils._pytree": "Enum subclass"}


@dataclass(frozen=True)
class Float8Layers:
    """What was decided for every linear layer of the blocks held here; `left` says why."""

    converted: tuple[str, ...]
    left: dict[str, str]

    @property
    def summary(self) -> str:
        total = len(self.converted) + len(self.left)
        reasons = (f"{count} left: {reason}" for reason, count in Counter(self.left.values()).items())
        return "; ".join([f"{len(self.converted)} of {total} linear layers", *reasons])


def joined_layers(parts: Iterable[Float8Layers]) -> Float8Layers:
    parts = list(parts)
    left = {name: reason for part in parts for name, reason in part.left.items()}
    return Float8Layers(tuple(name for part in parts for name in part.converted), left)


def apply_float8(
    model: LanguageModel, settings: PrecisionSection, emulate: bool, tp: int = 1, sharded: bool = False
) -> Float8Layers:
    """Comes first of all transformations: it makes new modules, without the hooks of the old ones.

    `tp` is the number of ranks a layer will be split over, `sharded` whether FSDP will shard the weights.
    """
    if settings.float8 == "off":
        return Float8Layers((), {})
    if settings.float8_all_gather and not sharded:
        raise UserError(
            "precision.float8_all_gather is on, and no weights are gathered in this layout",
            "turn it off, or shard: parallel.dp_shard",
        )
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("blocks.")}
    _check_patterns(settings.float8_exclude, list(linears), model.spec.layers)
    reasons = {name: _reason_to_leave(name, linear, settings, tp) for name, linear in linears.items()}
    chosen = tuple(name for name, reason in reasons.items() if reason is None)
    if hooked := [n for n in chosen if linears[n]._forward_pre_hooks or linears[n]._forward_hooks]:
        raise RuntimeError(f"float8 would lose the hooks of {hooked[0]}: it comes before tensor parallelism")
    plain = tp == 1 and not settings.float8_all_gather
    # AMD's float8 is another, which torchao knows
    if settings.float8 == "tensorwise" and plain and (emulate or torch.version.hip is None):
        for number, block in model.blocks.items():
            own = [linears[name] for name in chosen if name.startswith(f"blocks.{number}.")]
            use_float8(cast(Block, block), own)
    else:
        torchao = _torchao()
        torchao.convert_to_float8_training(
            model, config=_recipe(torchao, settings, emulate), module_filter_fn=lambda _, name: name in chosen
        )
    return Float8Layers(chosen, {name: reason for name, reason in reasons.items() if reason is not None})


def renew_scales(model: nn.Module, settings: PrecisionSection) -> None:
    """The scales of all weights gathered in float8, by one all-reduce. Whenever weights have changed: without
    it the next forward takes scales of its own, under tensor parallelism others."""
    if settings.float8 != "off" and settings.float8_all_gather:
        _torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def _reason_to_leave(name: str, linear: nn.Linear, settings: PrecisionSection, tp: int) -> str | None:
    if any(fnmatchcase(name, pattern) for pattern in settings.float8_exclude):
        return "named by precision.float8_exclude"
    # which of the two widths tensor parallelism splits is not known yet
    multiple = MULTIPLE * tp
    if linear.in_features % multiple or linear.out_features % multiple:
        wide = f"{linear.in_features} x {linear.out_features}"
        return f"{wide} is not in multiples of {MULTIPLE}" + (f" on each of {tp} ranks" if tp > 1 else "")
    return None


def _check_patterns(patterns: Sequence[str], here: list[str], layers: int) -> None:
    """A pattern may name layers of another part of the pipeline, but must name some layer of the model."""
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
    """Only when float8 is on: the import takes seconds."""
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
