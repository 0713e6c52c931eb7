import copy

import pytest
import torch
import torch.nn.functional as F

from arriero.model.family import build_model
from arriero.model.layers import Attention, FusedQKVAttention, Rope, converted, rope_frequencies
from arriero.model.presets import load_preset, resolve
from arriero.model.spec import RopeScaling

FAMILIES = ["llama-test", "gpt2-test"]


def made(spec, seed=1, device="cpu"):
    with torch.device("meta"):
        model = build_model(spec)
    model = model.to_empty(device=device)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.detach().fill_(float("nan"))
    model.init_weights(seed)
    return model


def tokens(spec, batch=2, length=24):
    return torch.randint(0, spec.vocab_size, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", FAMILIES)
def test_init_after_meta_fills_every_parameter_and_buffer(name):
    model = made(load_preset(name))
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.isfinite(tensor).all(), key


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_reach_every_parameter(name):
    model = made(load_preset(name))
    x = tokens(model.spec, length=model.spec.max_seq_len)
    F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()).backward()
    for key, parameter in model.named_parameters():
        # softmax does not see a bias on the keys
        if not key.endswith("attention.k.bias"):
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_head_of_the_hidden_states(name):
    model = made(load_preset(name))
    x = tokens(model.spec)
    assert torch.equal(model(x), model.head(model.hidden(x)))


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_is_causal(name):
    model = made(load_preset(name))
    x = tokens(model.spec)
    changed = x.clone()
    changed[:, 12] = (changed[:, 12] + 1) % model.spec.vocab_size
    with torch.no_grad():
        before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=1e-6)
    assert (before[:, 12:] - after[:, 12:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("preset", [*FAMILIES, "mqa"])
def test_packed_documents_have_the_logits_of_separate_ones(preset):
    spec = resolve("llama-test", {"kv_heads": 1}) if preset == "mqa" else load_preset(preset)
    model = made(spec)
    lengths = (5, 1, 11, 7)
    x = tokens(spec, length=sum(lengths))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    with torch.no_grad():
        packed = model(x, positions, documents)
        alone = torch.cat([model(part) for part in x.split(lengths, dim=1)], dim=1)
        leaking = model(x, positions)
    torch.testing.assert_close(packed, alone, rtol=0, atol=2e-6)
    assert (leaking - alone).abs().max() > 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_given_positions_equal_the_default_ones(name):
    model = made(load_preset(name))
    x = tokens(model.spec)
    torch.testing.assert_close(model(x, torch.arange(24).expand(2, -1)), model(x), rtol=0, atol=1e-6)


def test_rotary_angles_stay_fp32_in_a_bf16_model():
    model = made(load_preset("llama-test"))
    exact = model.rope.frequencies.clone()
    model.bfloat16()
    assert model.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(model.rope.frequencies, exact)
    x = tokens(model.spec)
    logits = model(x)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), made(model.spec)(x), rtol=0, atol=0.1)


def test_rotary_angles_of_far_positions_are_exact():
    rope = Rope(16, 5e5, None)
    cos, sin = rope(torch.tensor([131071]))
    angle = 131071 * rope_frequencies(16, 5e5, None).double()
    torch.testing.assert_close(cos[0, 0].double(), angle.cos(), rtol=0, atol=1e-2)
    torch.testing.assert_close(sin.square() + cos.square(), torch.ones_like(sin))


def test_rope_scaling_changes_low_frequencies_only():
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    ratio = rope_frequencies(128, 5e5, None) / rope_frequencies(128, 5e5, scaling)
    assert ratio[0] == 1.0 and abs(ratio[-1] - 8.0) < 1e-5
    assert (ratio.diff() >= -1e-5).all() and ((ratio > 1.01) & (ratio < 7.99)).any()


@pytest.mark.parametrize("name", ["llama-demo", "gpt2-test"])
def test_a_tied_head_stays_tied(name):
    model = made(load_preset(name))
    for version in (model, copy.deepcopy(model), model.to(torch.float64)):
        assert version.head.weight is version.embedding.weight
    assert model.head.weight.dtype == torch.float64
    with torch.device("meta"):
        empty = build_model(model.spec)
    empty = empty.to_empty(device="cpu")
    assert empty.head.weight is empty.embedding.weight


def test_gpt2_refuses_more_tokens_than_positions():
    model = made(load_preset("gpt2-test"))
    with pytest.raises(ValueError, match="128 learned positions"):
        model(torch.zeros(1, 129, dtype=torch.long))


@pytest.mark.parametrize("bias", [True, False])
def test_fused_projections_are_those_of_separate_layers(bias):
    torch.manual_seed(0)
    attention = Attention(24, heads=4, kv_heads=1, head_dim=8, bias=bias)
    x = torch.randn(2, 5, 24, requires_grad=True)
    results = []
    for module in (attention, converted(attention, FusedQKVAttention)):
        outs = list(module.project(x))
        weights = [p for layer in (module.q, module.k, module.v) for p in layer.parameters()]
        results.append([*outs, *torch.autograd.grad([out.square().sum() for out in outs], [x, *weights])])
    for separate, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, separate)


def test_a_converted_module_shares_parameters_and_leaves_the_original_alone():
    attention = Attention(24, heads=2, kv_heads=2, head_dim=8, bias=False)
    fused = converted(attention, FusedQKVAttention)
    assert type(attention) is Attention and type(fused) is FusedQKVAttention
    assert all(a is b for a, b in zip(attention.parameters(), fused.parameters(), strict=True))
    fused.core = None
    assert attention.core is not None
