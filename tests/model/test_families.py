"""What the common options of attention mean to FLOPs, to layouts and to run files."""

import pytest

import arriero
from arriero.config.keys import ConfigError
from arriero.errors import UserError
from arriero.model.name_maps import hf_config, own_tensors, spec_from_hf
from arriero.model.presets import load_preset, resolve
from arriero.model.spec import flops_per_token, sequence_flops
from arriero.plan.hardware import Machine
from arriero.plan.resolve import resolve as resolve_run

QWEN = {"sliding_window": 24, "max_window_layers": 1, "layers": 3}


@pytest.mark.parametrize("tokens", [8, 24, 25, 100])
def test_flops_count_the_tokens_that_a_window_lets_through(tokens):
    spec = resolve("qwen2-test", QWEN)
    seen = [sum(min(t + 1, spec.window(layer) or tokens) for t in range(tokens)) for layer in range(3)]
    # a product of q and k and one with v, of two FLOPs each; the formula has no diagonal
    exact = 4 * spec.attention_width * sum(seen) / tokens
    assert sequence_flops(spec, spec.attended(tokens)) == pytest.approx(
        exact, abs=6 * spec.attention_width + 1e-6
    )
    plain = flops_per_token(resolve("qwen2-test", {"layers": 3}), tokens)
    assert (flops_per_token(spec, tokens) < plain) == (tokens > 24)


@pytest.mark.parametrize("blocks", [(0, 3), (1, 2), (3, 0, 2), (0,), (2, 3)])
@pytest.mark.parametrize(
    ("preset", "sets"),
    [
        ("mistral-test", {"sliding_window": 24}),
        ("qwen2-test", {"sliding_window": 24, "max_window_layers": 2}),
        ("qwen3-test", {"sliding_window": 24, "extra": {"window_layers": [0, 2]}}),
        ("bamba-test", {"extra": {"attention_layers": [1, 3]}}),
    ],
)
def test_a_model_of_some_blocks_keeps_the_kind_of_each(preset, sets, blocks):
    spec = resolve(preset, {"layers": 4, **sets})
    kept = spec.keep_blocks(blocks)
    assert [kept.window(i) for i in range(len(blocks))] == [spec.window(block) for block in blocks]
    assert {name.split(".", 2)[2] for name in own_tensors(kept) if name.startswith("blocks.0.")} == {
        name.split(".", 2)[2] for name in own_tensors(spec) if name.startswith(f"blocks.{blocks[0]}.")
    }
    assert spec_from_hf(hf_config(kept)) == kept


def run_of(**sets):
    given = {"model.preset": "mistral-test", "data.seq_len": 64, "train.batch": "512 tok"}
    return arriero.load_config(None, given | sets)


def test_ring_attention_with_a_shorter_window_is_refused_before_training():
    machine = Machine("CPU", "cpu", 8 << 30, 8 << 30)
    ring = {"parallel.cp": 2, "parallel.context": "ring"}
    with pytest.raises(ConfigError, match="ring attention, which has no sliding window"):
        resolve_run(run_of(**ring), machine, 2)
    for allowed in ({"parallel.cp": 2}, ring | {"model.sliding_window": 64}):
        assert resolve_run(run_of(**allowed), machine, 2).layout.cp == 2


@pytest.mark.parametrize(
    ("preset", "sets", "problem"),
    [
        ("llama-test", {"sliding_window": 8}, "sliding_window cannot be set for the family llama"),
        ("mistral-test", {"max_window_layers": 1}, "max_window_layers cannot be set for the family mistral"),
        ("qwen2-test", {"qkv_bias": False}, "qkv_bias cannot be set"),
        ("qwen2-test", {"sliding_window": 0}, "sliding_window must be positive"),
        ("qwen2-test", {"sliding_window": 8, "max_window_layers": -1}, "must not be negative"),
        ("diffllama-test", {"kv_heads": 1}, "kv_heads 1 is odd"),
    ],
)
def test_options_that_a_family_does_not_have_are_refused(preset, sets, problem):
    with pytest.raises(UserError, match=problem):
        resolve(preset, sets)


def test_false_removes_the_window_of_a_preset():
    assert load_preset("mistral-7b").window(0) == 4096
    assert resolve("mistral-7b", {"sliding_window": False}).window(0) is None
    assert not run_of(**{"model.sliding_window": False}).model.sliding_window


def test_windows_are_read_from_layer_types_or_from_the_first_layer_with_a_window():
    spec = resolve("qwen2-test", QWEN)
    config = hf_config(spec)
    assert config["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    assert spec_from_hf(config) == spec
    assert spec_from_hf({**config, "layer_types": None}) == spec
    mixed = spec_from_hf({**config, "layer_types": config["layer_types"][::-1]})
    assert [mixed.window(i) for i in range(3)] == [spec.sliding_window, spec.sliding_window, None]
    assert mixed.attended(100) == spec.attended(100) and spec_from_hf(hf_config(mixed)) == mixed
    with pytest.raises(UserError, match=r"layer_types is .*, and num_hidden_layers is 3"):
        spec_from_hf({**config, "layer_types": config["layer_types"][:2]})
    with pytest.raises(UserError, match=r"give each layer full_attention or sliding_attention"):
        spec_from_hf({**config, "layer_types": [{}, {}, {}]})
    for wrong in (None, "2"):
        with pytest.raises(UserError, match=f"max_window_layers is {wrong!r}, not a whole number"):
            spec_from_hf({**config, "layer_types": None, "max_window_layers": wrong})
    unused = spec_from_hf({**config, "use_sliding_window": False})
    assert unused.sliding_window is None


def test_keys_that_published_configs_leave_out_have_the_defaults_of_transformers():
    config = hf_config(load_preset("mistral-7b"))
    del config["sliding_window"], config["num_key_value_heads"]
    read = spec_from_hf(config)
    assert (read.sliding_window, read.kv_heads) == (4096, 8)
    config = hf_config(load_preset("qwen3-8b"))
    del config["head_dim"]
    assert spec_from_hf(config).head_dim == 128
    config = hf_config(load_preset("diffllama-test"))
    del config["rms_norm_eps"]
    assert spec_from_hf(config).norm_eps == 1e-5


def test_keys_that_must_be_absent_are_not_written():
    assert "layer_types" not in hf_config(load_preset("mistral-7b"))
