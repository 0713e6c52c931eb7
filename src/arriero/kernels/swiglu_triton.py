"""The kernels of `arriero.kernels.swiglu`: a program takes a block of one row."""

import triton
import triton.language as tl


@triton.jit
def swiglu_forward(y, h, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(y + row * 2 * width + at, mask=inside).to(tl.float32)
    up = tl.load(y + row * 2 * width + width + at, mask=inside).to(tl.float32)
    tl.store(h + row * width + at, (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(gradient, y, y_grad, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(y + row * 2 * width + at, mask=inside).to(tl.float32)
    up = tl.load(y + row * 2 * width + width + at, mask=inside).to(tl.float32)
    slope = tl.load(gradient + row * width + at, mask=inside).to(tl.float32)
    share = tl.sigmoid(gate)
    gate_grad = slope * up * share * (1.0 + gate * (1.0 - share))
    kind = y_grad.dtype.element_ty
    tl.store(y_grad + row * 2 * width + at, gate_grad.to(kind), mask=inside)
    tl.store(y_grad + row * 2 * width + width + at, (slope * gate * share).to(kind), mask=inside)
