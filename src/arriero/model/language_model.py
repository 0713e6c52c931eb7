"""The base class of model families, and weight initialisation.

Element n of a parameter is initially a pure function of (seed, parameter name, n): the same bits on every
device, in any order, and for any shard of the parameter.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from arriero.model.adapters import initial_std, is_adapter
from arriero.model.attention import SequenceMixer
from arriero.model.layers import Block, Head, Rope, Rotation
from arriero.model.quantized import PACKED, QuantizedLinear, columns_of, kind_of, pack
from arriero.model.spec import ModelSpec
from arriero.model.speculator.settings import is_speculator

# Returns the local part of a parameter and its offset in the whole.
LocalShard = Callable[[Tensor], tuple[Tensor, Sequence[int]]]

_CELLS = 1 << 16
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class InitRule:
    """A constant if std is zero, else a normal distribution truncated at `cut` standard deviations.

    `quantiles` maps numbers from 0 to 1 to the values of another distribution.
    """

    std: float = 0.0
    cut: float = 3.0
    constant: float = 0.0
    quantiles: Callable[[Tensor], Tensor] | None = None


def plain_name(name: str) -> str:
    """Remove the parts that wrappers for compilation and activation checkpointing add to a name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def whole(parameter: Tensor) -> tuple[Tensor, Sequence[int]]:
    return parameter, (0,) * parameter.ndim


