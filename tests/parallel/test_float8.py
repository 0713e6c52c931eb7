"""Which layers become float8, where it is rejected, and what is reported."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from arriero.config.load import load_run
from arriero.config.schema import PrecisionSection
from arriero.errors import UserError
from arriero.kernels.float8 import computes_float8, has_float8_kernels
from arriero.model.family import build_model
from arriero.model.presets import expand, load_preset
from arriero.parallel.precision import apply_float8, renew_scales

SPEC = load_preset("llama-test")
IN_A_BLOCK = {f"attention.{n}" for n in "qkvo"} | {f"ffn.{n}" for n in ("gate", "up", "down")}


def on_meta(spec=SPEC):
    with torch.device("meta"):
        return build_model(spec)


def float8(recipe="tensorwise", **keys):
    return PrecisionSection(float8=recipe, **keys)


def kinds(model):
    return {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("preset", ["llama-test", "gpt2-test"])
def test_the_blocks_linear_layers_are_converted_and_keep_their_names(preset):
    model, plain = on_meta(load_preset(preset)), on_meta(load_preset(preset))
    layers = apply_float8(model, float8(), emulate=True)
    assert set(kinds(model).values()) == {"Float8Linear"}
    assert sorted(layers.converted) == sorted(kinds(plain))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert shapes == {name: p.shape for name, p in plain.named_parameters()}
    assert "blocks.0.attention.q.weight" in shapes
    assert type(model.embedding) is nn.Embedding


def test_off_changes_nothing():
    model = on_meta()
    assert apply_float8(model, PrecisionSection(), emulate=True).converted == ()
    assert set(kinds(model).values()) == {"Linear"}
    renew_scales(model, PrecisionSection())


def test_a_pipeline_stage_converts_its_own_blocks():
    model = on_meta()
    model.keep(range(1, 2))
    layers = apply_float8(model, float8(float8_exclude=("blocks.0.*", "*.attention.k")), emulate=True)
    assert set(layers.converted) == {f"blocks.1.{name}" for name in IN_A_BLOCK - {"attention.k"}}
    assert layers.left == {"blocks.1.attention.k": "named by precision.float8_exclude"}


def test_excluded_layers_stay_in_the_compute_precision():
    model = on_meta()
    layers = apply_float8(model, float8(float8_exclude=("blocks.0.*",)), emulate=True)
    assert {name for name, kind in kinds(model).items() if kind == "Linear"} == set(layers.left)
    assert set(layers.left) == {f"blocks.0.{name}" for name in IN_A_BLOCK}
    assert layers.summary == "7 of 14 linear layers; 7 left: named by precision.float8_exclude"


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(UserError, match=r"atention.k' names no linear layer.*\.attention.k'"):
        apply_float8(on_meta(), float8(float8_exclude=("blocks.0.atention.k",)), emulate=True)


def test_layers_that_are_not_multiples_of_16_are_left_and_reported():
    model = on_meta(replace(SPEC, ffn=200))
    layers = apply_float8(model, float8(), emulate=True)
    assert {name.split(".", 2)[2] for name in layers.left} == {"ffn.gate", "ffn.up", "ffn.down"}
    assert layers.left["blocks.1.ffn.up"] == "64 x 200 is not in multiples of 16"
    assert kinds(model)["blocks.1.ffn.up"] == "Linear"


def test_every_ranks_slice_of_a_layer_must_be_a_multiple_of_16():
    layers = apply_float8(on_meta(), float8(), emulate=True, tp=4)
    assert {name.split(".", 2)[2] for name in layers.left} == {"attention.k", "attention.v"}
    assert layers.left["blocks.0.attention.k"] == "64 x 32 is not in multiples of 16 on each of 4 ranks"


def test_conversion_after_hooks_is_an_error():
    model = on_meta()
    model.blocks["0"].attention.q.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="before tensor parallelism"):
        apply_float8(model, float8(), emulate=True)


def test_gathering_float8_needs_shards():
    """`plan.resolve` reports it to the user."""
    with pytest.raises(AssertionError, match="no weights are gathered"):
        apply_float8(on_meta(), float8(float8_all_gather=True), emulate=True)


def test_without_torchao_the_error_says_what_to_install(python):
    code = """
import sys, torch
sys.modules["torchao"] = None
from arriero.config.schema import PrecisionSection
from arriero.errors import UserError
from arriero.model.family import build_model
from arriero.model.presets import load_preset
from arriero.parallel.precision import apply_float8
try:
    apply_float8(build_model(load_preset("llama-test")), PrecisionSection(float8="rowwise"), emulate=True)
except UserError as error:
    sys.exit(str(error))
"""
    stderr = python("-c", code).stderr
    assert "precision.float8 needs torchao" in stderr
    assert "pip install 'arriero[float8]'" in stderr


def test_torchao_is_imported_only_when_needed_and_without_messages(python):
    code = """
import sys
from arriero.config.schema import PrecisionSection
from arriero.model.family import build_model
from arriero.model.presets import load_preset
from arriero.parallel.precision import apply_float8
model = build_model(load_preset("llama-test"))
apply_float8(model, PrecisionSection(), emulate=True)
assert "torchao" not in sys.modules
apply_float8(model, PrecisionSection(float8="tensorwise"), emulate=True)
assert "torchao" not in sys.modules
apply_float8(model, PrecisionSection(float8="rowwise"), emulate=True)
assert "torchao" in sys.modules
"""
    result = python("-c", code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


NVIDIA = {"H100": (9, 0), "L40": (8, 9), "A100": (8, 0)}
AMD = {"gfx942:sramecc+:xnack-": (9, 4), "gfx950": (9, 5), "gfx90a:sramecc+:xnack-": (9, 0)}


@pytest.mark.parametrize("name", [*NVIDIA, *AMD])
def test_which_devices_have_float8(name, monkeypatch):
    properties = SimpleNamespace(name=name, **({"gcnArchName": name} if name in AMD else {}))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (NVIDIA | AMD)[name])
    expected = name in ("H100", "L40") or name.startswith(("gfx94", "gfx95"))
    assert computes_float8(torch.device("cuda")) is expected
    assert not computes_float8(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "own"), [("H100", True), ("A100", False), ("gfx942:sramecc+:xnack-", False)]
)
def test_float8_kernels_are_for_nvidia_gpus_with_float8(name, own, monkeypatch):
    properties = SimpleNamespace(name=name, **({"gcnArchName": name} if name in AMD else {}))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (NVIDIA | AMD)[name])
    monkeypatch.setattr(torch.version, "hip", "7.0" if name in AMD else None)
    has_float8_kernels.cache_clear()
    found = has_float8_kernels(torch.device("cuda"))
    has_float8_kernels.cache_clear()
    assert found is own


def test_settings_that_float8_supports_are_accepted():
    sets = ["precision.float8=tensorwise", "precision.float8_all_gather=true", "precision.compute=bf16"]
    config = load_run(None, [*sets, "precision.float8_exclude=['blocks.0.*']"], expand).config
    assert config.precision.float8_exclude == ("blocks.0.*",)
