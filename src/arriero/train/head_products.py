"""The head's three products, a chunk of tokens at a time: logits, and the gradients of states and weight.

C tokens of a chunk, V rows of the vocabulary held here, D the model's width.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from arriero.kernels import usable
from arriero.kernels.float8 import GRADIENTS, VALUES, both_layouts, in_sixteens, product

_ROWS = 64


class Products(Protocol):
    """`logits` of a chunk, then its `gradients`: that of the states is written to `x_grad_CD`, that of the
    weight added to `weight_grad`, where they are wanted."""

    def logits(self, x_CD: Tensor) -> Tensor: ...

    def gradients(
        self, slope_CV: Tensor, x_CD: Tensor, x_grad_CD: Tensor | None, weight_grad: "SumOfProducts | None"
    ) -> None: ...


def products_with(weight_VD: Tensor, float8: bool) -> Products:
    return _Float8(weight_VD) if float8 else _AsTheyAre(weight_VD)


class _AsTheyAre:
    """In the type of states and weight."""

    def __init__(self, weight_VD: Tensor) -> None:
        self._weight_VD = _aligned(weight_VD)

    def logits(self, x_CD: Tensor) -> Tensor:
        return x_CD @ self._weight_VD.T

    def gradients(
        self, slope_CV: Tensor, x_CD: Tensor, x_grad_CD: Tensor | None, weight_grad: "SumOfProducts | None"
    ) -> None:
        if x_grad_CD is not None:
            torch.mm(slope_CV, self._weight_VD, out=x_grad_CD)
        if weight_grad is not None:
            weight_grad.add_product_of(slope_CV, x_CD)


class _Float8:
    """With one scale for the weight, and one for a chunk's states and for its slope."""

    def __init__(self, weight_VD: Tensor) -> None:
        self._weight8_VD, self._weight8_DV, self._weight_scale = both_layouts([_aligned(weight_VD)], VALUES)

    def logits(self, x_CD: Tensor) -> Tensor:
        x8_CD, self._x8_DC, self._x_scale = both_layouts([in_sixteens(x_CD)], VALUES)
        scales = (self._x_scale, self._weight_scale)
        return product(x8_CD, self._weight8_VD, *scales, x_CD.dtype, fast=True)[: len(x_CD)]

    def gradients(
        self, slope_CV: Tensor, x_CD: Tensor, x_grad_CD: Tensor | None, weight_grad: "SumOfProducts | None"
    ) -> None:
        slope8_CV, slope8_VC, scale = both_layouts([in_sixteens(slope_CV)], GRADIENTS)
        if x_grad_CD is not None:
            scales = (scale, self._weight_scale)
            found = product(slope8_CV, self._weight8_DV, *scales, x_CD.dtype, fast=False)
            x_grad_CD.copy_(found[: len(x_CD)])
        if weight_grad is not None:
            weight_grad.add(product(slope8_VC, self._x8_DC, scale, self._x_scale, x_CD.dtype, fast=False))


class SumOfProducts:
    """slope.T @ x over chunks: one is kept as it is, several are added up in fp32."""

    def __init__(self, like_VD: Tensor) -> None:
        self._like = like_VD
        self._sum: Tensor | None = None

    def add_product_of(self, slope_CV: Tensor, x_CD: Tensor) -> None:
        # in fp16 even one is fp32: before it is scaled, the sum over a batch may be too large
        if self._sum is None and slope_CV.dtype != torch.float16:
            self._sum = slope_CV.T @ x_CD
            return
        if self._sum is None:
            self._sum = torch.zeros(slope_CV.shape[1], x_CD.shape[1], device=x_CD.device)
        self._sum = self._sum.float()
        if slope_CV.dtype == torch.float32:
            self._sum.addmm_(slope_CV.T, x_CD)
        elif slope_CV.is_cuda and torch.version.hip is None:
            torch.addmm(self._sum, slope_CV.T, x_CD, out_dtype=torch.float32, out=self._sum)
        elif slope_CV.dtype == torch.float16:
            self._sum.addmm_(slope_CV.T.float(), x_CD.float())
        else:
            self._sum += slope_CV.T @ x_CD

    def add(self, product_VD: Tensor) -> None:
        self._sum = product_VD if self._sum is None else self._sum.float().add_(product_VD)

    def value(self) -> Tensor:
        """Of the rows there are: those that were only there to multiply faster are left out."""
        if self._sum is None:
            return torch.zeros_like(self._like)
        kept = self._sum[: len(self._like)]
        return kept if self._like.dtype == torch.float16 else kept.to(self._like.dtype)


def _aligned(weight_VD: Tensor) -> Tensor:
    """GPUs multiply by 50,257 rows at a fifth of the speed they have for 50,304; float8 only by sixteens."""
    missing = -len(weight_VD) % _ROWS if usable(weight_VD) else 0
    return F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD
