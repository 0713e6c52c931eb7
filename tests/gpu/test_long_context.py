"""A sequence of 131,072 tokens: what must be in memory, counted, and what was."""

import pytest
import torch

from arriero.config.schema import OptimSection
from arriero.data.order.loader import Batch
from arriero.model.presets import resolve
from arriero.train.forward_backward import ForwardBackward
from arriero.train.model_state import ModelState
from arriero.train.optim.optimizer import Optimizer
from gpu.alone import DEVICE, MESH, alone, made

pytestmark = pytest.mark.gpu

TOKENS, CHUNK = 131_072, 2048
SPEC = resolve("llama3.1-8b", {"layers": 2})


def bytes_needed():
    """A bf16 number has 2 bytes, an fp32 one 4."""
    widths = SPEC.dim, SPEC.ffn, SPEC.kv_heads * SPEC.head_dim
    dim, ffn, kv = (2 * TOKENS * width for width in widths)
    # bf16 weights, and in fp32 their masters, two moments and gradients
    state = SPEC.parameters * (2 + 4 + 8 + 4)
    # of each block its input; what goes into the last norm and out of it
    inputs = (SPEC.layers + 2) * dim
    # one block's own: input, two norms, queries before and after rotation, attention, its sum; gradients of
    # five of them; keys and values likewise; gate, up and their product, and the gradient of each
    block = 12 * dim + 8 * kv + 6 * ffn
    # bf16 logits of one chunk beside their fp32 scores
    chunk = CHUNK * SPEC.vocab_size * (2 + 4)
    return state + inputs + block + chunk


def test_a_step_of_131072_tokens_takes_the_memory_that_was_counted():
    def work():
        model = made(SPEC, compiled=True, checkpointing="full", loss_chunk=CHUNK)
        optimizer = Optimizer(ModelState.of([model], torch.bfloat16), OptimSection())
        passes = ForwardBackward([model], MESH, 1, DEVICE)
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(0, SPEC.vocab_size, (1, TOKENS + 1), generator=generator)
        torch.cuda.reset_peak_memory_stats()
        loss = passes.gradients(Batch(0, rows[:, :-1], rows[:, 1:]))
        norm = optimizer.step(1e-4)
        return loss.item(), norm.item(), torch.cuda.max_memory_allocated()

    loss, norm, peak = alone(work)
    # of random tokens nothing is known: the logarithm of the vocabulary, 11.76, and half the logits' variance
    assert 11.5 < loss < 13.0
    assert 0.0 < norm < 1e3
    assert peak < 1.15 * bytes_needed(), (peak / 2**30, bytes_needed() / 2**30)
