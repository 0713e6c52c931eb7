"""Recomputing and offloading change what is kept, never a gradient."""

import copy
import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from arriero.config.fields import ActivationCheckpointing, to_toml
from arriero.config.load import config_from_toml, load_run
from arriero.errors import UserError
from arriero.model.family import build_model
from arriero.model.language_model import plain_name
from arriero.model.layers import Block
from arriero.model.presets import expand, resolve
from arriero.parallel import activation_checkpointing
from arriero.parallel.activation_checkpointing import apply_activation_checkpointing
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from

FAMILIES = ["llama-test", "gpt2-test"]
KINDS = ["none", "full", "selective", "attention", "every:2", "fraction:1/3", "full:1/4+selective"]
LAYERS = 4


def model_of(name="llama-test", blocks=None):
    model = build_model(resolve(name, {"layers": LAYERS, "dim": 32, "ffn": 48, "head_dim": 8}))
    model.init_weights(1)
    if blocks is not None:
        model.keep(blocks)
    return model


def batch(model, masked=False):
    generator = torch.Generator().manual_seed(4)
    if model.embedding is None:
        x = torch.randn(2, 10, model.spec.dim, generator=generator).requires_grad_()
    else:
        x = torch.randint(0, 512, (2, 10), generator=generator)
    documents = (torch.arange(10) // 6).expand(2, 10) if masked else None
    return {"x": x, "documents_BT": documents}


def gradients(model, masked=False):
    given = batch(model, masked)
    out = model(**given)
    out.square().mean().backward()
    found = {plain_name(name): p.grad for name, p in model.named_parameters()}
    if given["x"].requires_grad:
        found["x"] = given["x"].grad
    return found


def assert_equal(ours, reference):
    assert ours.keys() == reference.keys()
    for name, gradient in reference.items():
        assert torch.equal(ours[name], gradient), name


def one_based(text, layers):
    return sorted(block + 1 for block in ActivationCheckpointing.parse(text).blocks(layers))


def test_a_fraction_of_the_blocks_is_spread_evenly():
    assert one_based("fraction:1/5", 15) == [3, 8, 13]
    assert one_based("fraction:1/3", 15) == [2, 5, 8, 11, 14]
    assert one_based("fraction:1/2", 15) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert one_based("fraction:3/5", 5) == [1, 3, 5]
    assert one_based("fraction:2/3", 3) == [1, 3]
    assert one_based("fraction:0", 15) == one_based("fraction:-1/2", 15) == []
    assert one_based("fraction:1", 15) == one_based("fraction:1.5", 15) == list(range(1, 16))


def test_a_fraction_selects_its_rounded_count_of_blocks():
    for layers in range(1, 40):
        for tenths in range(11):
            share = Fraction(tenths, 10)
            count = math.floor(share * layers + Fraction(1, 2))
            assert len(ActivationCheckpointing.parse(f"fraction:{tenths / 10}").blocks(layers)) == count
            assert ActivationCheckpointing("fraction", share) == ActivationCheckpointing.parse(
                f"fraction:{tenths / 10}"
            )


def test_which_blocks_are_checkpointed():
    assert one_based("every:3", 8) == [3, 6]
    assert one_based("every:1", 3) == one_based("full", 3) == one_based("selective", 3) == [1, 2, 3]
    assert one_based("none", 3) == one_based("budget:0.5", 3) == one_based("every:9", 3) == []


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "full",
        "selective",
        "every:2",
        "fraction:1/3",
        "selective:2/5",
        "full:1/2+attention",
        "budget:0.1",
    ],
)
def test_a_setting_is_written_and_read_back(text):
    assert str(ActivationCheckpointing.parse(text)) == text


