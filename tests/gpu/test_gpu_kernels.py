"""Each kernel beside its PyTorch reference, on random numbers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arriero.kernels import float8
from arriero.kernels.float8 import swiglu
from arriero.model.layers import converted
from arriero.model.quantized import pack, packed_linear, unpack
from arriero.train.optim.number_formats import Noise, PlainFormat, merge_fp32
from arriero.train.optim.rules import adamw_reference_
from gpu.alone import DEVICE, alone, relative_error

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = (7, 2048, 5000, 123_457)


def fresh(*shape, dtype=BF16, std=1.0):
    return (torch.randn(*shape, device=DEVICE) * std).to(dtype)


def out_of_line(tensor):
    """The same numbers from one element later on: no multiple of 16 bytes."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)[1:]
    return moved.copy_(tensor)


@pytest.mark.parametrize("shifted", [False, True], ids=["in line", "out of line"])
@pytest.mark.parametrize(
    ("weights", "moments", "halves"),
    [(BF16, BF16, False), (BF16, FP32, True), (BF16, BF16, True), (FP32, FP32, False)],
    ids=["bf16, stochastic rounding", "fp32 in halves", "fp32 in halves, bf16 moments", "fp32"],
)
def test_multi_tensor_adamw_equals_the_reference(weights, moments, halves, shifted):
    def work():
        from arriero.kernels.multi_tensor import Parameters, Rates, adamw_

        noise = Noise(1, DEVICE)
        w = [fresh(n, dtype=weights) for n in SIZES]
        g = [fresh(n, dtype=weights) for n in SIZES]
        g = [out_of_line(each) for each in g] if shifted else g
        m, v = ([torch.zeros(n, dtype=moments, device=DEVICE) for n in SIZES] for _ in range(2))
        low = [torch.randint(-999, 999, (n,), dtype=torch.int16, device=DEVICE) for n in SIZES]
        low = low if halves else []
        decays = torch.tensor([0.1, 0.0, 0.1, 0.3], device=DEVICE)
        keys = torch.stack([noise.key(str(n), 0) for n in SIZES])
        references = [[t.clone() for t in each] for each in (w, low, m, v)]
        for step in (1, 2, 3, 4):
            unbiased = (0.01 / (1 - 0.9**step), (1 - 0.95**step) ** -0.5)
            rates = Rates(0.01, 0.9, 1 - 0.9, 0.95, 1 - 0.95, 1e-8)
            step_key = noise.step_key(step)
            # the fourth step is not accepted, and must change nothing
            scalars = torch.tensor([0.7, *unbiased, float(step < 4)], device=DEVICE)
            adamw_(Parameters(w, low, g, m, v, decays, keys), rates, scalars, step_key)
            for i in range(len(SIZES)):
                adamw_reference_(
                    references[0][i],
                    references[1][i] if halves else None,
                    g[i],
                    [references[2][i]],
                    [references[3][i]],
                    PlainFormat(moments),
                    PlainFormat(moments),
                    keys[i],
                    torch.tensor(step_key, dtype=torch.int32, device=DEVICE),
                    1 - 0.01 * decays[i],
                    scalars,
                    0.9,
                    0.95,
                    1e-8,
                )
        if halves:
            w, references[0] = (
                [merge_fp32(*pair) for pair in zip(*each, strict=True)] for each in ((w, low), references[:2])
            )
        return [
            relative_error(a, b)
            for ours, reference in zip((w, m, v), (references[0], *references[2:]), strict=True)
            for a, b in zip(ours, reference, strict=True)
        ]  # fmt: skip

    # a last bit of fp32 may tip a coin, of one element in many
    assert max(alone(work)) < 1e-4


@pytest.mark.parametrize("shifted", [False, True], ids=["in line", "out of line"])
def test_multi_tensor_sum_of_squares_equals_the_reference(shifted):
    def work():
        from arriero.kernels.multi_tensor import sum_of_squares

        tensors = [out_of_line(fresh(n)) if shifted else fresh(n) for n in SIZES]
        return sum_of_squares(tensors).item(), sum(t.double().square().sum() for t in tensors).item()

    found, expected = alone(work)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("outs", [(512,), (256, 64, 64), (48,)])
@pytest.mark.parametrize("tokens", [256, 100])
def test_float8_products_and_gradients_equal_emulated_ones(tokens, outs):
    def work():
        torch.manual_seed(1)
        x = fresh(tokens, 128).requires_grad_()
        weights = [fresh(out, 128, std=0.02).requires_grad_() for out in outs]
        gradient = fresh(tokens, sum(outs), std=1e-3)
        here = [x.detach().cpu().requires_grad_(), *(w.detach().cpu().requires_grad_() for w in weights)]
        found, expected = float8.linears(x, weights), float8.linears(here[0], here[1:])
        grads = torch.autograd.grad(found, [x, *weights], gradient)
        references = torch.autograd.grad(expected, here, gradient.cpu())
        pairs = zip([found, *grads], [expected, *references], strict=True)
        return [relative_error(a.detach().cpu(), b.detach()) for a, b in pairs]

    # an element on the border between two float8 numbers may fall to either side
    assert max(alone(work)) < 0.02


