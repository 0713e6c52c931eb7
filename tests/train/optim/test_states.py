import pytest
import torch

from arriero.train.optim.number_formats import BLOCK, SIGNED, UNSIGNED, Moment, Noise, low_half

FORMATS = [(kind, name) for kind in ("signed", "unsigned") for name in SIGNED]
NOISE = Noise(1, torch.device("cpu"))


def format_of(kind, name):
    return (SIGNED if kind == "signed" else UNSIGNED)[name]


def samples(kind, count=3 * BLOCK + 77):
    """Sizes over eight orders of magnitude, a block of zeros among them."""
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(count, generator=generator) * torch.logspace(-8, 0, count)
    values[BLOCK : 2 * BLOCK] = 0.0
    return values if kind == "signed" else values.square()


@pytest.mark.parametrize(("kind", "name"), FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_reading_and_writing_again_is_exact(kind, name, stochastic):
    held, values = format_of(kind, name), samples(kind)
    for step in range(20):
        half = low_half(NOISE.bits(step, "w", 0, values.numel())) if stochastic else None
        stored = held.write(values * (1 + 0.1 * step), half)
        again = held.write(held.read(stored, values.numel()), None)
        assert all(torch.equal(a, b) for a, b in zip(stored, again, strict=True))


@pytest.mark.parametrize(("kind", "name"), FORMATS)
def test_the_mean_over_random_bits_is_the_value(kind, name):
    held, values = format_of(kind, name), samples(kind)
    total, draws = torch.zeros(values.numel(), dtype=torch.float64), 2000
    near = held.read(held.write(values, None), values.numel())
    for step in range(draws):
        half = low_half(NOISE.bits(step, "w", 0, values.numel()))
        total += held.read(held.write(values, half), values.numel())
    largest = values.abs().max()
    # below the smallest place a second moment is raised to it
    big = values.abs() > 1e-8 * largest if kind == "unsigned" else values.abs() > 0
    off = (total / draws - values).abs()
    # a coin toss between neighbours, each at most a quarter of the value or a 16,000th of the largest apart
    spread = 5 * 0.5 * (values.abs() * 0.75 + largest / 16_000) / draws**0.5
    assert (off[big] < spread[big]).all()
    assert torch.equal(near[values == 0], values[values == 0])


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_codes_are_dense_near_zero(name):
    """Down to a thousandth of a block's largest: the first moment to a tenth of itself or a 2000th of the
    largest, the root of the second to an eighth of itself; and no second moment becomes zero."""
    values = torch.logspace(0, -3, BLOCK)
    first = SIGNED[name].read(SIGNED[name].write(values, None), BLOCK)
    assert ((first - values).abs() <= 0.1 * values + 1 / 2000).all()
    second = UNSIGNED[name].read(UNSIGNED[name].write(values.square(), None), BLOCK)
    assert ((second.sqrt() - values).abs() <= 0.125 * values).all()
    tiny = torch.full((BLOCK,), 1e-20)
    tiny[0] = 1.0
    assert (UNSIGNED[name].read(UNSIGNED[name].write(tiny, None), BLOCK) > 0).all()


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_8_bit_state_takes_one_byte_and_a_scale_per_block(name):
    moment = Moment(SIGNED[name], torch.empty(64, 64))
    held = sum(tensor.numel() * tensor.element_size() for tensor in moment.stored)
    assert held == 64 * 64 * (1 + 4 / BLOCK)


@pytest.mark.parametrize("name", ["bf16", "int8", "float8"])
def test_a_slow_decay_is_not_rounded_away(name):
    """v falls by 0.1 % a step, far less than the distance between places."""
    held, values = UNSIGNED[name], torch.linspace(0.05, 1.0, BLOCK)
    values[0] = 4.0
    stored = held.write(values, None)
    for step in range(400):
        kept = held.read(stored, BLOCK) * 0.999
        kept[0] = 4.0
        stored = held.write(kept, low_half(NOISE.bits(step, "w", 0, BLOCK)))
    left = held.read(stored, BLOCK)[1:].sum() / values[1:].sum()
    assert left.item() == pytest.approx(0.999**400, rel=0.05)
