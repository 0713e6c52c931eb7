"""Generation on a GPU gives the tokens of the CPU."""

import pytest
import torch

from model.test_generation import continued, prompts_of
from model.test_hf_names import lively, spec_of


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["five heads, one kv", "scaled rope", "gpt2, three heads"])
def test_greedy_decoding_on_a_gpu_gives_the_tokens_of_the_cpu(shape):
    model, prompts = lively(spec_of(shape)), prompts_of((1, 7, 33))
    expected = continued(model, prompts, 24)
    assert continued(model.to("cuda"), prompts, 24) == expected


@pytest.mark.gpu
def test_a_bf16_model_generates_on_a_gpu():
    model = lively(spec_of("gqa")).to("cuda", torch.bfloat16)
    assert [len(row) for row in continued(model, prompts_of((5, 40)), 24)] == [24, 24]
