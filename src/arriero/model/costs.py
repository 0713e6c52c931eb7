"""What one block of a model costs: FLOPs and bytes of every operator, and memory. Plain data, no torch.

`block_costs` traces the module of a family (`arriero.model.trace`), so that a registered family is costed
without code of its own. Costs do not depend on the batch: what grows with the tokens is kept per token.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple

from arriero.model.family import family_of
from arriero.model.spec import ModelSpec

Kind = Literal["matmul", "attention", "elementwise"]
# how tensor parallelism divides the weight of a matmul: its output, its input, or not at all
Split = Literal["column-wise", "row-wise", ""]


class Affine(NamedTuple):
    """An amount of `per_token` for each token of a micro-batch on a rank, and `fixed` once."""

    per_token: float
    fixed: float = 0.0

    def at(self, tokens: int) -> float:
        return self.per_token * tokens + self.fixed


@dataclass(frozen=True)
class Operation:
    """One operator of a block, or one fused kernel of a compiled block.

    A micro-batch of `tokens` tokens takes `flops * tokens` FLOPs, and attention also
    `flops_per_length * tokens * length`: `length` is the sequence length, or the mean length of documents, of
    which a token attends to half on average (causal). `shape` of a matmul is rows, columns and the summed
    dimension, where None stands for the tokens. `module` names the module of its weight in the block.
    """

    name: str
    kind: Kind
    flops: float
    flops_per_length: float
    read: Affine
    written: Affine
    shape: tuple[int | None, ...] = ()
    module: str = ""
    split: Split = ""

    def flops_at(self, tokens: int, length: float) -> float:
        """Return the FLOPs of a micro-batch."""
        return tokens * (self.flops + self.flops_per_length * length)

    def times(self, share: float) -> "Operation":
        """Return the operator of a share of the blocks."""
        read, written = (Affine(share * a.per_token, share * a.fixed) for a in (self.read, self.written))
        flops = (share * self.flops, share * self.flops_per_length)
        return replace(self, flops=flops[0], flops_per_length=flops[1], read=read, written=written)

    def bytes_at(self, tokens: int) -> float:
        """Return the bytes read and written for a micro-batch."""
        return self.read.at(tokens) + self.written.at(tokens)


@dataclass(frozen=True)
class BlockCosts:
    """The operators of forward and backward pass in their order, and the memory of one block in bytes.

    `kept` is what the block keeps for its backward pass, its input included. `forward_peak` and
    `backward_peak` are the largest totals during a pass: kept activations, temporaries, results and, in
    the backward pass, gradients of weights. Parameters are not counted; `shapes` are those of their tensors.
    """

    shapes: Mapping[str, tuple[int, ...]]
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    kept: Affine
    forward_peak: Affine
    backward_peak: Affine

    @property
    def parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))

    def flops(self, tokens: int, length: float) -> float:
        """Return the FLOPs of both passes of a micro-batch."""
        return sum(each.flops_at(tokens, length) for each in (*self.forward, *self.backward))


class OperatorCost(NamedTuple):
    """Cost of one call of a custom operator; bytes that are None are those of its arguments and results."""

    kind: Kind
    flops: float
    read: float | None = None
    written: float | None = None


# name of a custom operator, such as "library::operator": cost from the shapes of its arguments
CostRule = Callable[[Sequence[tuple[int, ...]], Sequence[Any]], OperatorCost]
CUSTOM: dict[str, CostRule] = {}


def register_operator_cost(name: str, rule: CostRule) -> None:
    """Say what a custom operator costs: `rule` takes the shapes of its tensor arguments, and all arguments.

    An operator without a rule counts as elementwise: it moves its arguments and results and takes no FLOPs.
    """
    CUSTOM[name] = rule


def block_costs(
    spec: ModelSpec, compiled: bool, element: int = 2, fused_qkv: bool = False, budget: float = 1.0
) -> BlockCosts:
    """Return the costs of one block with activations and weights of `element` bytes; traced once per shape.

    `fused_qkv` computes q, k and v by one matmul of concatenated weights, as a GPU with whole weights does.
    `budget` is the share of a compiled block's activations that may be kept; backward recomputes the rest.
    """
    kinds = Counter(spec.kinds)
    if len(kinds) > 1:
        each = [block_costs(kind, compiled, element, fused_qkv, budget) for kind in kinds]
        return _mean_block(each, [count / spec.layers for count in kinds.values()])
    # equal blocks of another depth or vocabulary are the same block
    # a sliding window changes neither the operators nor what they keep; callers count its FLOPs
    own = {"layers": 1, "vocab_size": 1, "tied": False, "nominal_params": None}
    extra = {name: value for name, value in spec.extra.items() if name != "window_layers"}
    shape = replace(spec, **own, sliding_window=None, max_window_layers=0, extra=extra)
    return _traced(shape, tuple(sorted(shape.extra.items())), compiled, element, fused_qkv, budget)


def _mean_block(costs: Sequence[BlockCosts], shares: Sequence[float]) -> BlockCosts:
    """Return the mean of blocks that differ; the peaks and the shapes are those of the largest one."""

    def mean(amounts: Sequence[Affine]) -> Affine:
        return Affine(*(sum(map(operator.mul, shares, each)) for each in zip(*amounts, strict=True)))

    def scaled(passes: Sequence[Sequence[Operation]]) -> tuple[Operation, ...]:
        return tuple(each.times(share) for share, all_ in zip(shares, passes, strict=True) for each in all_)

    def above(peaks: Sequence[Affine]) -> Affine:
        over = [[p - k for p, k in zip(*both, strict=True)] for both in zip(peaks, kept, strict=True)]
        return Affine(*(k + max(each) for k, each in zip(mean(kept), zip(*over, strict=True), strict=True)))

    kept = [each.kept for each in costs]
    return BlockCosts(
        max((each for each in costs), key=lambda each: each.parameters).shapes,
        scaled([each.forward for each in costs]),
        scaled([each.backward for each in costs]),
        mean(kept),
        above([each.forward_peak for each in costs]),
        above([each.backward_peak for each in costs]),
    )


@cache
def _traced(
    spec: ModelSpec, _extra: Any, compiled: bool, element: int, fused_qkv: bool, budget: float
) -> BlockCosts:
    # torch is imported only when a block is traced
    from arriero.model.trace import trace_block

    return trace_block(spec, compiled, element, fused_qkv, budget)


class Mode(NamedTuple):
    """How a block runs, as far as its memory depends on it; activations have `element` bytes."""

    compiled: bool
    element: int
    on_gpu: bool = True
    fused_qkv: bool = False
    float8: bool = False


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one block: kept for backward without activation checkpointing, and with two kinds of it.

    `selective` keeps attention and every second matmul, `attention` the result of attention; both include
    the block's input. `working` is what the backward pass needs beyond `kept`. `gathered` is the part of
    `kept` per token that tensor parallelism does not divide.
    """

    kept: Affine
    selective: Affine
    attention: Affine
    working: Affine
    gathered: float


