"""Compiling a block, and kernels of our own, change how its gradients are computed, not what they are."""

import pytest
import torch

from arriero.bench.parity import without_gradient
from arriero.model.language_model import plain_name
from arriero.model.presets import resolve
from gpu.alone import DEVICE, alone, made, relative_error

pytestmark = pytest.mark.gpu

SHAPES = {
    "llama": resolve("llama-test", {"dim": 192, "heads": 6, "kv_heads": 2, "ffn": 320, "vocab_size": 1031}),
    "gpt2": resolve("gpt2-test", {"dim": 192, "heads": 3, "ffn": 768, "vocab_size": 1031}),
}


def gradients(spec, dtype, compiled):
    """Those of one batch whose length is no multiple of a kernel's tile."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, spec.vocab_size, (3, 118), generator=generator).to(DEVICE)
    model = made(spec, compiled, weights=dtype, loss_chunk=96, kernels=compiled)
    loss = model(rows[:, :-1], labels_BT=rows[:, 1:]) / rows[:, 1:].numel()
    loss.backward()
    found = {plain_name(name): p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if not name.endswith(without_gradient(spec))}


@pytest.mark.parametrize("family", SHAPES)
def test_compiled_fp32_gradients_equal_eager_ones(family):
    def work():
        eager = gradients(SHAPES[family], torch.float32, compiled=False)
        found = gradients(SHAPES[family], torch.float32, compiled=True)
        assert found.keys() == eager.keys()
        return {name: relative_error(found[name], eager[name]) for name in eager}

    differences = alone(work)
    assert max(differences.values()) < 1e-4, differences


@pytest.mark.parametrize("family", SHAPES)
def test_compiled_bf16_gradients_are_as_exact_as_eager_ones(family):
    """Both round to 8 bits, in different places: each is held to fp64 on the same weights."""

    def work():
        eager = gradients(SHAPES[family], torch.bfloat16, compiled=False)
        found = gradients(SHAPES[family], torch.bfloat16, compiled=True)
        exact = exact_gradients(SHAPES[family])
        return {
            name: (relative_error(found[name], exact[name]), relative_error(eager[name], exact[name]))
            for name in exact
        }

    errors = alone(work)
    assert len(errors) > 10
    for name, (compiled, eager) in errors.items():
        assert compiled < 1.3 * eager + 2e-3, (name, compiled, eager)
        assert compiled < 0.05, (name, compiled)


def exact_gradients(spec):
    """Of the weights as bf16 has them."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, spec.vocab_size, (3, 118), generator=generator).to(DEVICE)
    model = made(spec, weights=torch.bfloat16, kernels=False).to(torch.float64)
    logits = model(rows[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
    found = {plain_name(name): p.grad for name, p in model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if not name.endswith(without_gradient(spec))}
