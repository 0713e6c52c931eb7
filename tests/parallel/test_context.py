"""A sequence divided over ranks gives the loss and the gradients of the whole one."""

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from arriero.data.order.loader import IGNORED, Batch
from arriero.model.attention import AttentionCore, Documents
from arriero.model.family import build_model
from arriero.model.layers import Attention
from arriero.model.presets import load_preset
from arriero.parallel.context import apply_context_parallel, local_positions, shard_batch
from arriero.parallel.ring import (
    attention_tiles,
    merge,
    partial_attention,
    partial_attention_backward,
)
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from
from arriero.plan.layout import divide_context, tokens_divisor

TOKENS = 48
# the first row's documents end amid chunks; the second's end where chunks do, and one spans several chunks
LENGTHS = ((3, 20, 1, 19, 5), (6, 30, 6, 6))


@dataclass(frozen=True)
class Case:
    ulysses: int
    ring: int
    preset: str = "llama-test"
    documents: bool = False
    shape: dict[str, int] = field(default_factory=dict)

    def model(self):
        model = build_model(replace(load_preset(self.preset), **self.shape))
        model.init_weights(1)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, Attention):
                    # as drawn, all keys weigh nearly the same, and confusing them would hardly show
                    module.q.weight.mul_(8.0)
                    module.k.weight.mul_(8.0)
        return model

    def batch(self):
        torch.manual_seed(3)
        tokens, labels = torch.randint(512, (2, 2, TOKENS))
        labels[:, 5:8] = IGNORED
        if not self.documents:
            return Batch(0, tokens, labels)
        rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS]
        return Batch(0, tokens, labels, torch.stack(rows), documents_of(LENGTHS))


def documents_of(lengths):
    return torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths])


def gradients(model, batch, whole):
    inputs = (batch.tokens_BT, batch.positions_BT, batch.documents_BT, batch.labels_BT)
    loss = model(*inputs) / (whole.labels_BT != IGNORED).sum()
    loss.backward()
    with torch.no_grad():
        assert torch.equal(model(*inputs) / (whole.labels_BT != IGNORED).sum(), loss)
    grads = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return loss.detach(), grads


def part_of_a_rank(case, batch, change):
    mesh = init_device_mesh("cpu", (case.ring, case.ulysses), mesh_dim_names=("ring", "ulysses"))
    model = case.model()
    apply_context_parallel(model, mesh.get_group("ring"), mesh.get_group("ulysses"))
    change(model)
    held = local_positions(TOKENS, dist.get_rank(), case.ulysses, case.ring)
    loss, grads = gradients(model, shard_batch(batch, held), batch)
    for each in (loss, *grads.values()):
        dist.all_reduce(each)
    return loss, grads


def unlike_one_process(case, change=lambda _: None):
    """Return the largest error of loss and gradients, each relative to its largest element."""

    def work():
        torch.set_num_threads(1)
        with process_group(world_from(), torch.device("cpu")):
            batch = case.batch()
            loss, grads = part_of_a_rank(case, batch, change)
            whole_loss, whole = gradients(case.model(), batch, batch)
            errors = {name: distance(grad, whole[name]) for name, grad in grads.items()}
            return errors | {"loss": distance(loss, whole_loss)}

    errors = run_ranks(work, case.ulysses * case.ring, leader_prints=False)
    assert len(errors) > 10
    return {name: error for name, error in errors.items() if not error <= 1e-5}


def distance(value, true):
    # adding a constant to all scores of a query has no gradient: of GPT-2's key biases only rounding is left
    scale = true.abs().max() if true.abs().max() > 1e-7 else 1.0
    return ((value - true).abs().max() / scale).item()