def memory_of(
    mode: Mode,
    dim: int,
    kept: float,
    fixed: float,
    attention: float,
    matmuls: Sequence[float],
    working: Affine,
    gathered: float,
) -> BlockMemory:
    """Assemble the memory of a block from bytes per token.

    `attention` is the result of attention, `matmuls` those of all matmuls in their order.
    """
    x = mode.element * dim
    # a compiled block keeps no result that its backward pass does not need, such as that of the last matmul
    every_second = sum(matmuls[: -1 if mode.compiled else None : 2])
    return BlockMemory(
        kept=Affine(kept, fixed),
        selective=Affine(x + attention + every_second),
        attention=Affine(x + attention),
        working=working,
        gathered=gathered,
    )


def block_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of a block's parameters by their names in the block."""
    given = family_of(spec.family).block_shapes
    return given(spec) if given else block_costs(spec, compiled=False).shapes


def block_memory(spec: ModelSpec, mode: Mode) -> BlockMemory:
    """Return the memory of a block: by the formulas of its family, or traced if the family has none."""
    given = family_of(spec.family).block_memory
    if given:
        return given(spec, mode)
    costs = block_costs(spec, mode.compiled, mode.element, mode.fused_qkv)
    matmuls = [each.written.per_token for each in costs.forward if each.kind == "matmul"]
    attention = sum(each.written.per_token for each in costs.forward if each.kind == "attention")
    gathers = [p for p in family_of(spec.family).placements.values() if p == "gather sequence"]
    working = Affine(*(peak - kept for peak, kept in zip(costs.backward_peak, costs.kept, strict=True)))
    gathered = mode.element * spec.dim * len(gathers)
    # float8 keeps a copy of each weight
    fixed = costs.kept.fixed + (spec.block_matmul_parameters if mode.float8 else 0)
    return memory_of(
        mode, spec.dim, costs.kept.per_token, fixed, attention, matmuls, working, min(gathered, costs.kept[0])
    )
