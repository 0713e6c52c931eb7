"""Transforming a model changes neither its initial weights nor its gradients."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from arriero.config.fields import ActivationCheckpointing
from arriero.config.schema import MemorySection, PrecisionSection
from arriero.model.family import build_model
from arriero.model.presets import load_preset
from arriero.parallel.apply import ModelOptions, parallelize
from arriero.parallel.fsdp import Sharding
from arriero.parallel.loss import LossOptions
from arriero.parallel.mesh import make_mesh
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import World, process_group, world_from
from arriero.plan.layout import Layout

CPU = torch.device("cpu")


def options(compiled=False, checkpointing="none", splits_backward=False, **precision):
    return ModelOptions(
        sharding=Sharding(torch.float32, torch.float32, True, 1, False),
        compiled=compiled,
        async_tp=False,
        memory=MemorySection(activation_checkpointing=ActivationCheckpointing.parse(checkpointing)),
        precision=PrecisionSection(**precision),
        loss=LossOptions(16),
        splits_backward=splits_backward,
        widths_vary=False,
        weights=torch.float32,
        seed=1,
    )


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_ranks(layout, work):
    def as_rank():
        torch.set_num_threads(1)
        world = world_from()
        with process_group(world, CPU):
            return work(make_mesh(layout, world, 1, CPU))

    return run_ranks(as_rank, layout.ranks, leader_prints=False)


@pytest.fixture
def eagerly_traced(monkeypatch):
    """Trace compiled blocks but execute them eagerly."""
    compiled = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compiled(self, backend="aot_eager", **options)
    )


@pytest.mark.usefixtures("eagerly_traced")
@pytest.mark.parametrize("widths_vary", [False, True])
def test_blocks_are_compiled_for_any_length_only_if_lengths_vary(widths_vary, caplog):
    """By default torch would compile for any size as soon as it sees a second one, such as in validation."""
    torch._dynamo.reset()
    torch._logging.set_logs(dynamic=logging.INFO)
    how = replace(options(compiled=True), widths_vary=widths_vary)
    mesh = make_mesh(Layout(), World(), 1, CPU)
    [model], _ = parallelize(load_preset("llama-test"), [range(2)], mesh, how, CPU)
    with torch.no_grad():
        model(torch.ones(2, 16, dtype=torch.long))
    model(torch.ones(3, 24, dtype=torch.long)).sum().backward()
    torch._logging.set_logs()
    assert "create_env" in caplog.text
    assert ("create_symbol" in caplog.text) is widths_vary


# graphs of the forward pass: one with gradients and one without, for all blocks; a tiled block is compiled in
# parts, and document masks on a CPU break the graph inside each function around them
GRAPHS = {"plain": 2, "float8": 2, "full": 2, "selective": 2, "tiles": 5, "documents": 10}


@pytest.mark.usefixtures("eagerly_traced")
@pytest.mark.parametrize("name", ["llama-test", "gpt2-test"])
@pytest.mark.parametrize("mode", GRAPHS)
def test_all_blocks_share_the_same_compiled_graphs(name, mode, monkeypatch):
    """Replaced modules must not make the compiler treat blocks differently."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: compiled(f, **more | {"backend": "aot_eager"}))
    precision = {"compute": "bf16", "float8": "tensorwise"} if mode == "float8" else {}
    kind = mode if mode in ("full", "selective") else "none"
    how = options(compiled=True, checkpointing=kind, **precision)
    if mode == "tiles":
        how = replace(how, memory=how.memory.model_copy(update={"ffn_tile": 16}))
    spec = replace(load_preset(name), layers=4)
    [model], _ = parallelize(spec, [range(4)], make_mesh(Layout(), World(), 1, CPU), how, CPU)
    tokens = torch.ones(2, 32, dtype=torch.long)
    documents = torch.arange(4).repeat_interleave(8).expand(2, -1) if mode == "documents" else None
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        model(tokens, documents_BT=documents, labels_BT=tokens).backward()
    with torch.no_grad():
        model(tokens, documents_BT=documents, labels_BT=tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == GRAPHS[mode]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-test", Layout(dp_shard=3)),
        ("llama-test", Layout(dp_replicate=2)),
        ("llama-test", Layout(dp_shard=3, tp=2)),
        ("gpt2-test", Layout(dp_shard=3)),
        ("gpt2-test", Layout(pp=2, tp=2)),
    ],
    ids=str,
)
def test_initial_weights_are_bit_identical_in_every_layout(name, layout):
    """This includes rows that do not divide evenly over fsdp or tp."""
    spec = replace(load_preset(name), layers=3, vocab_size=509)

    def work(mesh):
        stages = [range(2), range(2, 3)] if layout.pp == 2 else [range(3)]
        [part], _ = parallelize(spec, stages[mesh.coordinate("pp") :][:1], mesh, options(), CPU)
        plain = build_model(spec)
        plain.init_weights(1)
        expected = dict(plain.named_parameters())
        expected.setdefault("head.weight", expected["embedding.weight"])
        held = dict(part.named_parameters())
        assert held
        for parameter_name, parameter in held.items():
            assert torch.equal(whole(parameter), expected[parameter_name]), parameter_name
        return len(held)

    assert in_ranks(layout, work) > 10


