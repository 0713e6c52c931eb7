"""Attention inside documents is that of each document alone, and nothing of size T x T is made."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from arriero.model.attention import (
    Documents,
    attend_by_blocks,
    attend_by_document,
    attend_causally,
    block_mask,
    document_starts,
)
from arriero.model.family import build_model
from arriero.model.presets import resolve


def numbered(lengths):
    return torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths]).int()


def random_documents(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(3, tokens, generator=generator) < torch.tensor([[3.0], [20.0], [0.0]]) / tokens
    return begins.cumsum(1).int()


def dense(documents, window=None):
    same = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    return same if window is None else same.triu(1 - window)


def qkv(batch, tokens, heads=6, kv_heads=2, head_dim=16, seed=3):
    torch.manual_seed(seed)
    shapes = [(batch, tokens, width, head_dim) for width in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def masked(q, k, v, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 5, 48])
@pytest.mark.parametrize(
    "lengths", [((7, 1, 1, 30, 9), (48,)), ((1,) * 48, (47, 1))], ids=["mixed", "extreme"]
)
def test_attention_by_document_equals_attention_with_a_dense_mask(lengths, window):
    documents = numbered(lengths)
    inputs = qkv(2, 48)
    found = attend_by_document(*inputs, Documents(documents), window)
    exact = masked(*inputs, dense(documents, window))
    assert torch.allclose(found, exact, atol=1e-12)
    weight = torch.randn_like(exact)
    grads = [torch.autograd.grad((out * weight).sum(), inputs) for out in (found, exact)]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("window", [1, 100, 128, 300, 301])
def test_a_sliding_window_longer_or_shorter_than_a_chunk_equals_a_dense_mask(window):
    inputs = qkv(1, 300)
    exact = masked(*inputs, dense(torch.zeros(1, 300), window))
    assert torch.allclose(attend_causally(*inputs, window), exact, atol=1e-12)


@pytest.mark.parametrize("tokens", [128, 512, 333, 1000])
@pytest.mark.parametrize("window", [None, 1, 127, 128, 200])
def test_the_block_mask_equals_the_one_torch_computes_from_all_pairs(tokens, window):
    for seed in range(4 if window is None else 1):
        documents = random_documents(tokens, seed)
        found = block_mask(documents, window)
        expected = create_block_mask(found.mask_mod, 3, None, tokens, tokens, device="cpu")
        for name in ("kv", "full_kv", "q", "full_q"):
            counts = getattr(found, f"{name}_num_blocks")
            assert counts.equal(getattr(expected, f"{name}_num_blocks")), name
            indices, wanted = (getattr(mask, f"{name}_indices") for mask in (found, expected))
            used = torch.arange(indices.shape[-1]) < counts[..., None]
            assert torch.where(used, indices, -1).equal(torch.where(used, wanted, -1)), name


@pytest.mark.parametrize("window", [None, 1, 30])
def test_the_block_mask_is_causal_inside_documents_and_the_window(window):
    documents = random_documents(200, 7)
    at = torch.arange(200)
    seen = block_mask(documents, window).mask_mod(torch.arange(3)[:, None, None], 0, at[:, None], at)
    assert seen.equal(dense(documents, window)[:, 0])


def test_documents_start_where_their_first_token_is():
    assert document_starts(numbered([(3, 1, 2)])).tolist() == [[0, 0, 0, 3, 4, 4]]


@pytest.mark.parametrize("path", ["blocks", "documents"])
def test_other_documents_do_not_recompile_a_block(path):
    calls = []

    def counting(graph, _):
        calls.append(graph)
        return graph.forward

    def attention(q, k, v, mask):
        q = q * 2.0
        if path == "blocks":
            return attend_by_blocks(q, k, v, mask)
        return attend_by_document(q, k, v, mask)

    torch._dynamo.reset()
    compiled = torch.compile(attention, backend=counting, dynamic=False)
    inputs = [x.detach().float() for x in qkv(3, 256)]
    for seed in range(4):
        documents = random_documents(256, seed)
        out = compiled(*inputs, block_mask(documents) if path == "blocks" else Documents(documents))
        exact = masked(2.0 * inputs[0], *inputs[1:], dense(documents))
        assert torch.allclose(out, exact, atol=1e-5)
        if seed == 0:
            compiled_once = len(calls)
    assert len(calls) == compiled_once


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


def test_no_tensor_of_all_pairs_of_tokens_is_allocated():
    tokens = 4096
    model = build_model(resolve("llama-test", {"vocab_size": 64, "layers": 1, "max_seq_len": tokens}))
    model.init_weights(1)
    documents = random_documents(tokens, 5)
    with Largest() as largest:
        x = torch.randint(64, (3, tokens))
        model(x, documents_BT=documents, labels_BT=x).backward()
        block_mask(documents)
    assert largest.elements < tokens * tokens / 4
