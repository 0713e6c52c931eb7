"""The chunked loss is the plain loss: same value, same gradients, without ever holding the logits."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arriero.model.family import build_model
from arriero.model.layers import logits_loss
from arriero.model.presets import resolve
from arriero.parallel.loss import ChunkedLossHead, LossOptions, chunked_loss
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import process_group, world_from

VOCAB, DIM = 37, 8


def in_chunks(*args, **more):
    """Return the chunked loss with these options."""
    return partial(chunked_loss, options=LossOptions(*args, **more))


def states(batch=2, length=9, dtype=torch.float32, vocab=VOCAB, dim=DIM, ignored=3):
    """Return states whose logits differ by several units, so that the softmax is not flat."""
    generator = torch.Generator().manual_seed(7)
    x = (2.0 * torch.randn(batch, length, dim, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (batch, length), generator=generator)
    labels.view(-1)[:ignored] = -100
    return x, weight, labels


def with_gradients(loss, x, weight, labels, scale=0.25):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    value = loss(x, weight, labels)
    (value * scale).backward()
    return value.detach(), x.grad, weight.grad


def loss_with_z(z):
    """Compute cross-entropy plus z times the squared log of the sum of the softmax, with autograd."""

    def loss(x, weight, labels):
        log_sum = F.linear(x, weight).float().logsumexp(-1)
        return logits_loss(x, weight, labels) + z * (log_sum.square() * (labels != -100)).sum()

    return loss


def assert_same(ours, reference, rtol=2e-5, atol=2e-6):
    for mine, theirs in zip(ours, reference, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("chunk", [1, 4, 6, 18, 1000, False])
def test_every_chunk_size_gives_the_same_loss_and_gradients(chunk):
    given = states()
    assert_same(with_gradients(in_chunks(chunk), *given), with_gradients(logits_loss, *given))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 7), (1, 13), (5, 2)])
def test_any_number_of_tokens_works(batch, length):
    given = states(batch, length, ignored=0)
    assert_same(with_gradients(in_chunks(4), *given), with_gradients(logits_loss, *given))


def test_masked_tokens_do_not_count_even_if_they_fill_a_chunk():
    x, weight, labels = states(ignored=11)
    value, x_grad, weight_grad = with_gradients(in_chunks(4, z_loss=0.1), x, weight, labels)
    assert_same([value], [logits_loss(x, weight, labels).detach()])
    assert torch.equal(x_grad.flatten(0, 1)[:11], torch.zeros(11, DIM))
    kept = x.flatten(0, 1)[None, 11:], weight, labels.flatten()[None, 11:]
    alone = with_gradients(in_chunks(4, z_loss=0.1), *kept)
    assert_same([value, weight_grad], [alone[0], alone[2]])

    labels.fill_(-100)
    for result in with_gradients(in_chunks(4, z_loss=0.1), x, weight, labels):
        assert torch.equal(result, torch.zeros_like(result))


def test_the_bf16_loss_is_as_exact_as_the_plain_one():
    """Softmax and sums are in fp32; only logits and results are rounded to bf16, by 2**-8."""
    x, weight, labels = states(4, 32, dtype=torch.bfloat16, vocab=300, dim=32)
    ours = with_gradients(in_chunks(24), x, weight, labels)
    assert_same(ours, with_gradients(logits_loss, x, weight, labels), rtol=2**-7, atol=2**-7)
    exact = with_gradients(logits_loss, x.double(), weight.double(), labels)
    plain = with_gradients(logits_loss, x, weight, labels)
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        error = (mine.double() - truth).norm() / truth.norm()
        assert error <= 1.2 * (theirs.double() - truth).norm() / truth.norm() + 2**-9


def test_the_weight_gradient_of_many_chunks_is_summed_in_fp32():
    """Summed in bf16, the last of a thousand equal chunks would not change the sum."""
    x = torch.ones(1, 1024, 4, dtype=torch.bfloat16)
    weight = torch.zeros(2, 4, dtype=torch.bfloat16)
    labels = torch.zeros(1, 1024, dtype=torch.long)
    _, _, gradient = with_gradients(in_chunks(1), x, weight, labels, scale=1.0)
    assert gradient[0].tolist() == [-512.0] * 4 and gradient[1].tolist() == [512.0] * 4


@pytest.mark.parametrize("chunk", [5, False])
def test_the_z_loss_changes_gradients_but_not_the_value(chunk):
    given = states()
    value, *gradients = with_gradients(in_chunks(chunk, z_loss=0.03), *given)
    assert_same([value], [logits_loss(*given).detach()])
    assert_same(gradients, with_gradients(loss_with_z(0.03), *given)[1:])
    plain = with_gradients(logits_loss, *given)
    assert not torch.allclose(gradients[1], plain[2], rtol=1e-2)


def as_float8(tensor, kind):
    """Round to float8 with one scale for the tensor."""
    scale = tensor.detach().abs().max() / torch.finfo(kind).max
    return (tensor.detach() / scale).to(kind).float() * scale


@pytest.mark.parametrize("chunk", [4, False])
def test_a_float8_head_multiplies_rounded_operands(chunk):
    x, weight, labels = states(2, 16, dim=16, vocab=48, ignored=0)
    value, x_grad, weight_grad = with_gradients(in_chunks(chunk, float8=True), x, weight, labels, scale=1.0)
    total, x_grads, weight_grads = 0.0, [], []
    weight8 = as_float8(weight, torch.float8_e4m3fn)
    tokens = x.flatten(0, 1).split(chunk or 32)
    for x_CD, labels_C in zip(tokens, labels.flatten().split(chunk or 32), strict=True):
        x8 = as_float8(x_CD, torch.float8_e4m3fn)
        logits = x8 @ weight8.T
        total += F.cross_entropy(logits, labels_C, reduction="sum")
        logits_grad = logits.softmax(-1) - F.one_hot(labels_C, 48)
        logits_grad8 = as_float8(logits_grad, torch.float8_e5m2)
        x_grads.append(logits_grad8 @ weight8)
        weight_grads.append(logits_grad8.T @ x8)
    assert_same([value], [total])
    assert_same([x_grad.flatten(0, 1), weight_grad], [torch.cat(x_grads), sum(weight_grads)])
    assert not torch.allclose(x_grad, with_gradients(logits_loss, x, weight, labels, scale=1.0)[1], rtol=1e-2)


def test_evaluation_does_not_use_float8():
    x, weight, labels = states(dim=16)
    with torch.no_grad():
        value = in_chunks(4, float8=True)(x, weight, labels)
    assert_same([value], [logits_loss(x, weight, labels).detach()])


def test_large_logits_do_not_overflow():
    x, weight, labels = states()
    given = (x.detach() * 200, weight, labels)
    ours = with_gradients(in_chunks(4), *given)
    assert all(part.isfinite().all() for part in ours)
    assert_same(ours, with_gradients(logits_loss, *given))


def test_gradients_that_are_not_needed_are_not_computed():
    x, weight, labels = states()
    frozen = in_chunks(4)(x, weight.detach(), labels)
    assert torch.autograd.grad(frozen, x)[0].isfinite().all()
    with LargestMade() as without, torch.no_grad():
        value = in_chunks(4, z_loss=0.5)(x, weight, labels)
    assert not value.requires_grad
    assert value.item() == pytest.approx(logits_loss(x, weight, labels).item(), rel=1e-6)
    assert without.matmuls == math.ceil(labels.numel() / 4)


class LargestMade(TorchDispatchMode):
    """Record the size of the largest tensor an operation returns, and count matmuls."""

    def __init__(self):
        super().__init__()
        self.elements, self.matmuls = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.matmuls += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *made])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_one_chunk_of_logits_exists(dtype):
    x, weight, labels = states(2, 64, dtype=dtype, vocab=300, dim=4)
    with LargestMade() as chunked:
        in_chunks(8, z_loss=0.1)(x, weight, labels).backward()
    assert chunked.elements == 8 * 300
    with LargestMade() as plain:
        logits_loss(x, weight, labels).backward()
    assert plain.elements == 128 * 300


def test_both_gradients_may_be_computed_one_after_the_other():
    """A schedule that splits the backward pass runs this node twice on the same graph."""
    given = states()
    _, x_grad, weight_grad = with_gradients(logits_loss, *given, scale=1.0)
    x, weight, labels = given
    value = in_chunks(4)(x, weight, labels)
    first = torch.autograd.grad(value, x, retain_graph=True)
    again = torch.autograd.grad(value, x, retain_graph=True)
    then = torch.autograd.grad(value, weight)
    assert torch.equal(first[0], again[0])
    assert_same([*first, *then], [x_grad, weight_grad])


@pytest.mark.parametrize("name", ["llama-test", "gpt2-test"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_gets_the_same_gradients_from_its_head(name, tied):
    spec = resolve(name, {"tied": tied, "vocab_size": 61})
    tokens = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(3))
    found = []
    for chunked in (False, True):
        model = build_model(spec)
        model.init_weights(1)
        if chunked:
            model.head = ChunkedLossHead.of(model.head, LossOptions(5))
        value = model(tokens, labels_BT=tokens.roll(-1, 1))
        value.backward()
        found.append([value.detach(), *(p.grad for p in model.parameters())])
    assert_same(found[1], found[0], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_sharded_model_gets_the_same_gradients(tied):
    """Weights are gathered only for the forward pass of the head."""
    tokens = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(3))

    def gradients(chunked, shards):
        model = build_model(resolve("llama-test", {"tied": tied, "vocab_size": 61}))
        model.init_weights(1)
        if chunked:
            model.head = ChunkedLossHead.of(model.head, LossOptions(5))
        if shards:
            for part in (*model.blocks.values(), model):
                fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
        model(tokens, labels_BT=tokens.roll(-1, 1)).backward()
        return [p.grad.full_tensor() if shards else p.grad for p in model.parameters()]

    def work():
        with process_group(world_from(), torch.device("cpu")):
            assert_same(gradients(True, True), gradients(False, False), rtol=1e-4)
        return True

    assert run_ranks(work, 2, leader_prints=False)


def over_slices(ranks, vocab, make_loss, ignored=3):
    """Return the combined loss and gradients of all ranks, and those of one process."""

    def work():
        with process_group(world_from(), torch.device("cpu")):
            x, weight, labels = states(vocab=vocab, ignored=ignored)
            value, partial, rows = make_loss(x.detach(), weight.detach(), labels)
            values, row_sizes = [None] * ranks, [None] * ranks
            dist.all_gather_object(values, value.item())
            dist.all_gather_object(row_sizes, rows)
            dist.all_reduce(partial)
            return values, partial, torch.cat(row_sizes)

    return run_ranks(work, ranks, leader_prints=False)


def by_dtensor(x, weight, labels):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    sharded = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    x.requires_grad_()
    value = in_chunks(4, z_loss=0.02)(x, sharded, labels)
    (value * 0.25).backward()
    assert isinstance(sharded.grad, DTensor) and sharded.grad.placements == (Shard(0),)
    return value.detach(), x.grad, sharded.grad.to_local()


@pytest.mark.parametrize(("ranks", "vocab"), [(2, 36), (2, 37), (3, 36), (3, 37)])
def test_a_split_vocabulary_gives_the_loss_of_the_whole(ranks, vocab):
    values, x_grad, weight_grad = over_slices(ranks, vocab, by_dtensor)
    assert len(set(values)) == 1
    given = states(vocab=vocab)
    reference = with_gradients(loss_with_z(0.02), *given)
    assert_same([torch.tensor(values[0])], [logits_loss(*given).detach()])
    assert_same([x_grad, weight_grad], reference[1:])


def test_a_rank_without_a_vocabulary_row_is_an_error_on_every_rank():
    def work():
        with process_group(world_from(), torch.device("cpu")):
            mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
            x, weight, labels = states(vocab=4)
            with pytest.raises(ValueError, match="without any"):
                in_chunks(4)(x, distribute_tensor(weight.detach(), mesh, [Shard(0)]), labels)
        return True

    assert run_ranks(work, 3, leader_prints=False)


def test_the_heads_gradient_may_be_too_large_for_fp16_before_it_is_scaled():
    tokens = 4096
    x = torch.full((1, tokens, 4), 9.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(5, 4, dtype=torch.float16, requires_grad=True)
    labels = torch.ones(1, tokens, dtype=torch.long)
    for chunk in (False, 1000):
        loss = in_chunks(chunk)(x, weight, labels)
        (gradient,) = torch.autograd.grad(loss / tokens, weight)
        assert gradient.dtype == torch.float16
        torch.testing.assert_close(gradient[1], torch.full((4,), -7.2, dtype=torch.float16))