class LanguageModel(nn.Module):
    """A decoder-only transformer. A family implements `embed`, `rotation` and `init_rule`.

    Build it on any device, `meta` included; after `to_empty`, `init_weights` fills what has storage. A
    pipeline stage keeps the parameter names of the whole model, because blocks are named by their number.
    """

    embedding: nn.Embedding | None
    norm: nn.Module | None
    head: Head | None
    # added to all positions: what an adapter puts before the tokens
    offset: int = 0

    def __init__(self, spec: ModelSpec, blocks: list[Block], norm: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.blocks = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm = norm
        self.head = Head(spec.dim, spec.vocab_size)
        self.tie()

    def keep(self, blocks: range) -> None:
        """Become a pipeline stage: these blocks, the embedding with the first, the head with the last."""
        for name in list(self.blocks):
            if int(name) not in blocks:
                del self.blocks[name]
        if blocks.start > 0:
            self.embedding = None
        if blocks.stop < self.spec.layers:
            self.norm = self.head = None

    def tie(self) -> None:
        """Make a tied head share the embedding's parameter."""
        if self.spec.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def _apply(self, fn, recurse=True):
        # moving from meta creates a parameter for each name
        super()._apply(fn, recurse)
        self.tie()
        return self

    def forward(
        self,
        x: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
    ) -> Tensor:
        """Return logits, or the summed loss of labels; a stage without head returns its hidden states."""
        x_BTD = self.hidden(x, positions_BT, documents_BT)
        return x_BTD if self.head is None else self.head(x_BTD, labels_BT)

    def hidden(
        self, x: Tensor, positions_BT: Tensor | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states before the head. `x` is tokens, or hidden states in a later stage."""
        positions = positions_BT
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        masks = self.masks((x.shape[0], positions.shape[-1]), documents_BT, x.device)
        positions = positions + self.offset if self.offset else positions
        rotation = self.rotation(positions)
        x_BTD = x if self.embedding is None else self.embed(x, positions)
        for block, mask in zip(self.blocks.values(), masks, strict=True):
            x_BTD = block(x_BTD, rotation, mask)
        return x_BTD if self.norm is None else self.norm(x_BTD)

    def masks(
        self, shape: tuple[int, int], documents_BT: Tensor | None, device: torch.device
    ) -> Sequence[Any]:
        """Return the mask of each block in the form that its mixer takes; equal mixers share one mask."""
        made: dict[Hashable, Any] = {None: None}
        keys: list[Hashable] = []
        for block in self.blocks.values():
            mixer = next((m for m in block.modules() if isinstance(m, SequenceMixer)), None)
            if mixer is None and documents_BT is not None:
                raise ValueError(
                    f"a block of the family {self.spec.family} has no SequenceMixer for documents"
                )
            keys.append(None if mixer is None else mixer.mask_key)
            if mixer is not None and mixer.mask_key not in made:
                made[mixer.mask_key] = mixer.mask(shape, documents_BT, device)
        return [made[key] for key in keys]

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states before the first block."""
        raise NotImplementedError

    def rotation(self, positions: Tensor) -> Rotation | None:
        """Return the rotary embedding of positions, or None where the family has none."""
        raise NotImplementedError

    def init_rule(self, name: str) -> InitRule:
        """Return how the parameter of that name is initialised."""
        raise NotImplementedError

    def _rule(self, name: str, width: int) -> InitRule:
        if is_speculator(name):
            norm = ".ln." in name
            is_bias = name.endswith(".bias")
            return InitRule(constant=float(not is_bias)) if norm else InitRule(std=width**-0.5, cut=2.0)
        return InitRule(initial_std(name, width)) if is_adapter(name) else self.init_rule(name)

    def init_weights(self, seed: int, local_shard: LocalShard = whole) -> None:
        """Initialise every parameter and buffer. `local_shard` returns the local part of a parameter and its
        offset."""
        self.tie()
        for wrapped, parameter in self.named_parameters():
            name = plain_name(wrapped)
            if self.spec.tied and name == "head.weight":
                name = "embedding.weight"
            if name.endswith(PACKED):
                layer = self.get_submodule(wrapped.removesuffix(PACKED))
                assert isinstance(layer, QuantizedLinear)
                name = name.removesuffix(PACKED) + ".weight"
                width = layer.in_features
                fill_packed(parameter, width, name, self._rule(name, width), seed, local_shard)
                continue
            fill(parameter, name, self._rule(name, parameter.shape[-1]), seed, local_shard)
        for module in self.modules():
            if isinstance(module, Rope):
                module.reset()


@torch.no_grad()
def fill(parameter: Tensor, name: str, rule: InitRule, seed: int, local_shard: LocalShard = whole) -> None:
    """Initialise the local part of a parameter."""
    local, start = local_shard(parameter)
    if local.is_meta:
        raise ValueError(f"{name} has no storage yet: call to_empty before init_weights")
    if rule.quantiles is not None:
        # on the CPU in fp64, so that all devices get the same bits
        index = torch.arange(start[0], start[0] + len(local), device="cpu")
        share = (_shift(_mix(index, _key(seed, name)), 11).double() + 0.5) * 2.0**-53
        local.copy_(rule.quantiles(share))
        return
    if rule.std == 0.0:
        local.fill_(rule.constant)
        return
    rows = local.unsqueeze(0) if local.ndim == 1 else local.flatten(1)
    row, column = (0, start[0]) if local.ndim == 1 else (start[0], start[1] if local.ndim == 2 else 0)
    width = parameter.shape[-1] if local.ndim < 3 else rows.shape[1]
    _fill_rows(rows, row, column, width, _key(seed, name), rule)


@torch.no_grad()
def fill_packed(
    parameter: Tensor, columns: int, name: str, rule: InitRule, seed: int, local_shard: LocalShard = whole
) -> None:
    """Initialise the local blocks of a quantised weight: quantise what `fill` would write."""
    local, start = local_shard(parameter)
    part = columns_of(slice(start[1], start[1] + local.shape[1]), columns)
    weight = torch.full((local.shape[0], part.stop - part.start), rule.constant, device=local.device)
    if rule.std:
        _fill_rows(weight, start[0], part.start, columns, _key(seed, name), rule)
    local.copy_(pack(weight, kind_of(local)))


def _fill_rows(rows: Tensor, row: int, column: int, width: int, key: int, rule: InitRule) -> None:
    table = _quantiles(rule.cut).to(rows.device) * rule.std
    columns = torch.arange(column, column + rows.shape[1], device=rows.device)
    # small chunks fit a CPU cache, large ones fill a GPU
    at_once = max(1, (1 << 15 if rows.device.type == "cpu" else 1 << 24) // max(1, rows.shape[1]))
    for first in range(0, rows.shape[0], at_once):
        part = rows[first : first + at_once]
        index = torch.arange(row + first, row + first + part.shape[0], device=rows.device)
        part.copy_(_normals(index[:, None] * width + columns, key, table))


def _normals(index: Tensor, key: int, table: Tensor) -> Tensor:
    """Invert the normal CDF by linear interpolation, which all devices round identically, unlike erfinv."""
    bits = _mix(index, key)
    cell = _shift(bits, 48)
    low = table[cell]
    within = (_shift(bits, 24) & 0xFFFFFF).float() * 2.0**-24
    return low + (table[cell + 1] - low) * within


def _mix(index: Tensor, key: int) -> Tensor:
    """Return SplitMix64 at a counter: neighbouring indices give unrelated bits."""
    z = index * _signed(0x9E3779B97F4A7C15) + _signed(key)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big")


@cache
def _quantiles(cut: float) -> Tensor:
    tail = 0.5 * math.erfc(cut / math.sqrt(2.0))
    share = torch.linspace(tail, 0.5, _CELLS // 2 + 1, dtype=torch.float64, device="cpu")
    lower = torch.special.ndtri(share)
    lower[0] = -cut
    lower[-1] = 0.0
    return torch.cat((lower, -lower[:-1].flip(0))).float()
