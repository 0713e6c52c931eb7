"""The traced costs of a block agree with the formulas of model/spec.py and with a real block."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from arriero.model.costs import (
    Mode,
    OperatorCost,
    block_costs,
    block_memory,
    block_shapes,
    register_operator_cost,
)
from arriero.model.family import build_model, families, register_model
from arriero.model.language_model import LanguageModel
from arriero.model.llama.module import Llama
from arriero.model.presets import load_preset, resolve
from arriero.model.spec import flops_per_token
from memory_gauge import LiveTensors

LENGTH = 8192
SPEC = load_preset("llama3.2-1b")


@pytest.mark.parametrize("name", ["llama3.1-8b", "gpt2-1.5b", "llama-test", "qwen3-0.6b", "mistral-7b"])
@pytest.mark.parametrize("compiled", [True, False])
def test_flops_of_the_traced_block_are_those_of_the_formula(name, compiled):
    spec = load_preset(name)
    costs = block_costs(spec, compiled)
    # hfu counts the product that attention computes again in its backward pass
    blocks = flops_per_token(spec, LENGTH, "hfu") - 6 * spec.embedding_parameters
    assert spec.layers * costs.flops(1, spec.attended(LENGTH)) == pytest.approx(blocks, rel=1e-9)
    assert costs.parameters == spec.block_parameters


def test_matmuls_have_shape_module_and_placement():
    forward = {
        each.module: each for each in block_costs(SPEC, compiled=True).forward if each.kind == "matmul"
    }
    assert forward["ffn.down"].shape == (None, SPEC.dim, SPEC.ffn)
    assert forward["ffn.down"].split == "row-wise" and forward["attention.q"].split == "column-wise"
    assert forward["ffn.down"].flops == 2 * SPEC.dim * SPEC.ffn
    assert forward["ffn.down"].read.fixed == 2 * SPEC.dim * SPEC.ffn


def test_a_compiled_block_keeps_less_and_moves_fewer_bytes():
    eager, compiled = (block_costs(SPEC, compiled) for compiled in (False, True))
    assert compiled.kept.per_token < 0.7 * eager.kept.per_token
    moved = [sum(op.bytes_at(LENGTH) for op in each.backward) for each in (eager, compiled)]
    assert moved[1] < 0.6 * moved[0]


def test_llama_keeps_the_inputs_of_its_matmuls_of_attention_and_of_the_activation():
    kv = SPEC.kv_heads * SPEC.head_dim
    # input, two norms, q, output of attention, output of its projection; gate, up and their product
    elements = 6 * SPEC.dim + 2 * kv + 3 * SPEC.ffn
    statistics = 4 * (2 + SPEC.heads)
    assert block_costs(SPEC, compiled=True).kept.per_token == 2 * elements + statistics


def test_fused_projections_keep_the_concatenated_weight():
    apart, fused = (block_costs(SPEC, True, fused_qkv=fused) for fused in (False, True))
    width = SPEC.attention_width + 2 * SPEC.kv_heads * SPEC.head_dim
    assert fused.kept.fixed - apart.kept.fixed == 2 * width * SPEC.dim
    assert fused.flops(1, LENGTH) == apart.flops(1, LENGTH)


@pytest.mark.parametrize("element", [2, 4])
def test_eager_peak_is_that_of_a_real_block(element):
    """One block runs on the CPU with the operators of the trace, attention included, and is measured."""
    spec, tokens = replace(load_preset("gpt2-test"), layers=1), 512
    model = build_model(spec).to(torch.bfloat16 if element == 2 else torch.float32)
    x = torch.zeros(1, tokens, spec.dim, dtype=model.embedding.weight.dtype, requires_grad=True)
    block = next(iter(model.blocks.values()))
    # the gauge counts a weight when it is transposed for a matmul
    weights = sum(p.nbytes for p in block.parameters() if p.ndim == 2)
    with LiveTensors() as live:
        y = block(x, None, None)
        kept = live.now() - weights - y.nbytes + x.nbytes
        y.backward(torch.zeros_like(y))
    costs = block_costs(spec, compiled=False, element=element)
    assert costs.kept.at(tokens) == pytest.approx(kept, rel=0.01)
    # the gauge also counts the result, which the next block holds
    peak = live.peak() - weights - y.nbytes + x.nbytes
    assert costs.backward_peak.at(tokens) == pytest.approx(peak, rel=0.05)


@torch.library.custom_op("arriero_test::scan", mutates_args=())
def scan(x: Tensor) -> Tensor:
    return x.cumsum(1)


@scan.register_fake
def _(x):
    return torch.empty_like(x)


scan.register_autograd(lambda _, gradient: gradient.flip(1).cumsum(1).flip(1))


class ScanBlock(nn.Module):
    """A block of an outside family, with an operator that only its author knows."""

    def __init__(self, dim):
        super().__init__()
        self.mix = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTD, _rotation, _mask):
        return x_BTD + self.mix(torch.ops.arriero_test.scan(x_BTD))


class ScanModel(Llama):
    def __init__(self, spec):
        LanguageModel.__init__(
            self, spec, [ScanBlock(spec.dim) for _ in range(spec.layers)], nn.RMSNorm(spec.dim)
        )

    def rotation(self, positions):
        return None


def test_a_registered_family_is_costed_with_the_cost_of_its_own_operator():
    family = replace(families()["llama"], name="scan", build=ScanModel, placements={}, presets=None)
    register_model(family)
    try:
        register_operator_cost(
            "arriero_test::scan",
            lambda shapes, _: OperatorCost("elementwise", flops=3.0 * shapes[0][1] * shapes[0][2]),
        )
        costs = block_costs(replace(SPEC, family="scan"), compiled=True)
    finally:
        del families()["scan"]
    found = {each.name: each for each in costs.forward}
    assert found["scan"].flops == 3 * SPEC.dim
    assert found["scan"].read.per_token == found["scan"].written.per_token == 2 * SPEC.dim
    assert found["mm"].shape == (None, SPEC.dim, SPEC.dim)
    # the input, which the scan reads, and the scan's result, which the matmul reads
    assert costs.kept.per_token == 2 * 2 * SPEC.dim


MEMORY_MODES = [(True, True, 2), (False, False, 4), (True, False, 4), (False, False, 2)]
# every family in a compiled and an uncompiled mode, three of them in all
MEMORY_CASES = [
    (name, *mode)
    for name, modes in {
        "llama3.1-8b": 2, "llama3.2-3b": 2, "gpt2-1.5b": 4, "llama-test": 4, "qwen3-0.6b": 4, "qwen2.5-7b": 2
    }.items()
    for mode in MEMORY_MODES[:modes]
]  # fmt: skip
MEMORY_CASES += [("llama-test", True, False, 2), ("gpt2-1.5b", True, True, 4)]


@pytest.mark.parametrize(("name", "compiled", "fused", "element"), MEMORY_CASES)
def test_memory_formulas_of_the_families_are_those_of_the_traced_module(name, compiled, fused, element):
    """An uncompiled module is traced as it runs on a CPU; a GPU has an operator for RMSNorm."""
    spec = load_preset(name)
    costs = block_costs(spec, compiled, element, fused)
    formula = block_memory(spec, Mode(compiled, element, on_gpu=compiled, fused_qkv=fused))
    traced = block_memory_of_an_unknown_family(spec, Mode(compiled, element, fused_qkv=fused))
    assert block_shapes(spec) == costs.shapes
    assert formula.kept.per_token == pytest.approx(costs.kept.per_token, rel=1e-6)
    assert formula.kept.fixed == pytest.approx(costs.kept.fixed, rel=1e-3, abs=1e5)
    assert formula.attention == traced.attention and formula.selective == traced.selective
    assert formula.gathered == traced.gathered
    if compiled:
        whole = [each.kept.at(LENGTH) + each.working.at(LENGTH) for each in (formula, traced)]
        assert whole[0] == pytest.approx(whole[1], rel=0.06)


def block_memory_of_an_unknown_family(spec, mode):
    known = families()[spec.family]
    families()["unknown"] = replace(known, name="unknown", block_memory=None, block_shapes=None)
    try:
        return block_memory(replace(spec, family="unknown"), mode)
    finally:
        del families()["unknown"]


@pytest.mark.parametrize("chunk", [1, 16, 20, 256])
def test_a_mixer_is_traced_whatever_its_chunks_are(chunk):
    """The operators of a traced block must not depend on the length."""
    spec = resolve("mamba2-test", {"extra": {"chunk": chunk}})
    assert block_costs(spec, compiled=False).shapes == block_shapes(load_preset("mamba2-test"))