def test_the_run_file_holds_the_setting(tmp_path):
    config = load_run(
        None, ["memory.activation_checkpointing=fraction:0.4", "memory.loss_chunk=false"], expand
    ).config
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert 'activation_checkpointing = "fraction:2/5"' in (tmp_path / "run.toml").read_text()
    assert config_from_toml(tmp_path / "run.toml") == config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("half", "is not a kind of activation checkpointing"),
        ("none:1/2", "is not a kind of activation checkpointing"),
        ("full:2", "no share of the blocks"),
        ("selective:", "no share of the blocks"),
        ("attention:1/4+every:2", "another mode"),
        ("attention:1/4+attention", "another mode"),
        ("every", "every how many blocks"),
        ("every:0", "every how many blocks"),
        ("every:1.5", "every how many blocks"),
        ("fraction:", "no share of the blocks"),
        ("fraction:1/0", "no share of the blocks"),
        ("fraction:nan", "no share of the blocks"),
        ("budget:1.1", "between 0 and 1"),
        ("budget:-0.1", "between 0 and 1"),
        ("budget:", "between 0 and 1"),
    ],
)
def test_an_invalid_setting_is_reported_with_an_example(text, says):
    with pytest.raises(UserError, match=rf"memory\.activation_checkpointing: .*{says}.*; write it like"):
        load_run(None, [f"memory.activation_checkpointing={text}"], expand)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_bit_identical(name, kind, offloads):
    for masked in (False, True):
        model = model_of(name)
        reference = gradients(copy.deepcopy(model), masked)
        apply_activation_checkpointing(model, ActivationCheckpointing.parse(kind), LAYERS, offload=offloads)
        assert_equal(gradients(model, masked), reference)


@pytest.mark.parametrize("kind", ["full", "selective", "every:3", "fraction:1/2"])
def test_a_pipeline_stage_recomputes_the_same_blocks_as_the_whole_model(kind):
    part = model_of(blocks=range(2, 4))
    reference = gradients(copy.deepcopy(part))
    apply_activation_checkpointing(part, ActivationCheckpointing.parse(kind), LAYERS)
    wrapped = {int(name) for name, block in part.blocks.items() if not isinstance(block, Block)}
    assert wrapped == ActivationCheckpointing.parse(kind).blocks(LAYERS) & {2, 3}
    assert wrapped
    assert_equal(gradients(part), reference)


