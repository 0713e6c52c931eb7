"""How a mixer convolves and scans: by the kernels of `causal-conv1d` and `mamba-ssm`, or in plain PyTorch.

A kernel is used on a GPU if it is installed and its results and gradients there agree with plain PyTorch.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arriero.model.mamba.scan import CHUNK, ScanInputs, causal_conv, chunked_scan

_SCAN = ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
_CONV = ("causal_conv1d", "causal_conv1d_fn")
# relative difference of bf16 results that counts as equal
_TOLERANCE = 2e-2
_LONG = 16 * CHUNK


def convolve(x_BTC: Tensor, taps_CK: Tensor, bias_C: Tensor | None, document_BT: Tensor | None) -> Tensor:
    """Return SiLU of the causal convolution."""
    if x_BTC.is_cuda and x_BTC.shape[-1] % 8 == 0 and 2 <= taps_CK.shape[1] <= 4 and _agrees(*_CONV):
        return _kernel_conv(x_BTC, taps_CK, bias_C, document_BT)
    return F.silu(causal_conv(x_BTC, taps_CK, bias_C, document_BT, None))


def scan(inputs: ScanInputs, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the results of the scan, and the states after the last token in fp32."""
    if inputs.x_BTHP.is_cuda and _agrees(*_SCAN):
        return _kernel_scan(inputs, chunk)
    # in long sequences smaller chunks would only mean more states
    is_long = inputs.x_BTHP.shape[1] >= _LONG
    return chunked_scan(inputs, CHUNK if is_long else min(chunk, CHUNK))


# compiled code calls the kernels as they are: their autograd functions cannot be traced
@torch.compiler.disable
def _kernel_conv(x_BTC: Tensor, taps_CK: Tensor, bias_C: Tensor | None, document_BT: Tensor | None) -> Tensor:
    numbers = None if document_BT is None else document_BT.int()
    kernel = _imported(*_CONV)
    if any(stride % 8 for stride in x_BTC.stride()[:2]):
        # contiguous() returns a single token as it is, whatever its strides
        x_BTC = x_BTC.clone(memory_format=torch.contiguous_format)
    return kernel(x_BTC.transpose(1, 2), taps_CK, bias_C, seq_idx=numbers, activation="silu").transpose(1, 2)


@torch.compiler.disable
def _kernel_scan(inputs: ScanInputs, chunk: int) -> tuple[Tensor, Tensor]:
    *tensors, document_BT = inputs
    numbers = None if document_BT is None else document_BT.int()
    return _imported(*_SCAN)(*tensors, chunk, seq_idx=numbers, return_final_states=True)


def _imported(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


@torch.compiler.assume_constant_result
def _agrees(module: str, name: str) -> bool:
    return _checked(module, name)


@cache
def _checked(module: str, name: str) -> bool:
    """Return whether a kernel is installed and computes what plain PyTorch does, on random input."""
    try:
        _imported(module, name)
    except ImportError:
        return False
    try:
        off = _difference(*(_scan_trial() if (module, name) == _SCAN else _conv_trial()))
    except Exception as error:  # a broken installation may raise anything
        off, reason = float("inf"), f"fails: {error}"
    else:
        reason = f"differs from plain PyTorch by {off:.1e}"
    if off > _TOLERANCE:
        warnings.warn(f"{module}.{name} {reason}; plain PyTorch is used instead", stacklevel=2)
    return off <= _TOLERANCE


def _scan_trial() -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    tensors = _random((1, 300, 4, 64), (1, 300, 4), (4,), (1, 300, 1, 64), (1, 300, 1, 64))
    dt, rate = tensors[1].float().detach().abs(), -tensors[2].float().detach().abs()
    document_BT = (torch.arange(300, device="cuda") > 170).int()[None]

    def plain(x: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return chunked_scan(ScanInputs(x, dt, rate, b, c, document_BT), 64)[0]

    def kernel(x: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return _kernel_scan(ScanInputs(x, dt, rate, b, c, document_BT), 64)[0]

    return plain, kernel, [tensors[0], *tensors[3:]]


def _conv_trial() -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    document_BT = (torch.arange(300, device="cuda") > 170).int()[None]

    def plain(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        return F.silu(causal_conv(x, taps, bias, document_BT, None))

    return plain, partial(_kernel_conv, document_BT=document_BT), _random((1, 300, 64), (64, 4), (64,))


def _random(*shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(*shape, generator=generator, device="cuda") for shape in shapes]
    return [each.bfloat16().requires_grad_() for each in made]


@torch.enable_grad()
def _difference(
    plain: Callable[..., Tensor], kernel: Callable[..., Tensor], tensors: Sequence[Tensor]
) -> float:
    """Return the largest relative difference of results and gradients."""
    found = []
    for function in (plain, kernel):
        y = function(*tensors)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), tensors)])
    pairs = [(a.double(), b.double()) for a, b in zip(*found, strict=True)]
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)
