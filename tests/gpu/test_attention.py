"""Causal attention of any number of heads takes cuDNN's kernel where it is the fastest, and is exact."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from arriero.model.attention import AttentionCore
from gpu.alone import DEVICE, alone, relative_error

pytestmark = pytest.mark.gpu

# heads, kv heads, head dim, tokens
SHAPES = [(6, 2, 64, 333), (6, 2, 128, 333), (25, 25, 64, 257), (32, 8, 128, 1024)]


class Kernels(TorchDispatchMode):
    """Which attention kernels were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.__name__.split(".")[0]
        if "attention" in name:
            self.names.add(name)
        return operation(*args, **(kwargs or {}))


def inputs(heads, kv_heads, head_dim, tokens):
    generator = torch.Generator().manual_seed(11)
    widths = (heads, kv_heads, kv_heads, heads)
    shapes = [(2, tokens, width, head_dim) for width in widths]
    return [torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16) for shape in shapes]


def attention(q, k, v, grad):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = AttentionCore()(q, k, v, None)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def prefers_cudnn():
    """As torch decides: on NVIDIA's server GPUs of Hopper and after, with a cuDNN that is new enough."""
    version = torch.backends.cudnn.version() or 0
    return torch.version.hip is None and (
        torch.cuda.get_device_capability(DEVICE) in ((9, 0), (10, 0)) and version >= 90900
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_causal_attention_uses_the_cudnn_kernel(shape):
    def work():
        if not prefers_cudnn():
            return None
        with Kernels() as kernels:
            attention(*inputs(*shape))
        return kernels.names

    names = alone(work)
    if names is None:
        pytest.skip("torch does not take cuDNN's attention on this GPU")
    assert names == {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_in_bf16_is_that_of_plain_arithmetic_in_fp32(shape):
    """To the rounding of bf16, 2**-8, in the probabilities and in the result; groups of heads are summed."""

    def work():
        given = inputs(*shape)
        found = attention(*given)
        with sdpa_kernel(SDPBackend.MATH):
            exact = attention(*(x.float() for x in given))
        return [relative_error(a, b) for a, b in zip(found, exact, strict=True)]

    out, *gradients = alone(work)
    assert out < 2**-7
    assert max(gradients) < 2**-6, gradients