def test_swiglu_of_a_joint_matrix_equals_the_reference():
    def work():
        y = fresh(3, 50, 2 * 5000).requires_grad_()
        exact = y.detach().double().cpu().requires_grad_()
        gradient = fresh(3, 50, 5000)
        found, expected = swiglu(y), swiglu(exact)
        (mine,) = torch.autograd.grad(found, y, gradient)
        (theirs,) = torch.autograd.grad(expected, exact, gradient.double().cpu())
        return relative_error(found.detach().cpu(), expected.detach()), relative_error(mine.cpu(), theirs)

    assert max(alone(work)) < 2**-8


def beside_exact(kernel, plain, layer, x):
    """The results and, for the same gradients of these, every gradient: each beside the plain one in fp64."""
    exact, exact_x = copy.deepcopy(layer).double(), x.double().requires_grad_()
    results, expected = kernel(x.requires_grad_()), plain(exact, exact_x)
    given = [fresh(*result.shape, dtype=result.dtype) for result in results]
    gradients = torch.autograd.grad(results, [x, *layer.parameters()], given)
    exact_given = [gradient.double() for gradient in given]
    expected_gradients = torch.autograd.grad(expected, [exact_x, *exact.parameters()], exact_given)
    pairs = zip([*results, *gradients], [*expected, *expected_gradients], strict=True)
    return [relative_error(a.detach(), b.detach()) for a, b in pairs]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_layer_norm_with_residual_matches_pytorch_for_any_width(dtype):
    def work():
        from arriero.kernels.elementwise import Processors, ResidualLayerNorm

        found = {}
        for rows, width in ((1, 16), (37, 100), (1031, 1600), (300, 4096), (70, 8192), (9, 16384)):
            norm = nn.LayerNorm(width, eps=1e-5, device=DEVICE, dtype=dtype)
            for parameter in norm.parameters():
                nn.init.normal_(parameter, mean=1.0)
            kernel = converted(norm, ResidualLayerNorm)
            kernel.processors = Processors.of(DEVICE)
            x = fresh(1, rows, width, dtype=dtype)
            found[rows, width] = beside_exact(kernel, lambda norm, x: (x, norm(x)), norm, x)
        return found

    for size, differences in alone(work).items():
        assert max(differences) < (2**-7 if dtype is BF16 else 1e-5), (size, differences)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_gelu_and_its_bias_match_pytorch_for_any_size(dtype):
    def work():
        from arriero.kernels.elementwise import LinearGelu

        def plain(layer, x):
            return [F.gelu(layer(x), approximate="tanh")]

        found = {}
        for rows, width in ((1, 16), (37, 100), (1031, 6400)):
            layer = nn.Linear(64, width, device=DEVICE, dtype=dtype)
            kernel = converted(layer, LinearGelu)
            x = fresh(rows, 64, dtype=dtype)
            found[rows, width] = beside_exact(lambda x, k=kernel: [k(x)], plain, layer, x)
        return found

    for size, differences in alone(work).items():
        assert max(differences) < (2**-7 if dtype is BF16 else 1e-5), (size, differences)


def test_slices_of_the_vocabulary_have_the_gradient_of_the_whole():
    """As the ranks of tensor parallelism compute it, which exchange their statistics between the halves."""

    def work():
        from arriero.kernels.cross_entropy import logits_grad_, loss_and_logits_grad_, softmax_statistics

        logits, labels = fresh(64, 1000, std=3.0), torch.randint(0, 1000, (64,), device=DEVICE)
        labels[::5] = -100
        slices = [logits[:, :600].contiguous(), logits[:, 600:].contiguous()]
        targets = [labels.where((labels >= 0) & (labels < 600), -1), (labels - 600).where(labels >= 600, -1)]
        loss = loss_and_logits_grad_(logits, 1000, labels, -100, 0.0)
        pairs = list(zip(slices, targets, strict=True))
        found = [softmax_statistics(part, part.shape[1], target) for part, target in pairs]
        top = torch.maximum(found[0][0], found[1][0])
        total = sum(each[1] * (each[0] - top).exp() for each in found)
        counted = labels != -100
        for (part, target), own in zip(pairs, found, strict=True):
            share = counted * (own[0] - top).exp() / total
            logits_grad_(part, part.shape[1], target, own[0], share)
        joined_loss = ((total.log() + top - found[0][2] - found[1][2]) * counted).sum()
        return relative_error(joined_loss, loss), relative_error(torch.cat(slices, dim=1), logits)

    value, gradient = alone(work)
    assert value < 1e-6 and gradient < 2**-8


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("shape", [(7, 100), (130, 257), (3, 1), (2048, 4096)])
def test_dequantised_weights_equal_the_reference(kind, shape):
    def work():
        packed = pack(fresh(*shape, dtype=FP32, std=0.02), kind)
        x = torch.eye(shape[1], device=DEVICE)
        for dtype in (BF16, FP32):
            found = packed_linear(x.to(dtype), packed)
            assert torch.equal(found, unpack(packed, shape[1], dtype).T)
        assert torch.equal(unpack(packed.cpu(), shape[1]), unpack(packed, shape[1]).cpu())

    alone(work)
