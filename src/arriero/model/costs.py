"""What one block of a model costs: FLOPs and bytes of every operator, and memory. Plain data, no torch.

`block_costs` traces the module of a family (`arriero.model.trace`), so that a registered family is costed
without code of its own. Costs do not depend on the batch: what grows with the tokens is kept per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

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

    def bytes_at(self, tokens: int) -> float:
        """Return the bytes read and written for a micro-batch."""
        return self.read.at(tokens) + self.written.at(tokens)


@dataclass(frozen=True)
class BlockCosts:
    """The operators of forward and backward pass in their order, and the memory of one block in bytes.

    `kept` is what the block keeps for its backward pass, its input included. `forward_peak` and
    `backward_peak` are the largest totals during a pass: kept activations, temporaries, results and, in
    the backward pass, gradients of weights. Parameters are not counted.
    """

    parameters: int
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    kept: Affine
    forward_peak: Affine
    backward_peak: Affine

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
    # equal blocks of another depth or vocabulary are the same block
    shape = replace(spec, layers=1, vocab_size=1, tied=False, nominal_params=None)
    return _traced(shape, tuple(sorted(spec.extra.items())), compiled, element, fused_qkv, budget)


@cache
def _traced(
    spec: ModelSpec, _extra: Any, compiled: bool, element: int, fused_qkv: bool, budget: float
) -> BlockCosts:
    # torch is imported only when a block is traced
    from arriero.model.trace import trace_block

    return trace_block(spec, compiled, element, fused_qkv, budget)
