"""Attention inside documents on a GPU: exact for odd shapes, compiled once, memory linear in tokens."""

import pytest
import torch

from arriero.kernels import usable_on
from arriero.model.attention import AttentionCore, Documents, attend_by_document, document_mask
from gpu.alone import DEVICE, alone, relative_error

pytestmark = pytest.mark.gpu

# heads, kv heads, head dim, tokens
SHAPES = [(6, 2, 64, 333), (6, 2, 128, 333), (25, 25, 64, 257), (32, 8, 128, 1024), (5, 1, 80, 400)]


def documents_of(tokens, seed, rows=2):
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(rows, tokens, generator=generator) < torch.tensor([[3.0], [30.0]]) / tokens
    return begins.cumsum(1).int()


def inputs(heads, kv_heads, head_dim, tokens, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(11)
    shapes = [(2, tokens, width, head_dim) for width in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def attention(attend, mask, q, k, v, grad):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, mask)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flex_attention_equals_attention_per_document(shape):
    def work():
        assert usable_on(DEVICE)
        documents, given = documents_of(shape[-1], 3), inputs(*shape)
        mask = document_mask(documents, DEVICE)
        assert not isinstance(mask, Documents)
        found = attention(AttentionCore(), mask, *given)
        exact = attention(attend_by_document, Documents(documents), *(x.float() for x in given))
        return [relative_error(a, b) for a, b in zip(found, exact, strict=True)]

    out, *gradients = alone(work)
    assert out < 2**-7
    assert max(gradients) < 2**-6, gradients


def test_other_documents_do_not_recompile_or_synchronise():
    def work():
        given = inputs(8, 2, 64, 1024)
        compiled = torch.compile(lambda mask, *given: attention(AttentionCore(), mask, *given), dynamic=False)
        compiled(document_mask(documents_of(1024, 0), DEVICE), *given)
        with torch.compiler.set_stance("fail_on_recompile"):
            for seed in range(1, 6):
                documents = documents_of(1024, seed).pin_memory()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    mask = document_mask(documents, DEVICE)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                compiled(mask, *given)
        return True

    assert alone(work)


def test_memory_of_packed_rows_is_proportional_to_their_tokens():
    def work():
        peaks = []
        for tokens in (16_384, 65_536):
            given = inputs(4, 1, 64, tokens)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            attention(AttentionCore(), document_mask(documents_of(tokens, 1), DEVICE), *given)
            peaks.append(torch.cuda.max_memory_allocated() - before)
            del given
        return peaks

    short, long = alone(work)
    assert long < 5 * short