def gradients(spec, mesh, how):
    [model], _ = parallelize(spec, [range(spec.layers)], mesh, how, CPU)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, spec.vocab_size, (4, 33), generator=generator)
    rows = slice(2 * mesh.batch_rank, 2 * mesh.batch_rank + 2) if mesh.layout.batch == 2 else slice(None)
    loss = model(x[rows, :-1], labels_BT=x[rows, 1:]) / 128
    loss.backward()
    named = list(model.named_parameters())
    return {name: whole(parameter.grad) for name, parameter in named}


@pytest.mark.usefixtures("eagerly_traced")
@pytest.mark.parametrize(
    ("layout", "checkpointing"),
    [
        (Layout(tp=2), "none"),
        (Layout(tp=2), "full"),
        (Layout(dp_shard=2, tp=2), "none"),
        (Layout(dp_shard=2, tp=2), "selective"),
    ],
    ids=str,
)
def test_compiled_gradients_equal_eager_ones_for_every_parameter(layout, checkpointing):
    """A compiled block fed by a collective can silently lose the embedding's gradient."""
    spec = load_preset("llama-test")

    def work(mesh):
        eager = gradients(spec, mesh, options())
        compiled = gradients(spec, mesh, options(compiled=True, checkpointing=checkpointing))
        for (name, expected), found in zip(eager.items(), compiled.values(), strict=True):
            assert expected.norm() > 0, name
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=name)
        return len(eager)

    assert in_ranks(layout, work) == 21


@pytest.mark.parametrize(
    ("given", "norms", "gelus"),
    [
        (options(), True, True),
        (options(compiled=True), True, True),
        (options(checkpointing="selective"), True, True),
        # the compiler cannot look into kernels to choose what to compute again
        (options(compiled=True, checkpointing="selective"), False, False),
        (options(compiled=True, checkpointing="budget:0.5"), False, False),
        # torch 2.11 would give norms no gradient
        (options(splits_backward=True), False, True),
        (options(compute="bf16", float8="tensorwise"), True, False),
    ],
)
def test_blocks_use_kernels_where_these_fit(given, norms, gelus, monkeypatch):
    """The choice is the same on every device; only a GPU can test the kernels."""
    elementwise = SimpleNamespace(
        Processors=SimpleNamespace(of=lambda device: (device, 1)),
        ResidualLayerNorm=type("ResidualLayerNorm", (nn.LayerNorm,), {}),
        LinearGelu=type("LinearGelu", (nn.Linear,), {}),
    )
    monkeypatch.setattr("arriero.parallel.apply.usable_on", lambda _: True)
    monkeypatch.setattr("arriero.parallel.apply.kernels", lambda _: elementwise)
    mesh = make_mesh(Layout(), World(), 1, CPU)
    [model], _ = parallelize(load_preset("gpt2-test"), [range(2)], mesh, given, CPU)
    blocks = list(model.blocks.values())
    for block in blocks:
        for norm in (block.attention_norm, block.ffn_norm):
            assert isinstance(norm, elementwise.ResidualLayerNorm) is norms
        assert isinstance(block.ffn.up, elementwise.LinearGelu) is gelus
        assert isinstance(block.ffn.activation, nn.Identity) is gelus
    if norms:
        # or each block would be compiled again
        assert len({id(block.ffn_norm.processors) for block in blocks}) == 1


class Processors(NamedTuple):
    """Stand in for the kernels' description of a GPU."""

    count: int

    @classmethod
    def of(cls, _device):
        return cls(4)


class TwoResults(torch.autograd.Function):
    """Like the kernel norm, return the input for the residual connection beside the norm."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, processors):
        y, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.processors = processors
        return x.view_as(x), y

    @staticmethod
    def backward(ctx, residual, gradient):
        x, weight, bias, mean, scale = ctx.saved_tensors
        assert ctx.processors.count == 4
        x_grad, weight_grad, bias_grad = torch.ops.aten.native_layer_norm_backward(
            gradient, x, x.shape[-1:], mean, scale, weight, bias, [True, True, True]
        )
        return x_grad + residual, weight_grad, bias_grad, None, None


class ResidualLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return TwoResults.apply(input, self.weight, self.bias, self.eps, self.processors)


class LinearGelu(nn.Linear):
    def forward(self, input):
        return F.gelu(super().forward(input), approximate="tanh")


@pytest.mark.usefixtures("eagerly_traced")
@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_with_kernel_modules_share_graphs_and_keep_their_gradients(compiled, monkeypatch):
    """The kernels themselves need a GPU: modules with the same interface stand in for them."""
    mesh = make_mesh(Layout(), World(), 1, CPU)
    spec = replace(load_preset("gpt2-test"), layers=4)
    expected = gradients(spec, mesh, options())
    elementwise = SimpleNamespace(
        Processors=Processors, ResidualLayerNorm=ResidualLayerNorm, LinearGelu=LinearGelu
    )
    monkeypatch.setattr("arriero.parallel.apply.usable_on", lambda _: True)
    monkeypatch.setattr("arriero.parallel.apply.kernels", lambda _: elementwise)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = gradients(spec, mesh, options(compiled=compiled))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == int(compiled)


def test_llama_has_no_kernels_to_load(monkeypatch):
    """Its norms and activations are as fast when compiled."""
    monkeypatch.setattr("arriero.parallel.apply.usable_on", lambda _: True)
    mesh = make_mesh(Layout(), World(), 1, CPU)
    [model], _ = parallelize(load_preset("llama-test"), [range(2)], mesh, options(), CPU)
    assert {type(block.ffn_norm) for block in model.blocks.values()} == {nn.RMSNorm}
