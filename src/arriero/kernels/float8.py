"""Linear layers whose matmuls are in float8, with one scale for each tensor, taken from the tensor itself.

Hopper multiplies float8 only along contiguous rows, and each tensor takes part in two products, along its
rows and along its columns. One kernel therefore casts a tensor to both layouts in one pass over it.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from arriero.kernels import kernels, usable

# more digits for what is multiplied forward, more range for gradients
VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_AMD_WITH_FLOAT8 = ("gfx94", "gfx95", "gfx120")
MULTIPLE = 16


def linears(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x @ weight.T for each, side by side: together they are one product."""
    rows = x.flatten(0, -2)
    y, *_ = torch.ops.arriero.float8_linears(in_sixteens(rows), list(weights))
    return y[: rows.shape[0]].unflatten(0, x.shape[:-1])


def in_sixteens(rows: Tensor) -> Tensor:
    """With rows of zeros below, where they are needed: the tensor cores sum over so many at once."""
    missing = -rows.shape[0] % MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


@torch.library.custom_op("arriero::float8_linears", mutates_args=())
def float8_linears(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The products side by side; then what backward needs: x and the weights transposed, and their scales."""
    x8, x8_t, x_scale = both_layouts([x], VALUES)
    w8, w8_t, w_scale = both_layouts(weights, VALUES)
    return product(x8, w8, x_scale, w_scale, x.dtype, fast=True), x8_t, x_scale, w8_t, w_scale


@float8_linears.register_fake
def _(x, weights):
    out = sum(weight.shape[0] for weight in weights)
    scale = x.new_empty((), dtype=torch.float32)
    x8_t = x.new_empty(x.shape[1], x.shape[0], dtype=VALUES)
    w8_t = x.new_empty(x.shape[1], out, dtype=VALUES)
    return x.new_empty(x.shape[0], out), x8_t, scale, w8_t, torch.empty_like(scale)


@torch.library.custom_op("arriero::float8_gradients", mutates_args=())
def float8_gradients(
    gradient: Tensor, x8_t: Tensor, x_scale: Tensor, w8_t: Tensor, w_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Of x, and of the weights one below the other."""
    g8, g8_t, g_scale = both_layouts([gradient], GRADIENTS)
    return (
        product(g8, w8_t, g_scale, w_scale, gradient.dtype, fast=False),
        product(g8_t, x8_t, g_scale, x_scale, gradient.dtype, fast=False),
    )


@float8_gradients.register_fake
def _(gradient, x8_t, x_scale, w8_t, w_scale):  # noqa: ARG001
    rows, inner = gradient.shape[0], w8_t.shape[0]
    return gradient.new_empty(rows, inner), gradient.new_empty(gradient.shape[1], inner)


def _keep(ctx, inputs, output) -> None:
    _, *kept = output
    ctx.rows = [weight.shape[0] for weight in inputs[1]]
    ctx.save_for_backward(*kept)
    ctx.mark_non_differentiable(*kept)


def _backward(ctx, gradient, *_):
    x_grad, weight_grad = torch.ops.arriero.float8_gradients(gradient.contiguous(), *ctx.saved_tensors)
    return x_grad, list(weight_grad.split(ctx.rows))


float8_linears.register_autograd(_backward, setup_context=_keep)


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a @ b.T. `fast` leaves sums in the tensor cores, with fewer digits."""
    if _by_kernels(a):
        return torch._scaled_mm(a, b.T, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)
    return ((a.float() @ b.float().T) * (a_scale * b_scale)).to(dtype)


def both_layouts(parts: Sequence[Tensor], kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The parts, one below the other, in float8; the same transposed; what to multiply them by."""
    if _by_kernels(parts[0]):
        return kernels("float8_cast").both_layouts([part.contiguous() for part in parts], kind)
    whole = torch.cat(list(parts)).float()
    most = torch.finfo(kind).max
    scale = whole.abs().amax().clamp(min=1e-12) / most
    # rounding may step over the largest number there is
    cast = (whole / scale).clamp(-most, most).to(kind)
    return cast, cast.T.contiguous(), scale


def computes_float8(device: torch.device) -> bool:
    """Whether the device multiplies float8; elsewhere it is emulated: as exact, and slower than bf16."""
    if device.type != "cuda":
        return False
    amd = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
    # AMD's capability numbers say (9, 0) for an MI250, which has no float8
    if amd.startswith("gfx"):
        return amd.startswith(_AMD_WITH_FLOAT8)
    return torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def own_float8(device: torch.device) -> bool:
    """Whether the kernels here know the device's float8; AMD's is another one."""
    return torch.version.hip is None and computes_float8(device)


def _by_kernels(tensor: Tensor) -> bool:
    return usable(tensor) and own_float8(tensor.device)