ODD = {"dim": 48, "heads": 6, "kv_heads": 3, "head_dim": 8}
CASES = {
    "ulysses 2": Case(2, 1),
    "ulysses 2 of GPT-2, documents": Case(2, 1, "gpt2-test", documents=True),
    "ulysses 4 of 2 kv heads, documents": Case(4, 1, documents=True),
    "ulysses 3, odd heads": Case(3, 1, shape=ODD),
    "ring 2": Case(1, 2),
    "ring 2, odd heads, documents": Case(1, 2, documents=True, shape=ODD),
    "ring 3 of GPT-2": Case(1, 3, "gpt2-test"),
    "ring 4": Case(1, 4),
    "ring 4 of GPT-2, documents": Case(1, 4, "gpt2-test", documents=True),
    "ulysses 2 in ring 2": Case(2, 2),
    "ulysses 2 in ring 2, documents": Case(2, 2, documents=True),
    "ulysses 4 of 2 kv heads in ring 2, documents": Case(4, 2, documents=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_context_parallel_loss_and_gradients_equal_those_of_one_rank(case):
    assert unlike_one_process(case) == {}


def all_but_attention():
    kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    return create_selective_checkpoint_contexts(kept)


@pytest.mark.parametrize(
    "options", [{}, {"context_fn": all_but_attention}], ids=["whole", "all but attention"]
)
def test_recomputed_blocks_have_the_same_gradients(options):
    def recompute(model):
        for name, block in model.blocks.items():
            model.blocks[name] = checkpoint_wrapper(block, **options)

    assert unlike_one_process(Case(2, 2, documents=True), recompute) == {}


def test_compiled_blocks_have_the_same_gradients():
    def compile_blocks(model):
        for block in model.blocks.values():
            block.compile(backend="aot_eager", dynamic=False)

    assert unlike_one_process(Case(1, 2, documents=True, shape={"layers": 1}), compile_blocks) == {}


@pytest.mark.parametrize(
    ("cp", "heads", "kv_heads", "expected"),
    [
        (1, 4, 2, (1, 1)),
        (2, 4, 2, (2, 1)),
        (4, 4, 2, (4, 1)),
        (8, 4, 2, (4, 2)),
        (4, 6, 6, (2, 2)),
        (4, 6, 3, (1, 4)),
        (6, 6, 3, (6, 1)),
        (6, 9, 3, (3, 2)),
        (5, 4, 4, (1, 5)),
        (16, 32, 8, (16, 1)),
        (64, 32, 8, (32, 2)),
        (8, 1, 1, (1, 8)),
    ],
)
def test_ulysses_is_as_large_as_the_heads_allow_and_a_ring_is_the_rest(cp, heads, kv_heads, expected):
    assert divide_context(cp, heads, kv_heads) == expected


DEGREES = [(1, 1), (2, 1), (4, 1), (3, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (2, 4), (4, 2)]


@pytest.mark.parametrize(("ulysses", "ring"), DEGREES)
def test_every_position_is_on_one_rank_and_ranks_have_equally_many(ulysses, ring):
    length = 5 * tokens_divisor(ulysses, ring)
    held = [local_positions(length, rank, ulysses, ring) for rank in range(ulysses * ring)]
    assert {len(each) for each in held} == {length // (ulysses * ring)}
    assert torch.cat(held).sort().values.equal(torch.arange(length))
    with pytest.raises(ValueError, match="cannot be divided"):
        local_positions(length + 1, 0, ulysses, ring) if ulysses * ring > 1 else local_positions(1, 0, 2, 1)


def pairs_met(ring, length, documents):
    """Count how often each query attends to each key, per row, and the work of each step."""
    met, work = torch.zeros(2, length, length, dtype=torch.long), []
    for step in range(ring):
        work.append([])
        for rank in range(ring):
            source = (rank - step) % ring
            before = met.sum().item()
            for rows, queries, keys, causal in attention_tiles(rank, source, ring, length // ring, documents):
                at = local_positions(length, rank, 1, ring)[queries]
                to = local_positions(length, source, 1, ring)[keys]
                pairs = torch.ones(len(at), len(to), dtype=torch.long)
                for row in range(2)[rows]:
                    met[row][at[:, None], to] += pairs.tril() if causal else pairs
            work[-1].append(met.sum().item() - before)
    return met, work


@pytest.mark.parametrize("ring", [2, 3, 4])
def test_a_ring_computes_each_causal_pair_once_with_equal_work_per_rank(ring):
    met, work = pairs_met(ring, 12 * ring, None)
    assert met.equal(torch.ones_like(met).tril())
    assert all(len(set(step)) == 1 for step in work)


@pytest.mark.parametrize("ring", [2, 3, 4])
def test_a_ring_computes_each_pair_of_a_document_once(ring):
    numbers = documents_of(LENGTHS)
    met, _ = pairs_met(ring, TOKENS, Documents(numbers))
    assert met.equal((numbers[:, :, None] == numbers[:, None, :]).long().tril())


def test_a_sharded_batch_has_the_positions_of_its_tokens():
    batch = Case(1, 2).batch()
    held = local_positions(TOKENS, 1, 1, 2)
    part = shard_batch(batch, held)
    assert part.tokens_BT.equal(batch.tokens_BT[:, held])
    assert part.labels_BT.equal(batch.labels_BT[:, held])
    assert part.positions_BT.equal(held.expand(2, -1)) and part.documents_BT is None
    packed = shard_batch(Case(1, 2, documents=True).batch(), held)
    assert packed.positions_BT.max() == 29 and packed.documents_BT.shape == (2, TOKENS)


def attention_by_blocks(q, k, v, grad, documents, ring):
    """Compute on one device what the ranks of a ring compute."""
    held = [local_positions(q.shape[1], rank, 1, ring).to(q.device) for rank in range(ring)]
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, q, k, v))
    for rank, at in enumerate(held):
        mine, grad_here = q[:, at], grad[:, at]
        merged = torch.zeros_like(mine, dtype=torch.float32)
        lse = merged.new_empty(len(q), q.shape[2], len(at))
        met = [
            (source, tile)
            for source in ((rank - step) % ring for step in range(ring))
            for tile in attention_tiles(rank, source, ring, len(at), documents)
        ]
        for source, (rows, queries, keys, causal) in met:
            k_here, v_here = (x[:, held[source]][rows, keys] for x in (k, v))
            block = partial_attention(mine[rows, queries], k_here, v_here, causal)
            if not causal:
                block = merge(merged[rows, queries], lse[rows, :, queries], *block)
            merged[rows, queries], lse[rows, :, queries] = block
        out[:, at] = merged
        for source, (rows, queries, keys, causal) in met:
            k_here, v_here = (x[:, held[source]][rows, keys] for x in (k, v))
            given = (grad_here[rows, queries], mine[rows, queries], k_here, v_here)
            whole = merged.to(q.dtype)[rows, queries]
            more = partial_attention_backward(*given, whole, lse[rows, :, queries], causal)
            for total, where, part in zip(
                (dq, dk, dv), (at[queries], held[source][keys], held[source][keys]), more, strict=True
            ):
                total[rows, where] += part
    return out, dq, dk, dv


def attention_at_once(q, k, v, grad, documents):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = AttentionCore()(q, k, v, documents)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


def errors_of(results, true):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, true, strict=True)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_merged_partial_attention_is_as_exact_as_one_kernel(device, masked, dtype):
    def work():
        torch.manual_seed(5)
        shapes = ((2, TOKENS, 6, 16), (2, TOKENS, 3, 16), (2, TOKENS, 3, 16), (2, TOKENS, 6, 16))
        q, k, v, grad = (torch.randn(shape).to(device, dtype) for shape in shapes)
        documents = Documents(documents_of(LENGTHS)) if masked else None
        true = attention_at_once(*(x.double() for x in (q, k, v, grad)), documents)
        once = errors_of(attention_at_once(q, k, v, grad, documents), true)
        return once, errors_of(attention_by_blocks(q, k, v, grad, documents, 4), true)

    once, blocks = run_ranks(work, 1, leader_prints=False)
    limits = [1e-5] * 4 if dtype == torch.float32 else [1.5 * error for error in once]
    assert all(b <= limit for b, limit in zip(blocks, limits, strict=True)), (blocks, limits)
