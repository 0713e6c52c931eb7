"""Muon: the momentum of a hidden matrix, made orthogonal by Newton-Schulz, is its update."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from arriero.config.schema import OptimSection
from arriero.parallel.dtensor import from_local, shard_count, shard_index, shard_of, sharded_dims
from arriero.train.optim.rounding import Noise
from arriero.train.optim.sgd import gathered
from arriero.train.optim.states import SIGNED, Moment
from arriero.train.optim.weight import Update, Weight

_MOMENTUM = 0.95
# Newton-Schulz of degree five, tuned for speed: singular values end between about 0.7 and 1.2
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon:
    """The ranks that share a matrix take turns: each makes every n-th orthogonal and sends it round."""

    def __init__(self, weights: Mapping[str, Weight], config: OptimSection, noise: Noise) -> None:
        self._weights, self._noise = weights, noise
        self._momentum = _MOMENTUM if config.momentum is None else config.momentum
        self.moments = {
            name: {"momentum": Moment(SIGNED[config.state], weight.local)} for name, weight in weights.items()
        }

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], update: Update) -> None:
        mine = [name for name in self._weights if name in gradients]
        done: dict[str, Tensor] = {}
        for turn, name in enumerate(mine):
            weight, gradient = self._weights[name], gradients[name].float() * update.factor
            moment = self.moments[name]["momentum"]
            ahead = gradient
            if gradient.numel():
                total = gathered(moment, gradient, self._momentum, weight, self._noise, update)
                ahead = gradient + self._momentum * total
            whole = _whole(ahead, weight.parameter)
            if shard_index(weight.parameter) == turn % shard_count(weight.parameter):
                done[name] = orthogonal(whole)
        for turn, name in enumerate(mine):
            weight = self._weights[name]
            direction = _shared(done.pop(name, None), weight.parameter, turn % shard_count(weight.parameter))
            # the root mean square of an AdamW update is about 0.2
            rate = update.lr * 0.2 * math.sqrt(max(weight.parameter.shape))
            piece = shard_of(direction, weight.parameter).float()
            values = weight.values() * (1 - update.lr * weight.decay) - rate * piece
            bits = weight.bits(self._noise, update.number) if weight.rounds else None
            weight.write(values, bits, update.accepted)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with singular values near one; bf16 on a GPU, whose matmuls are fast there."""
    x = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


def _whole(local: Tensor, like: Tensor) -> Tensor:
    tensor = from_local(local, like)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shared(update: Tensor | None, like: Tensor, maker: int) -> Tensor:
    """From the rank with piece number `maker` to those with another, one mesh dimension at a time."""
    if not isinstance(like, DTensor):
        assert update is not None
        return update
    mesh, left, source = like.device_mesh, maker, {}
    for dim in reversed(sharded_dims(like)):
        left, source[dim] = divmod(left, mesh.size(dim))
    if update is None:
        dtype = torch.float32 if like.device.type == "cpu" else torch.bfloat16
        update = torch.empty(like.shape, dtype=dtype, device=like.device)
    update = update.contiguous()
    open_dims = list(source)
    while open_dims:
        dim = open_dims.pop()
        if all(mesh.get_local_rank(other) == source[other] for other in open_dims):
            dist.broadcast(update, group=mesh.get_group(dim), group_src=source[dim])
    return update
