import os
import subprocess
import sys
from pathlib import Path

import pytest

import arriero
from arriero.errors import UserError
from arriero.model.presets import load_preset
from arriero.model.spec import FLOP_FORMULAS, ModelSpec, RopeScaling, flops_per_token

SMALL = {"vocab_size": 100, "dim": 64, "layers": 2, "heads": 4, "ffn": 128, "max_seq_len": 32}
NEGATIVE = {"factor": -1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 32}


def test_missing_fields_are_derived():
    spec = ModelSpec.from_dict(SMALL)
    assert (spec.family, spec.kv_heads, spec.head_dim, spec.rope_theta, spec.tied) == (
        "llama",
        4,
        16,
        1e4,
        False,
    )


def test_a_spec_is_restored_from_its_dict():
    spec = load_preset("llama3.2-1b")
    assert isinstance(spec.rope_scaling, RopeScaling)
    assert ModelSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kv_heads": 3}, "heads 4 is not divisible by kv_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"dim": 66}, "dim 66 is not divisible by heads 4"),
        ({"layers": 0}, "layers must be positive"),
        ({"ffn": -1}, "ffn must be positive"),
        ({"heads": 0}, "heads must be positive"),
        ({"norm_eps": 0}, "norm_eps must be positive"),
        ({"layers": "two"}, "layers must be a whole number"),
        ({"layers": True}, "layers must be a whole number"),
        ({"tied": 1}, "tied must be true or false"),
        ({"family": "mamba"}, "family must be llama or gpt2"),
        ({"hedas": 3}, "did you mean heads?"),
        ({"dim": None}, "dim is missing"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling needs factor"),
        ({"rope_scaling": RopeScaling(2.0, type="linear", attention_factor=1.2)}, "has no attention_factor"),
        ({"family": "gpt2", "kv_heads": 2}, "gpt2 has as many kv_heads as heads"),
        ({"family": "gpt2", "rope_theta": 1e4}, "rope_theta does not apply"),
        ({"family": "gpt2", "head_dim": 32}, "gpt2 needs heads x head_dim = dim"),
        ({"family": "bamba", "rope_scaling": NEGATIVE}, "rope_scaling must hold positive numbers"),
        ({"family": "bamba", "head_dim": 18}, "head_dim 18 is no multiple of 4"),
    ],
)
def test_invalid_dimensions_are_errors(change, sentence):
    with pytest.raises(UserError, match="cannot be built") as caught:
        ModelSpec.from_dict({**SMALL, **change})
    assert sentence in str(caught.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(UserError) as caught:
        ModelSpec.from_dict({"vocab_size": 0, "dim": 65, "heads": 4, "kv_heads": 3, "ffn": "x", "layrs": 1})
    for part in (
        "vocab_size",
        "dim 65",
        "kv_heads 3",
        "ffn",
        "layrs",
        "layers is missing",
        "max_seq_len is missing",
    ):
        assert part in caught.value.what


def test_a_spec_built_by_hand_is_checked_too():
    with pytest.raises(UserError, match="not divisible"):
        ModelSpec("llama", 100, 64, 2, 4, 3, 16, 128, 32, rope_theta=1e4)


GFLOP = [
    ("bench-gpt2-1.5b", 1024, 9.802, 10.274, None),
    ("bench-llama-3.1-70b-proxy", 4096, 11.639, 11.841, 18.145),
    ("llama3.2-1b", 8192, 9.025, 10.636, 10.636),
    ("llama3.1-8b", 8192, 51.470, 57.913, 61.066),
    ("llama3-8b", 131072, 148.107, 251.186, 254.340),
]


@pytest.mark.parametrize(("name", "seq_len", "causal", "palm", "bench"), GFLOP)
def test_gflop_per_token_of_the_performance_table(name, seq_len, causal, palm, bench):
    spec = load_preset(name)
    wanted = {"causal": causal, "palm": palm, "llm-train-bench": bench}
    for formula, gflop in wanted.items():
        if gflop is not None:
            assert round(flops_per_token(spec, seq_len, formula) / 1e9, 3) == gflop


def test_frontier_count_and_its_published_mfu():
    flops = flops_per_token(load_preset("frontier-llama3-8b"), 8192, "frontier-torchtitan")
    assert round(flops / 1e9, 3) == 57.914
    assert round(100 * 1333 * flops / 191.5e12, 1) == 40.3
    proxy = flops_per_token(load_preset("bench-llama-3.1-70b-proxy"), 4096, "frontier-torchtitan")
    assert round(proxy / 1e9, 3) == 11.841


def test_nnscaler_count_and_its_published_mfu():
    sequence = 131072 * flops_per_token(load_preset("llama3-8b"), 131072, "nnscaler") / 1e12
    assert round(sequence / 3, 2) == 11104.35
    assert round(4 * sequence, 1) == 133252.2
    assert round(100 * 4 * sequence / (41.12 * 8 * 989), 2) == 40.96
    sequence = 8192 * flops_per_token(load_preset("llama3-70b"), 8192, "nnscaler") / 1e12
    assert round(sequence, 2) == 3968.41
    replicas = 2
    assert round(100 * replicas * 64 * sequence / (100.3 * 16 * 1307.4), 1) == 24.2


def test_flops_of_packed_documents_depend_on_their_lengths():
    spec = load_preset("llama-test")
    whole = flops_per_token(spec, 128)
    assert flops_per_token(spec, 128, attended=128) == whole
    halves = flops_per_token(spec, 128, attended=64)
    assert whole - halves == 6 * spec.layers * spec.attention_width * 64
    assert flops_per_token(spec, 128, "palm", attended=64) == flops_per_token(spec, 128, "palm")


def test_hfu_adds_flash_backward_and_recomputed_blocks_but_not_the_head():
    spec = load_preset("llama-test")
    attention = 2 * spec.layers * spec.attention_width * 128
    head = spec.vocab_size * spec.dim
    plain = flops_per_token(spec, 128) + attention / 2
    assert flops_per_token(spec, 128, "hfu") == plain
    blocks = 2 * (spec.matmul_parameters - head) + attention
    assert flops_per_token(spec, 128, "hfu", recompute=0.25) == plain + blocks / 4


def test_invalid_arguments_of_flops_per_token_are_errors():
    spec = load_preset("llama-test")
    for arguments in (
        {"formula": "mine"},
        {"recompute": 2.0},
    ):
        with pytest.raises(ValueError):
            flops_per_token(spec, 128, **arguments)
    assert all(each.formula for each in FLOP_FORMULAS.values())


def test_arithmetic_does_not_import_torch():
    code = (
        "import sys, arriero.model.presets as p; p.load_preset('llama3-8b'); sys.exit('torch' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(arriero.__path__[0]).parent)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
