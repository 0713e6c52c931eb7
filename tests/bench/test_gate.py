"""No speed by a mode whose loss is wrong."""

import json

import pytest

from arriero.bench.result import StepResult
from arriero.bench.step import mode_of, tolerance_of
from arriero.config.load import load_run
from arriero.model.presets import expand
from arriero.train.optim.optimizer import GradientAccumulator

BF16 = {"precision.compute": "bf16"}


def test_a_broken_mode_prints_the_difference_and_no_speed(bench, monkeypatch):
    """bf16 is broken: its gradients are doubled on their way to the fp32 weights; fp32 has no such way."""
    original = GradientAccumulator.add

    def doubled(self, name, parameter):
        parameter.grad *= 2
        original(self, name, parameter)

    monkeypatch.setattr(GradientAccumulator, "add", doubled)
    code, out, path = bench("--no-profile", **BF16)
    assert code == 1
    assert "the loss check failed" in out
    assert "first gradient norm differs by 1.00e+00" in out
    assert "tok/s" not in out
    assert not path.exists()


def test_a_mode_that_fails_on_the_small_model_has_no_speed_either(bench, monkeypatch):
    def broken(*_):
        raise RuntimeError("lost the gradients")

    monkeypatch.setattr(GradientAccumulator, "add", broken)
    code, out, path = bench("--no-profile", **BF16)
    assert code == 1
    assert "lost the gradients" in out
    assert "tok/s" not in out
    assert not path.exists()


def test_a_sound_mode_is_measured_and_its_differences_are_kept(bench, monkeypatch):
    code, out, path = bench("--no-profile", **BF16)
    assert code == 0, out
    gate = StepResult.read(path).gate
    assert gate.holds
    assert 0 < gate.loss < gate.loss_bound
    assert 0 < gate.norm < gate.norm_bound
    assert gate.settings["precision.compute"] == "bf16"
    assert "passed" in out

    def checked_again(*_):
        raise AssertionError("the loss was checked again")

    earlier = path.rename(path.with_name("earlier.json"))
    monkeypatch.setattr("arriero.bench.step.check_loss", checked_again)
    code, _, path = bench("--no-profile", "--gate-from", str(earlier), **BF16)
    assert code == 0
    assert StepResult.read(path).gate == gate
    with pytest.raises(AssertionError, match="checked again"):
        bench("--no-profile", "--gate-from", str(earlier), **BF16, **{"optim.state": "int8"})
    monkeypatch.setattr("arriero.bench.machine.source_digest", lambda: "of other files")
    with pytest.raises(AssertionError, match="checked again"):
        bench("--no-profile", "--gate-from", str(earlier), **BF16)


def test_a_gate_left_out_is_said_to_be(bench):
    code, out, path = bench("--no-profile", "--no-gate", **BF16)
    assert code == 0
    assert "NOT CHECKED" in out
    assert json.loads(path.read_text())["gate"]["holds"] is None


def mode(*sets, compute="float32", compiled=False, kernels=False):
    plain = "memory.activation_checkpointing=none"
    return mode_of(load_run(None, [plain, *sets], expand).config, compute, compiled, kernels)


def test_only_plain_fp32_is_the_reference():
    assert mode().is_reference
    assert mode("optim.name=muon").is_reference
    for changed in (
        mode(compiled=True),
        mode(compute="bfloat16"),
        mode(compute="float16"),
        mode(kernels=True),
        mode("memory.activation_checkpointing=full"),
        mode("memory.offload_activations=true"),
        mode("optim.state=int8"),
        mode("precision.master=bf16", compute="bfloat16"),
    ):
        assert not changed.is_reference, changed


def test_plain_fp16_is_said_to_be_unjudged_as_nothing_else_skips_the_steps_that_it_skips(bench):
    code, out, path = bench("--no-profile", **{"precision.compute": "fp16"})
    assert code == 0, out
    assert "NOT CHECKED" in out
    assert StepResult.read(path).gate.holds is None


def test_a_reference_is_computed_without_the_kernels_it_is_to_judge():
    judged = mode(
        "precision.float8=tensorwise", "precision.float8_head=true", compute="bfloat16", kernels=True
    )
    assert judged.sets["precision.kernels"] is True
    reference = judged.reference.sets
    assert reference["precision.kernels"] is False
    assert (reference["precision.float8"], reference["precision.float8_head"]) == ("off", False)


def test_what_a_mode_does_adds_to_its_tolerance():
    plain, bf16 = tolerance_of(mode()), tolerance_of(mode(compute="bfloat16"))
    float8 = tolerance_of(mode("precision.float8=tensorwise", compute="bfloat16"))
    both = tolerance_of(mode("precision.float8=tensorwise", "optim.state=int8", compute="bfloat16"))
    assert plain.loss < bf16.loss < float8.loss < both.loss < 0.02
    assert plain.norm < bf16.norm < float8.norm < both.norm < 0.02


def test_a_mode_is_named_by_what_it_does():
    sets = (
        "memory.activation_checkpointing=selective",
        "precision.float8=rowwise",
        "optim.state=bf16",
        "precision.master=bf16",
    )
    assert str(mode(*sets, compute="bfloat16", compiled=True)) == (
        "bf16, bf16 weights, compiled, float8 rowwise, selective activation checkpointing, bf16 states"
    )
