import math

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from arriero.model.family import build_model
from arriero.model.language_model import InitRule, fill
from arriero.model.presets import load_preset, resolve


def weights(spec, seed=1):
    model = build_model(spec)
    model.init_weights(seed)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama-test", "gpt2-test"])
def test_the_same_seed_gives_the_same_weights(name):
    spec = load_preset(name)
    first, again, other = weights(spec), weights(spec), weights(spec, seed=2)
    torch.manual_seed(123)
    for key, tensor in first.items():
        assert torch.equal(tensor, again[key])
        assert torch.equal(tensor, other[key]) == (tensor.std() == 0), key


def test_a_parameter_does_not_depend_on_the_others():
    shallow, deep = weights(load_preset("llama-test")), weights(resolve("llama-test", {"layers": 5}))
    assert all(torch.equal(tensor, deep[key]) for key, tensor in shallow.items())


def test_parameters_have_different_weights():
    drawn = [t.flatten()[:64] for t in weights(load_preset("llama-test")).values() if t.std() > 0]
    assert torch.unique(torch.stack(drawn), dim=0).shape[0] == len(drawn)


def test_a_shard_gets_the_weights_of_its_place_in_the_whole():
    whole = torch.empty(40, 24)
    fill(whole, "w", InitRule(0.02), seed=3)
    part = torch.empty(7, 10)
    fill(torch.empty(40, 24), "w", InitRule(0.02), 3, local_shard=lambda _: (part, (30, 5)))
    assert torch.equal(part, whole[30:37, 5:15])
    line, piece = torch.empty(100), torch.empty(30)
    fill(line, "b", InitRule(0.02), seed=3)
    fill(line.clone(), "b", InitRule(0.02), 3, local_shard=lambda _: (piece, (50,)))
    assert torch.equal(piece, line[50:80])


def test_large_parameters_are_independent_of_chunk_boundaries():
    large = torch.empty(300, 1000)
    fill(large, "w", InitRule(1.0), seed=3)
    rows = torch.empty(1, 1000)
    fill(torch.empty(300, 1000), "w", InitRule(1.0), 3, local_shard=lambda _: (rows, (299, 0)))
    assert torch.equal(rows[0], large[299])
    assert torch.unique(large).numel() > 0.95 * large.numel()


@pytest.mark.parametrize("cut", [3.0, 5.0])
def test_weights_have_a_truncated_normal_distribution(cut):
    x = torch.empty(1000, 1000)
    fill(x, "w", InitRule(1.0, cut), seed=4)
    x = x.double().flatten()
    density = math.exp(-cut * cut / 2) / math.sqrt(2 * math.pi)
    std = math.sqrt(1 - 2 * cut * density / math.erf(cut / math.sqrt(2)))
    assert abs(x.mean()) < 4e-3 and abs(x.std() - std) < 4e-3 and x.abs().max() <= cut
    for quantile in (0.01, 0.1, 0.3, 0.5, 0.9, 0.999):
        edge = math.sqrt(2) * torch.erfinv(torch.tensor(2 * quantile - 1, dtype=torch.float64))
        assert abs((x < edge).double().mean() - quantile) < 2.5e-3
    pairs = x.view(-1, 2)
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 5e-3


def test_standard_deviations_of_llama():
    spec = resolve("llama-test", {"dim": 128, "ffn": 512})
    drawn, cut = weights(spec), 0.98658
    expected = {
        "embedding.weight": 0.02,
        "blocks.0.attention.q.weight": 0.02,
        "blocks.0.attention.o.weight": 0.02 / 2**0.5,
        "blocks.1.ffn.down.weight": 0.02 / 4**0.5,
        "head.weight": 128**-0.5,
    }
    for name, std in expected.items():
        assert abs(drawn[name].std() / (std * cut) - 1) < 0.03, name
    assert torch.equal(drawn["norm.weight"], torch.ones(128))


def test_standard_deviations_of_gpt2():
    drawn = weights(load_preset("gpt2-test"))
    assert abs(drawn["positions.weight"].std() / 0.02 - 1) < 0.05
    assert abs(drawn["blocks.1.ffn.down.weight"].std() / 0.01 - 1) < 0.05
    assert not any(t.any() for name, t in drawn.items() if name.endswith("bias"))
    assert torch.equal(drawn["norm.weight"], torch.ones(64))


def test_wrapped_blocks_get_the_same_weights():
    plain = weights(load_preset("llama-test"))
    model = build_model(load_preset("llama-test"))
    for index, block in model.blocks.items():
        model.blocks[index] = checkpoint_wrapper(block)
    model.init_weights(1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.values(), strict=True))


def test_init_without_storage_is_refused():
    with torch.device("meta"):
        model = build_model(load_preset("llama-test"))
    with pytest.raises(ValueError, match="to_empty"):
        model.init_weights(1)
