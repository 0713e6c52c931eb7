"""Linear layers and SwiGLU with matmuls in float8, one dynamic scale per tensor (tensorwise).

Hopper multiplies float8 only along contiguous rows, and each tensor is an operand of two products, by rows
and by columns. One kernel therefore casts a tensor to both layouts in one pass. Where the kernels cannot
run, the same numbers are emulated in PyTorch.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from arriero.kernels import kernels, operator, usable

# e4m3 has more digits, for values; e5m2 more range, for gradients
VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_AMD_WITH_FLOAT8 = ("gfx94", "gfx95", "gfx120")
MULTIPLE = 16
_SWIGLU_BLOCK = 4096


def linears(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return x @ weight.T for each weight, concatenated, as one product."""
    rows = x.flatten(0, -2)
    y, *_ = torch.ops.arriero.float8_linears(padded_rows(rows), list(weights))
    return y[: rows.shape[0]].unflatten(0, x.shape[:-1])


def padded_rows(rows: Tensor) -> Tensor:
    """Append rows of zeros up to a multiple of 16, which float8 matmuls need."""
    missing = -rows.shape[0] % MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


@operator("arriero::float8_linears")
def float8_linears(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the concatenated products, and for backward x and the weights transposed with their scales."""
    x8, x8_t, x_scale = both_layouts([x], VALUES)
    w8, w8_t, w_scale = both_layouts(weights, VALUES)
    return product(x8, w8, x_scale, w_scale, x.dtype, fast=True), x8_t, x_scale, w8_t, w_scale


@operator("arriero::float8_gradients")
def float8_gradients(
    gradient: Tensor, x8_t: Tensor, x_scale: Tensor, w8_t: Tensor, w_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and of the weights, stacked."""
    g8, g8_t, g_scale = both_layouts([gradient], GRADIENTS)
    return (
        product(g8, w8_t, g_scale, w_scale, gradient.dtype, fast=False),
        product(g8_t, x8_t, g_scale, x_scale, gradient.dtype, fast=False),
    )


def _save(ctx, inputs, output) -> None:
    _, *kept = output
    ctx.rows = [weight.shape[0] for weight in inputs[1]]
    ctx.save_for_backward(*kept)
    ctx.mark_non_differentiable(*kept)


def _backward(ctx, gradient, *_):
    x_grad, weight_grad = torch.ops.arriero.float8_gradients(gradient.contiguous(), *ctx.saved_tensors)
    return x_grad, list(weight_grad.split(ctx.rows))


float8_linears.register_autograd(_backward, setup_context=_save)


def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a @ b.T. `fast` accumulates in the tensor cores, with lower precision."""
    if _by_kernel(a):
        return torch._scaled_mm(a, b.T, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)
    return ((a.float() @ b.float().T) * (a_scale * b_scale)).to(dtype)


def both_layouts(parts: Sequence[Tensor], kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the stacked parts in float8, their transpose, and the scale that restores their values."""
    if _by_kernel(parts[0]):
        return kernels("float8_triton").both_layouts([part.contiguous() for part in parts], kind)
    whole = torch.cat(list(parts)).float()
    most = torch.finfo(kind).max
    scale = whole.abs().amax().clamp(min=1e-12).view(1) / most
    # rounding may exceed the largest float8 number
    cast = (whole / scale).clamp(-most, most).to(kind)
    return cast, cast.T.contiguous(), scale


def computes_float8(device: torch.device) -> bool:
    """Return whether the device has float8 matmuls; elsewhere they are emulated, slower than bf16."""
    if device.type != "cuda":
        return False
    amd = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
    # the capability of an MI250 is (9, 0), but it has no float8
    if amd.startswith("gfx"):
        return amd.startswith(_AMD_WITH_FLOAT8)
    return torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def has_float8_kernels(device: torch.device) -> bool:
    """Return whether the kernels here support the device's float8 format; AMD's is another."""
    return torch.version.hip is None and computes_float8(device)


def _by_kernel(tensor: Tensor) -> bool:
    return usable(tensor) and has_float8_kernels(tensor.device)


def swiglu(y: Tensor) -> Tensor:
    """Return silu(gate) * up for gate and up concatenated in y.

    The kernel's gain is in backward, where the compiler reads everything twice to write both halves.
    """
    if usable(y):
        return torch.ops.arriero.swiglu(y.contiguous())
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


@operator("arriero::swiglu")
def _swiglu(y: Tensor) -> Tensor:
    h = y.new_empty(*y.shape[:-1], y.shape[-1] // 2)
    launch = torch.library.wrap_triton(kernels("float8_triton").swiglu_forward)[_swiglu_grid(h)]
    launch(y, h, h.shape[-1], BLOCK=_SWIGLU_BLOCK, num_warps=8)
    return h


@operator("arriero::swiglu_backward")
def _swiglu_backward(gradient: Tensor, y: Tensor) -> Tensor:
    y_grad = torch.empty_like(y)
    launch = torch.library.wrap_triton(kernels("float8_triton").swiglu_backward)[_swiglu_grid(gradient)]
    launch(gradient, y, y_grad, gradient.shape[-1], BLOCK=_SWIGLU_BLOCK, num_warps=8)
    return y_grad


def _save_inputs(ctx, inputs, output) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _swiglu_gradient(ctx, gradient):
    return torch.ops.arriero.swiglu_backward(gradient.contiguous(), *ctx.saved_tensors)


_swiglu.register_autograd(_swiglu_gradient, setup_context=_save_inputs)


def _swiglu_grid(h: Tensor) -> tuple[int, int]:
    width = h.shape[-1]
    return h.numel() // width, -(-width // _SWIGLU_BLOCK)
