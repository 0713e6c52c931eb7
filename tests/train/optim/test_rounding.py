import torch

from arriero.config.schema import OptimSection
from arriero.train.model_state import ModelState
from arriero.train.optim.number_formats import (
    Noise,
    high_half,
    low_half,
    merge_fp32,
    split_fp32,
    third_half,
    to_bf16,
)
from arriero.train.optim.optimizer import Optimizer

NOISE = Noise(1, torch.device("cpu"))


def rounded(values, step=1):
    return to_bf16(values, low_half(NOISE.bits(step, "w", 0, values.numel()))).float()


def test_stochastic_rounding_takes_a_neighbour_and_its_mean_is_the_value():
    count = 1 << 18
    for value in (1.001, -1.001, 3e-5, -77.3, 1e-39):
        values = torch.full((count,), value)
        got = rounded(values)
        neighbours = got.unique()
        assert len(neighbours) == 2
        gap = neighbours[1] - neighbours[0]
        assert neighbours[0] < value < neighbours[1]
        # five standard errors of the mean of that many coin tosses
        assert abs(got.double().mean().item() - values[0].item()) < 5 * 0.5 * gap.item() / count**0.5


def test_the_three_halves_of_the_same_bits_are_uniform_and_independent():
    bits = NOISE.bits(1, "w", 0, 1 << 20)
    halves = [half(bits).double() / 2**16 - 0.5 for half in (low_half, high_half, third_half)]
    for number, half in enumerate(halves):
        assert abs(half.mean().item()) < 5 * (1 / 12) ** 0.5 / 2**10
        assert abs(half.var().item() - 1 / 12) < 1e-3
        for other in halves[:number]:
            assert abs((half * other).mean().item()) < 5 / 12 / 2**10


def test_fp32_splits_into_the_nearest_bf16_and_the_rest_of_its_bits():
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 18,), generator=torch.Generator().manual_seed(1))
    # each of the last is no number, and to some of them nothing can be added
    strange = torch.tensor([0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x7F800001, -1, -(1 << 22)])
    values = torch.cat((bits, strange)).int().view(torch.float32)
    upper, lower = split_fp32(values)
    assert (upper.dtype, lower.dtype) == (torch.bfloat16, torch.int16)
    numbers = ~values.isnan()
    assert torch.equal(merge_fp32(upper, lower)[numbers].view(torch.int32), values[numbers].view(torch.int32))
    assert torch.equal(upper.isnan(), values.isnan())
    usual = values.isfinite() & upper.isfinite()
    off, least = (values - upper.float()).abs(), (values - values.bfloat16().float()).abs()
    assert torch.equal(off[usual], least[usual])


def test_numbers_that_bf16_represents_are_not_rounded():
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**100, float("inf"), -float("inf")])
    for step in range(50):
        assert torch.equal(rounded(exact, step), exact)
    assert rounded(torch.tensor([float("nan")])).isnan().all()


def test_random_bits_are_a_function_of_seed_step_name_and_shard():
    first = NOISE.bits(3, "w", 0, 100)
    NOISE.bits(4, "w", 0, 7)
    assert torch.equal(NOISE.bits(3, "w", 0, 100), first)
    others = [Noise(2, torch.device("cpu")).bits(3, "w", 0, 100)]
    others += [NOISE.bits(4, "w", 0, 100), NOISE.bits(3, "v", 0, 100), NOISE.bits(3, "w", 1, 100)]
    assert not any(torch.equal(first, other) for other in others)


def test_updates_below_the_resolution_of_bf16_add_up_on_average():
    """Each of 20 steps is 1/16 of the distance to the next bf16 below: rounded to nearest, all are lost."""
    weight = torch.nn.Parameter(torch.ones(1 << 14, 1, dtype=torch.bfloat16))
    config = OptimSection(name="sgd", weight_decay=0.0, clip=False)
    optimizer = Optimizer(ModelState({"w": weight}), config, seed=5)
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step(lr=2.0**-12)
    moved = 1 - weight.detach().float().mean().item()
    assert abs(moved - 20 * 2.0**-12) < 0.02 * 20 * 2.0**-12