def test_wrapped_blocks_keep_parameter_names_and_attributes():
    model = model_of()
    names = [name for name, _ in model.named_parameters()]
    attention = model.blocks["1"].attention
    apply_activation_checkpointing(model, ActivationCheckpointing.parse("full"), LAYERS, offload=True)
    assert [plain_name(name) for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names
    assert model.blocks["1"].attention is attention


@pytest.mark.parametrize("kind", ["none", "full", "every:2", "fraction:1/3"])
def test_only_the_selected_blocks_are_recomputed(kind):
    model = model_of()
    calls = Counter()
    for name, block in model.blocks.items():
        block.attention.register_forward_hook(lambda *_, name=name: calls.update([int(name)]))
    apply_activation_checkpointing(model, ActivationCheckpointing.parse(kind), LAYERS)
    gradients(model)
    again = {name for name, count in calls.items() if count == 2}
    assert again == ActivationCheckpointing.parse(kind).blocks(LAYERS)
    assert set(calls.values()) <= {1, 2}


@pytest.mark.parametrize("offloads", [False, True])
def test_a_recomputed_block_keeps_only_its_input(offloads, monkeypatch):
    kept = kept_bytes(monkeypatch, offloads)
    state = 2 * 10 * 32 * 4
    assert kept("full") <= LAYERS * state + 4096 < kept("fraction:1/2") / 3 < kept("none") / 5


def test_compiled_blocks_of_one_model_have_different_modes(monkeypatch):
    kept = kept_bytes(monkeypatch, False, "aot_eager")
    modes = {mode: kept(mode) for mode in ("none", "selective", "attention")}
    assert modes["none"] > modes["selective"] > modes["attention"]
    for mode, rest in (("attention", "selective"), ("selective", "none")):
        assert kept(f"{mode}:1/4+{rest}") == (modes[mode] + 3 * modes[rest]) / 4


def kept_bytes(monkeypatch, offloads, backend=None):
    """Return a function that measures the bytes blocks save for backward, or offload."""
    sizes = []

    class Weighed(activation_checkpointing.OffloadedTensor):
        def __init__(self, tensor, group):
            sizes.append(tensor.numel() * tensor.itemsize)
            super().__init__(tensor, group)

    def weigh(tensor):
        if not isinstance(tensor, torch.nn.Parameter) and tensor._base is None:
            sizes.append(tensor.numel() * tensor.itemsize)
        return tensor

    monkeypatch.setattr(activation_checkpointing, "OffloadedTensor", Weighed)

    def measure(kind):
        sizes.clear()
        model = model_of()
        apply_activation_checkpointing(model, ActivationCheckpointing.parse(kind), LAYERS, offload=offloads)
        if backend is not None:
            torch._dynamo.reset()
            for block in model.blocks.values():
                block.compile(backend=backend, dynamic=False)
        x = torch.randn(2, 10, 32, requires_grad=True)
        rotation = model.rotation(torch.arange(10)[None])
        with torch.autograd.graph.saved_tensors_hooks(weigh, lambda t: t):
            for block in model.blocks.values():
                x = block(x, rotation, None)
        return sum(sizes)

    return measure


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "linear", "linears"), [("llama-test", "mm", 7), ("gpt2-test", "addmm", 6)])
def test_selective_recomputes_every_second_matmul_and_no_attention(name, linear, linears):
    plain, selective, full, mixed = (
        operations_in_backward(name, kind) for kind in ("none", "selective", "full", "full:1/4+selective")
    )
    again = selective[linear] - plain[linear]
    # the last matmul's result is added and forgotten: recomputation stops before it
    assert again == LAYERS * ((linears - 1) // 2)
    assert full[linear] - plain[linear] == LAYERS * (linears - 1)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert selective[attention] == plain[attention] == 0
    assert full[attention] == LAYERS
    assert mixed[linear] == (full[linear] + 3 * selective[linear]) / 4
    assert mixed[attention] == 1


def operations_in_backward(name, kind):
    model = model_of(name)
    apply_activation_checkpointing(model, ActivationCheckpointing.parse(kind), LAYERS)
    loss = model(**batch(model)).square().mean()
    with Operations() as seen:
        loss.backward()
    return seen.counts


def test_each_activation_is_offloaded_once_and_no_weight(monkeypatch):
    moved = []

    class Seen(activation_checkpointing.OffloadedTensor):
        def __init__(self, tensor, group):
            moved.append(tensor.detach())
            super().__init__(tensor, group)

    monkeypatch.setattr(activation_checkpointing, "OffloadedTensor", Seen)
    model = model_of()
    apply_activation_checkpointing(model, ActivationCheckpointing.parse("none"), LAYERS, offload=True)
    gradients(model, masked=True)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert moved and not weights & {t.untyped_storage().data_ptr() for t in moved}
    assert len(moved) == len({(t.data_ptr(), t.shape, t.stride()) for t in moved})
    assert all(t.dtype == torch.float32 for t in moved), "the mask stays"


def test_a_prefetched_activation_is_released_after_its_last_use(monkeypatch):
    """A graph that is retained for a second pass must not hold activations on the device."""
    made = []

    class Seen(activation_checkpointing.OffloadedTensor):
        def __init__(self, tensor, group):
            super().__init__(tensor, group)
            made.append(self)

    monkeypatch.setattr(activation_checkpointing, "OffloadedTensor", Seen)
    model = model_of()
    apply_activation_checkpointing(model, ActivationCheckpointing.parse("none"), LAYERS, offload=True)
    model(**batch(model)).square().mean().backward(retain_graph=True)
    assert any(tensor.users > 1 for tensor in made)
    assert [tensor for tensor in made if tensor.on_device is not None] == []


def test_a_fraction_of_the_blocks_is_offloaded():
    model = model_of()
    apply_activation_checkpointing(model, ActivationCheckpointing.parse("none"), LAYERS, offload=0.5)
    kinds = [type(block) for block in model.blocks.values()]
    assert kinds.count(activation_checkpointing.OffloadedActivations) == LAYERS // 2
    assert_equal(gradients(model), gradients(model_of()))


def test_a_block_prefetches_its_activations_and_those_of_the_block_before(monkeypatch):
    asked = []

    class Seen(activation_checkpointing.OffloadGroup):
        def prefetch_all(self):
            asked.append(self)
            super().prefetch_all()

    made = []

    def make(*args):
        made.append(Seen(*args))
        return made[-1]

    monkeypatch.setattr(activation_checkpointing, "OffloadGroup", make)
    model = model_of()
    apply_activation_checkpointing(model, ActivationCheckpointing.parse("full"), LAYERS, offload=True)
    gradients(model)
    order = [made.index(group) for group in asked]
    assert order[:2] == [LAYERS - 1, LAYERS - 2] and order[-1] == 0
    assert [order.index(block) for block in range(LAYERS)] == sorted(
        (order.index(block) for block in range(LAYERS)), reverse=True
    )


@pytest.mark.parametrize(("kind", "offloads"), [("full", False), ("none", True), ("full", True)])
def test_backward_may_run_in_two_passes(kind, offloads):
    part = model_of(blocks=range(2, 4))
    reference = gradients(copy.deepcopy(part))
    apply_activation_checkpointing(part, ActivationCheckpointing.parse(kind), LAYERS, offload=offloads)
    given = batch(part)
    out = part(**given).square().mean()
    (x_grad,) = torch.autograd.grad(out, given["x"], retain_graph=True)
    names, weights = zip(*part.named_parameters(), strict=True)
    found = dict(zip(map(plain_name, names), torch.autograd.grad(out, weights), strict=True))
    assert_equal(found | {"x": x_grad}, reference)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("kind", "offloads"), [("full", False), ("selective", False), ("none", True), ("full", True)]
)
def test_compiled_gradients_equal_eager_ones(name, kind, offloads):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    model = model_of(name)
    reference = gradients(copy.deepcopy(model))
    apply_activation_checkpointing(model, ActivationCheckpointing.parse(kind), LAYERS, offload=offloads)
    for block in model.blocks.values():
        block.compile(backend=backend, fullgraph=True, dynamic=False)
    assert_equal(gradients(model), reference)
    assert graphs


