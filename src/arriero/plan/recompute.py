"""What the backward pass recomputes of a block, for HFU and for the time of a step.

Imports no torch itself: `block_costs` does where a block must be traced.
"""

from functools import cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from arriero.config.fields import ActivationCheckpointing
from arriero.model.costs import block_costs
from arriero.model.family import family_of
from arriero.model.spec import ModelSpec, Recompute

# layers that share their input, and that one matmul computes where it may
_JOINED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate-up", "up": "gate-up"}


class _Matmul(NamedTuple):
    """A linear layer of a block: its name and its FLOPs per token."""

    module: str
    flops: float


@cache
def recomputed(
    spec: ModelSpec,
    checkpointing: ActivationCheckpointing,
    compiled: bool,
    *,
    fused_qkv: bool = False,
    float8: bool = False,
    tiled: bool = False,
) -> Recompute:
    """Return the shares of the blocks' forward pass that backward repeats.

    `fused_qkv` says that q, k and v are one matmul, `float8` that Arriero's float8 kernels compute all
    layers, gate and up as one, and `tiled` that each tile of the feed-forward layer is recomputed.
    """
    if checkpointing.kind == "budget":
        return _within_budget(spec, float(checkpointing.amount), fused_qkv)
    shares = checkpointing.shares(spec.layers)
    whole, attention, selective = (shares.get(mode, 0.0) for mode in ("full", "attention", "selective"))
    if not tiled and (whole + attention + selective == 0 or (compiled and not checkpointing.is_selective)):
        return Recompute(whole, whole)
    matmuls = _matmuls(spec)
    total = sum(each.flops for each in matmuls)
    if tiled:
        feed_forward = sum(each.flops for each in matmuls if each.module.startswith("ffn."))
        return Recompute(whole + feed_forward / total, whole)
    flops = _flops_of_calls(matmuls, fused_qkv or float8, float8)
    if compiled or not float8:
        # the last result is only added to the residual; a float8 operator runs before it is known to be last
        flops[-1] = 0.0
    again, alternate = sum(flops) / total, sum(flops[1::2]) / total
    # a compiled block that is recomputed whole is recomputed to its end
    return Recompute(whole * (1.0 if compiled else again) + attention * again + selective * alternate, whole)


def _matmuls(spec: ModelSpec) -> list[_Matmul]:
    """Return the linear layers of a block in the order of their calls, by its shapes or traced."""
    if shapes := family_of(spec.family).block_shapes:
        named = {name.removesuffix(".weight"): shape for name, shape in shapes(spec).items()}
        return [_Matmul(name, 2.0 * prod(shape)) for name, shape in named.items() if len(shape) == 2]
    forward = block_costs(spec, compiled=False).forward
    return [_Matmul(each.module, each.flops) for each in forward if each.kind == "matmul"]


def _flops_of_calls(matmuls: list[_Matmul], joins_qkv: bool, joins_ffn: bool) -> list[float]:
    """Return the FLOPs per token of each matmul in order, with joined layers as one."""
    names = {"qkv": joins_qkv, "gate-up": joins_ffn}

    def call(numbered: tuple[int, _Matmul]) -> object:
        number, each = numbered
        parent, _, name = each.module.rpartition(".")
        joint = _JOINED.get(name, "")
        return (parent, joint) if names.get(joint) else number

    groups = groupby(enumerate(matmuls), call)
    return [sum(each.flops for _, each in group) for _, group in groups]


def _within_budget(spec: ModelSpec, budget: float, fused_qkv: bool) -> Recompute:
    """Return what the compiler recomputes to keep a share of the activations: it decides by tracing."""
    costs = block_costs(spec, compiled=True, fused_qkv=fused_qkv, budget=budget)
    forward, backward = (
        sum(each.flops for each in passes if each.kind == "matmul")
        for passes in (costs.forward, costs.backward)
    )
    kinds = [sum(each.kind == "attention" for each in passes) for passes in (costs.forward, costs.backward)]
    # backward has two matmuls for each of forward, and one attention kernel
    return Recompute((backward - 2 * forward) / forward, float(kinds[1] > kinds[0]))
