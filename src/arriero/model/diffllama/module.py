"""The DiffLlama module: attention that subtracts a second softmax from the first, scaled by a learned lambda.

Kv heads 2g and 2g + 1, with their query heads, are pair g; in Hugging Face's order they are g and g + K/2.
Adjacent pairs stay together when tensor parallelism splits the heads.
Shapes: B batch, T tokens, G pairs, N query heads per kv head, E head dim.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arriero.model.attention import Mask
from arriero.model.language_model import InitRule
from arriero.model.layers import Attention
from arriero.model.llama.module import Llama
from arriero.model.spec import ModelSpec

LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class Difference(nn.Module):
    """The difference of both outputs of each pair of heads, normalised."""

    def __init__(self, head_dim: int, eps: float, layer: int) -> None:
        super().__init__()
        self.eps, self.initial = eps, 0.8 - 0.6 * math.exp(-0.3 * layer)
        for name in LAMBDAS:
            self.register_parameter(name, nn.Parameter(torch.zeros(head_dim)))

    def forward(self, pairs_BTG2NF: Tensor) -> Tensor:
        q1, k1, q2, k2 = (getattr(self, name).float() for name in LAMBDAS)
        share = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.initial
        first, second = pairs_BTG2NF[:, :, :, 0], pairs_BTG2NF[:, :, :, 1]
        out = first - share.to(first.dtype) * second
        return (1 - self.initial) * F.rms_norm(out, (out.shape[-1],), eps=self.eps)


class DifferentialAttention(Attention):
    """Both heads of a pair attend to the same values, of twice the width. `core` gets every head twice, once
    for each half of the values, so that it may be any core, of the key-value cache too."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec.dim, spec.heads, spec.kv_heads, spec.head_dim, bias=False)
        self.difference = Difference(spec.head_dim, spec.norm_eps, layer)

    def attend(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask: Mask) -> Tensor:
        pairs = v_BTKE.unflatten(2, (-1, 2))
        halves = [pairs[:, :, :, i : i + 1].expand_as(pairs).flatten(2, 3) for i in (0, 1)]
        twice = (x.repeat(1, 1, 2, 1) for x in (q_BTHE, k_BTKE))
        out = torch.cat(self.core(*twice, torch.cat(halves, dim=2), mask).chunk(2, dim=2), dim=-1)
        return self.difference(out.unflatten(2, (pairs.shape[2], 2, -1))).flatten(2, 3)


class DiffLlama(Llama):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        for number, block in self.blocks.items():
            block.attention = DifferentialAttention(spec, int(number))

    def init_rule(self, name: str) -> InitRule:
        return InitRule(std=0.1) if name.endswith(LAMBDAS) else super().init_rule(name)