def test_compiled_blocks_keep_what_the_setting_says(monkeypatch):
    """A budget of zero keeps less than checkpointing of whole blocks."""
    kept = kept_bytes(monkeypatch, offloads=False, backend="aot_eager_decomp_partition")
    sizes = [kept(kind) for kind in ("none", "budget:0.5", "budget:0")]
    assert sizes[0] > 1.5 * sizes[1] > 3 * sizes[2]
    assert sizes[0] > 2 * kept("selective") > 2 * kept("full")


def over_heads(model, mesh):
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"attention.{name}": columns for name in "qkv"} | {"attention.o": rows}
    plan |= {"ffn.gate": columns, "ffn.up": columns, "ffn.down": rows}
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)


def sharded(model, mesh):
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(("kind", "offloads"), [("none", True), ("full", True), ("selective", False)])
def test_gradients_are_equal_under_tensor_parallelism_and_fsdp(kind, offloads):
    def work():
        with process_group(world_from(), torch.device("cpu")):
            mesh = init_device_mesh("cpu", (2,))
            for split in (over_heads, sharded):
                found = []
                for checkpointing, offloaded in (("none", False), (kind, offloads)):
                    model = model_of()
                    if split is over_heads:
                        split(model, mesh)
                    apply_activation_checkpointing(
                        model, ActivationCheckpointing.parse(checkpointing), LAYERS, offload=offloaded
                    )
                    if split is sharded:
                        split(model, mesh)
                    found.append({name: whole(g) for name, g in gradients(model).items()})
                assert_equal(found[1], found[0])
        return True

    assert run_ranks(work, 2, leader_prints=False)


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def test_a_memory_budget_is_reset_by_the_next_run():
    apply_activation_checkpointing(model_of(), ActivationCheckpointing.parse("budget:0.25"), LAYERS)
    assert torch._functorch.config.activation_memory_budget == 0.25
    apply_activation_checkpointing(model_of(), ActivationCheckpointing.parse("none"), LAYERS)
    assert torch._functorch.config.activation_memory_budget == 1.0
