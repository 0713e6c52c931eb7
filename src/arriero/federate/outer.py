"""Outer optimizers of federated training: pure functions on tensors and on named tensors.

A member is one site's result of a round. Its delta, base - local, is a pseudo-gradient: the outer optimizer
takes a step along the weighted mean of the deltas. Sums are computed in fp64 in the order of the parts, so
whoever sorts the members gets the same bits in whatever order they arrive.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from arriero.federate.schema import Codec, OuterName

BLOCK = 256  # elements that share a scale of the int8 codec
CHUNK = BLOCK * 2**10
SCALE = ".scale"
_STATE: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "nesterov": ("momentum",),
    "fedadam": ("momentum", "variance"),
}


@dataclass(frozen=True)
class OuterOptimizer:
    """`momentum` is beta1 of FedAdam; FedAvg is the plain mean of the members if `lr` is 1."""

    name: OuterName = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the tensors, beside the weights, that the optimizer keeps per parameter."""
        return _STATE[self.name]


class Part(NamedTuple):
    """One member's values of a tensor: its delta, or its weights if `is_local`."""

    weight: float
    values: Tensor
    is_local: bool = False


class Gradient(NamedTuple):
    """The weighted mean delta in fp64. `mean` is the mean of the members' weights where it is known exactly.

    `share` is the weight of the members relative to a full round. Below 1 (late members count less, an
    asynchronous update has one member) the step is that fraction of a full one.
    """

    delta: Tensor
    share: float
    mean: Tensor | None = None


def pseudo_gradient(base: Tensor, parts: Sequence[Part], total: float) -> Gradient:
    """Return the weighted mean of the deltas; `total` is the weight of a full round."""
    wide = base.double()
    weight, share = math.fsum(part.weight for part in parts), 1.0
    if weight != total:
        share = weight / total
    # one division at the end: sums of integer weights times short numbers are exact
    if all(part.is_local for part in parts):
        mean = _weighted_sum(wide, [(part.weight, part.values) for part in parts]) / weight
        return Gradient((wide - mean) * share, share, mean)
    deltas = [(p.weight, wide - p.values.double() if p.is_local else p.values) for p in parts]
    return Gradient(_weighted_sum(wide, deltas) / total, share)


def _weighted_sum(like: Tensor, parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    total = torch.zeros_like(like)
    for weight, values in parts:
        total.add_(values.view(like.shape), alpha=weight)
    return total


def outer_step(
    base: Tensor, gradient: Gradient, state: Mapping[str, Tensor], optimizer: OuterOptimizer
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the new weights and the new state, both in the dtype of `base`; missing state is zero."""
    delta, share = gradient.delta, gradient.share
    new = {
        name: state[name].to(torch.float64, copy=True) if name in state else torch.zeros_like(delta)
        for name in optimizer.state_names
    }
    if optimizer.name == "fedavg":
        if gradient.mean is not None and share * optimizer.lr == 1:
            # base - (base - local) would round
            return gradient.mean.to(base.dtype), {}
        step = delta * optimizer.lr
    elif optimizer.name == "nesterov":
        new["momentum"].mul_(optimizer.momentum**share).add_(delta)
        step = delta.add(new["momentum"], alpha=share * optimizer.momentum).mul_(optimizer.lr)
    else:
        beta1, beta2, full = optimizer.momentum**share, optimizer.beta2**share, delta / share
        new["momentum"] = beta1 * new["momentum"] + (1 - beta1) * full
        new["variance"] = beta2 * new["variance"] + (1 - beta2) * full.square()
        step = share * optimizer.lr * new["momentum"] / (new["variance"].sqrt() + optimizer.eps)
    weights = base.to(torch.float64, copy=True).sub_(step).to(base.dtype)
    return weights, {name: tensor.to(base.dtype) for name, tensor in new.items()}


def encode(base: Tensor, local: Tensor, codec: Codec) -> dict[str, Tensor]:
    """Return what a site ships of a tensor, by the suffix of its name.

    bf16: the rounded delta. int8: the delta in steps of a scale per block of 256 elements. fp32: the local
    weights, which lose nothing. `base` is fp32. Where the site trains bf16 master weights, the delta is
    taken from the rounded base, so that this rounding is not shipped as training.
    """
    local = local.reshape(base.shape)
    start = base if local.dtype == torch.float32 else base.to(local.dtype).float()
    delta = start - local.float()
    if codec == "fp32":
        return {"": local if local.dtype == torch.float32 else base - delta}
    if codec == "bf16":
        return {"": delta.bfloat16()}
    blocks = _blocks(delta)
    scales = blocks.abs().amax(dim=1) / 127
    # a block of zeros has scale 0; NaN and infinity stay visible in the scale
    steps = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).round()
    rounded = steps.nan_to_num(0, 0, 0).clamp(-127, 127).to(torch.int8)
    return {"": rounded.flatten()[: delta.numel()].view(delta.shape), SCALE: scales}


def planned(base: Tensor, codec: Codec) -> dict[str, Tensor]:
    """Return shapes and dtypes of what `encode` makes, on the meta device."""
    dtype = {"bf16": torch.bfloat16, "int8": torch.int8, "fp32": torch.float32}[codec]
    made = {"": torch.empty(base.shape, dtype=dtype, device="meta")}
    if codec == "int8":
        made[SCALE] = torch.empty(-(-base.numel() // BLOCK), dtype=torch.float32, device="meta")
    return made


def decode_int8(values: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 delta of whole blocks; only the last block may be shorter."""
    decoded = _blocks(values.float()) * scales.unsqueeze(1)
    return decoded.flatten()[: values.numel()]


def _blocks(tensor: Tensor) -> Tensor:
    flat = tensor.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


class Source(Protocol):
    """Named tensors that are read in flat parts, such as a safetensors file."""

    def read_flat(self, name: str, start: int, stop: int) -> Tensor: ...


def chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the flat parts of a tensor; each part is a whole number of int8 blocks."""
    for start in range(0, tensor.numel(), CHUNK):
        yield start, min(start + CHUNK, tensor.numel())


def read_delta(source: Source, codec: Codec, name: str, start: int, stop: int) -> Tensor:
    """Read a part of a member: its delta, or its local weights with the codec fp32."""
    values = source.read_flat(name, start, stop)
    if codec != "int8":
        return values
    return decode_int8(values, source.read_flat(name + SCALE, start // BLOCK, -(-stop // BLOCK)))


def inner_products(base: Tensor, parts: Sequence[Part]) -> Tensor:
    """Return the inner products of the members' deltas in one part of a tensor."""
    rows = [base - part.values if part.is_local else part.values.float() for part in parts]
    stacked = torch.stack([row.view(-1) for row in rows])
    return (stacked @ stacked.T).double()


def cosines(products: Tensor) -> list[list[float]]:
    """Return the cosines between deltas; the cosine with a delta of zero is 0."""
    norms = products.diagonal().sqrt()
    return (products / norms.outer(norms).clamp(min=1e-300)).tolist()
