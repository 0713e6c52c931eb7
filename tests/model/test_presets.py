import pytest
import torch

from arriero.errors import UserError
from arriero.model.family import build_model
from arriero.model.layers import Head
from arriero.model.presets import about, load_preset, preset_names, resolve

CENSUS = {
    "frontier-llama2-271m": "0.271",
    "frontier-llama2-1b": "1.056",
    "frontier-llama2-7b": "6.738",
    "frontier-llama2-13b": "13.016",
    "frontier-llama2-26b": "25.704",
    "frontier-llama2-70b": "68.977",
    "frontier-llama3-1b": "1.398",
    "frontier-llama3-3b": "4.399",
    "frontier-llama3-8b": "8.030",
    "frontier-llama3-70b": "70.554",
    "frontier-llama3-405b": "405.853",
    "bench-gpt2-125m": "0.124",
    "bench-gpt2-1.5b": "1.558",
    "bench-llama-3.1-8b": "8.030",
    "bench-llama-3.1-70b": "70.554",
    "bench-llama-3.1-70b-proxy": "2.957",
    "llama3-8b-mini": "1.923",
    "llama2-34b": "33.744",
    "fms-llama2-34b": "33.744",
    "fms-llama2-1.4b": "1.289",
    "fms-llama3-1.8b": "1.884",
    "fms-llama3-3.2b": "3.204",
    "llama3.2-1b": "1.236",
    "llama3.2-3b": "3.213",
}
# The sums of the tensors of the published checkpoints, a tied head counted once.
TOTALS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
}


@pytest.mark.parametrize(("name", "billions"), CENSUS.items())
def test_parameter_counts_equal_published_ones(name, billions):
    assert f"{load_preset(name).parameters / 1e9:.3f}" == billions


@pytest.mark.parametrize(("name", "total"), TOTALS.items())
def test_parameter_totals_equal_those_of_published_checkpoints(name, total):
    assert load_preset(name).parameters == total


@pytest.mark.parametrize("name", preset_names())
def test_the_module_has_the_parameters_that_the_spec_counts(name):
    spec = load_preset(name)
    with torch.device("meta"):
        model = build_model(spec)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear | Head)]
    assert sum(p.numel() for p in model.parameters()) == spec.parameters
    assert sum(m.weight.numel() for m in linears) == spec.matmul_parameters
    assert spec.bf16_bytes == 2 * spec.parameters
    assert about(name) and "\n" not in about(name)


def test_same_size_in_the_name_is_not_the_same_model():
    assert load_preset("llama2-34b").rope_theta == 1e4
    assert load_preset("fms-llama2-34b").rope_theta == 1e6
    assert load_preset("fms-llama2-34b").max_seq_len == 16384
    assert load_preset("llama3-8b").rope_scaling is None
    scaling = load_preset("llama3.1-405b").rope_scaling
    assert scaling is not None and scaling.factor == 8.0
    assert load_preset("frontier-llama3-405b").rope_scaling is None
    assert load_preset("frontier-llama3-3b").max_seq_len == 131072
    assert load_preset("bench-llama-2-7b").vocab_size == 3200
    assert "mistake" in about("bench-llama-2-7b")
    assert (load_preset("gpt2-1.5b").vocab_size, load_preset("bench-gpt2-1.5b").vocab_size) == (50257, 50304)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError) as caught:
        load_preset("lama3-8b")
    assert "'llama3-8b'" in caught.value.todo
    assert "arriero config models" in caught.value.todo


def test_fields_override_the_preset():
    spec = resolve("llama3-8b", {"layers": 4, "max_seq_len": None})
    assert spec == load_preset("llama3-8b-mini")
    assert spec.nominal_params is None
    assert resolve("llama3-8b", {"max_seq_len": 4096}).nominal_params == 8_000_000_000


def test_head_dim_and_kv_heads_follow_the_heads():
    assert resolve("llama3-8b", {"heads": 16}).head_dim == 256
    assert resolve("llama3-8b", {"dim": 2048}).head_dim == 64
    assert resolve("llama3-8b", {"dim": 2048, "head_dim": 128}).head_dim == 128
    assert resolve("llama3-8b", {"heads": 16}).kv_heads == 8
    assert resolve("llama2-7b", {"heads": 16}).kv_heads == 16
    assert resolve("gpt2-test", {"heads": 8}).kv_heads == 8


def test_rope_scaling_can_be_removed():
    assert resolve("llama3.1-8b", {"rope_scaling": False}).rope_scaling is None


def test_a_model_may_be_given_without_a_preset():
    fields = {"vocab_size": 100, "dim": 64, "layers": 2, "heads": 4, "ffn": 128, "max_seq_len": 32}
    assert resolve(None, fields).parameters == resolve("llama-test", {**fields, "kv_heads": 4}).parameters


def test_every_problem_of_an_override_is_reported():
    with pytest.raises(UserError) as caught:
        resolve("llama3-8b", {"kv_heads": 5, "layers": 0, "laeyrs": 2})
    for part in ("kv_heads 5", "layers must be positive", "did you mean layers?"):
        assert part in caught.value.what


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma-7b", "known families: llama2, llama3, llama3.1, llama3.2, gpt2, mistral,"),
        ("qwen2-7b", "did you mean 'qwen2.5-7b'"),
        ("llama3-9b", "did you mean 'llama3-8b'?"),
        ("llama3.1-7b", "did you mean 'llama3.1-8b'?"),
        ("meta-llama/Llama-3.1-8B", "did you mean 'llama3.1-8b'?"),
        ("Llama-2-7b-hf", "did you mean 'llama2-7b'?"),
        ("llama-7b", "did you mean 'llama2-7b'?"),
        ("llama-dmeo", "did you mean 'llama-demo'?"),
        ("llama3-400b", "presets of llama3: llama3-8b, llama3-70b"),
        ("gpt2-xl", "presets of gpt2"),
        ("", "known families"),
    ],
)
def test_an_unknown_preset_gets_a_suggestion_of_its_size(name, words):
    with pytest.raises(UserError) as caught:
        load_preset(name)
    assert words in caught.value.todo
    assert "bench-llama" not in caught.value.todo
