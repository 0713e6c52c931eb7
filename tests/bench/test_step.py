"""A benchmark is an ordinary run, measured: its numbers add up, and it says all that belongs to them."""

import json
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch

from arriero.bench.machine import Meter, describe_code, describe_device
from arriero.bench.measure import read_trace
from arriero.bench.result import StepResult, Timing
from arriero.bench.step import DocumentLengths
from arriero.errors import UserError
from arriero.model.spec import FLOP_FORMULAS, ModelSpec, flops_per_token
from arriero.train.device import Device


def test_a_result_says_what_was_done_and_with_what(measured):
    result = StepResult.read(measured)
    assert result.work.tokens_per_step == 512
    assert result.work.parameters == ModelSpec.from_dict(result.work.model).parameters
    assert (result.work.compute, result.work.float8, result.work.optimizer_state) == (
        "float32",
        "off",
        "fp32",
    )
    assert result.config["data"]["sources"][0]["path"] == "builtin:synthetic"
    assert result.config["checkpoint"] | {"at_end": False, "export": False} == result.config["checkpoint"]
    assert {"evaluation", "checkpoints", "export"} <= set(result.left_out)
    assert {"data", "optimizer", "clipping", "logging"} <= set(result.inside)
    assert result.code.versions["torch"]
    assert result.device.cpu
    assert result.energy is None
    assert not result.gate.needed


def test_speed_is_the_tokens_of_a_step_by_the_median_step(measured):
    timing = StepResult.read(measured).timing
    assert len(timing.step_ms) == 4
    assert timing.median_ms == pytest.approx(statistics.median(timing.step_ms))
    assert timing.tokens_per_s == pytest.approx(512 / timing.median_ms * 1e3)
    ordered = (
        timing.min_ms,
        timing.lower_quartile_ms,
        timing.median_ms,
        timing.upper_quartile_ms,
        timing.max_ms,
    )
    assert list(ordered) == sorted(ordered)
    assert timing.start_up_s > timing.median_ms / 1e3


def test_every_convention_has_its_formula_and_no_share_of_an_unknown_peak(measured):
    result = StepResult.read(measured)
    spec = ModelSpec.from_dict(result.work.model)
    assert [rate.convention for rate in result.rates] == list(FLOP_FORMULAS)
    for rate in result.rates:
        assert rate.formula == FLOP_FORMULAS[rate.convention].formula
        assert rate.flops_per_token == flops_per_token(spec, 64, rate.convention)
        assert rate.tflops_per_device == pytest.approx(
            rate.flops_per_token * result.timing.tokens_per_s / 1e12
        )
        assert rate.mfu is None


def test_the_parts_of_a_real_profile_sum_to_its_step(measured):
    found = StepResult.read(measured).breakdown
    assert found.steps == 3
    assert sum(found.parts.values()) == pytest.approx(found.step_ms, rel=1e-6)
    for part in ("GEMM", "attention", "elementwise", "loss", "optimizer", "idle"):
        assert found.parts[part] > 0, part


def test_it_trains_what_train_trains(bench, arriero, synthetic_cache, tmp_path):
    """The losses are those of `arriero train` with the same run file."""
    (tmp_path / "run.toml").write_text(
        "[model]\npreset = 'llama-test'\nvocab_size = 4096\n[data]\nseq_len = 64\n"
        f"cache = '{synthetic_cache}'\nsources = [{{ path = 'builtin:synthetic' }}]\n"
        "[train]\nbatch = '512 tok'\nhorizon = '6 steps'\n[observe]\nlog_every = 1\n"
    )
    code, _, path = bench("run.toml", "--no-profile")
    assert code == 0
    assert arriero("train", "run.toml", "--set", "run.device=cpu", cwd=tmp_path).returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    losses = StepResult.read(path).losses
    assert (losses.first_step, losses.last_step) == (1, 6)
    assert (losses.first, losses.last) == (lines[0]["loss"], lines[-1]["loss"])
    assert losses.first_grad_norm == lines[0]["grad_norm"]
    assert not (tmp_path / "runs" / "bench").exists()


def test_several_ranks_are_measured_as_one_run(bench):
    code, out, path = bench("--no-profile", nproc=2)
    assert code == 0
    result = StepResult.read(path)
    assert (result.ranks, result.layout) == (2, "dp_shard 2")
    assert result.config["data"]["sources"][0]["path"] == "builtin:synthetic"
    assert result.timing.tokens_per_s == pytest.approx(512 / result.timing.median_ms * 1e3)
    assert f"{result.timing.tokens_per_s:,.0f} tok/s" in out


def test_a_mistake_ends_in_one_sentence(arriero, tmp_path):
    for arguments, words in [
        (["bench", "step", "absent.toml"], "no run file absent.toml"),
        (["bench", "step", "--set", "data.packing=none"], "every step is different work"),
        (["bench", "step", "--gate-from", "absent.json"], "absent.json cannot be read"),
        (["bench", "matrix", "--models", "gpt2-1.5"], "did you mean 'gpt2-1.5b'"),
        (["bench", "compare", "a.json", "b.json"], "a.json cannot be read"),
    ]:
        result = arriero(*arguments)
        assert result.returncode == 2, arguments
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_schema_is_refused(measured, tmp_path):
    changed = json.loads(measured.read_text()) | {"schema_version": 99}
    (tmp_path / "old.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="schema_version"):
        StepResult.read(tmp_path / "old.json")


def test_the_spread_is_that_of_the_steps():
    timing = Timing.of([10.0, 20.0, 30.0, 40.0, 100.0], 600, 2, 1.0)
    assert (timing.lower_quartile_ms, timing.median_ms, timing.upper_quartile_ms) == (20.0, 30.0, 40.0)
    assert (timing.min_ms, timing.max_ms, timing.tokens_per_s) == (10.0, 100.0, 20_000.0)


def test_one_step_has_no_spread_but_a_time():
    timing = Timing.of([250.0], 1000, 0, 1.0)
    assert (timing.lower_quartile_ms, timing.median_ms, timing.upper_quartile_ms) == (250.0, 250.0, 250.0)
    assert timing.tokens_per_s == 4000.0


def test_a_single_step_without_warm_up_is_timed_from_its_beginning(bench):
    _, _, path = bench("--steps", "1", "--warmup", "0", "--no-profile")
    timing = StepResult.read(path).timing
    assert len(timing.step_ms) == 1 and timing.warmup_steps == 0
    # the process has to begin, too
    assert 1.0 < timing.step_ms[0] < 1e3 * timing.start_up_s


class FakeNvml:
    """NVML of two GPUs; the second may have no energy meter."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, second_has_meter=True, has_driver=True):
        self._second_has_meter, self._has_driver = second_has_meter, has_driver

    def nvmlInit(self):
        if not self._has_driver:
            raise self.NVMLError("driver not loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in ("GPU-a", "GPU-b"):
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        if gpu == "GPU-b" and not self._second_has_meter:
            raise self.NVMLError("not supported")
        return {"GPU-a": 1000, "GPU-b": 2000}[gpu]

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        return {1: 1980, 2: 3201}[kind]

    nvmlDeviceGetMaxClockInfo = nvmlDeviceGetClockInfo

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(total=143771 * 2**20)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):
        return 700_000

    def nvmlSystemGetDriverVersion(self):
        return "575.57.08"


def test_energy_is_the_sum_of_all_gpus_or_not_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert Meter(["GPU-a", "GPU-b"]).joules() == 3.0
    assert Meter(["GPU-a"]).sm_mhz() == 1980
    assert Meter(["GPU-a", "GPU-c"]).joules() is None
    assert Meter([]).joules() is None
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(second_has_meter=False))
    assert Meter(["GPU-a", "GPU-b"]).joules() is None


def test_a_missing_driver_or_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(has_driver=False))
    meter = Meter(["GPU-a"])
    assert (meter.joules(), meter.sm_mhz(), meter.problem) == (None, None, "NVML: driver not loaded")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = Meter(["GPU-a"])
    assert (meter.joules(), meter.sm_mhz()) == (None, None)
    assert "pip install 'arriero[nvidia]'" in meter.problem


def test_packed_documents_are_measured_and_their_flops_counted_by_document(bench):
    code, _, path = bench("--no-gate", "--no-profile", "--documents", "16:0")
    assert code == 0
    result = StepResult.read(path)
    spec = ModelSpec.from_dict(result.work.model)
    assert result.work.document_mask and "mean 16" in result.work.documents
    found = {rate.convention: rate.flops_per_token for rate in result.rates}
    for convention in ("causal", "hfu"):
        expected = flops_per_token(spec, 64, convention, attended=16.0)
        assert found[convention] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("lengths", ["x", "0", "-5", "1e99", "10:x", "10:-1", "nan", ""])
def test_document_lengths_that_are_no_distribution_are_refused(lengths):
    with pytest.raises(UserError, match="not a distribution of lengths"):
        DocumentLengths.parse(lengths)


@pytest.mark.parametrize(
    "key",
    [{"memory.ffn_tile": 24}, {"memory.activation_checkpointing": "selective"}],
    ids=["tiles", "selective"],
)
def test_hfu_counts_what_is_recomputed(bench, key):
    _, _, path = bench("--no-profile", "--no-gate", **key)
    result = StepResult.read(path)
    spec = ModelSpec.from_dict(result.work.model)
    more = result.rate("hfu").flops_per_token - flops_per_token(spec, 64, "hfu")
    assert 0.1 < more / (2 * spec.layers * spec.block_matmul_parameters) < 0.8


def test_the_driver_describes_a_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr("arriero.train.device.uuid_of", lambda _: "GPU-a")
    used = Device(torch.device("cuda", 1), "NVIDIA H200", 0, None)
    device = describe_device(used, 1, 1755)
    assert device.memory_gib == pytest.approx(140.4, abs=0.1)
    assert (device.driver, device.power_limit) == ("575.57.08", "700.00 W")
    assert device.clocks == {
        "sm_at_work": "1755 MHz",
        "sm": "1980 MHz",
        "memory": "3201 MHz",
        "max_sm": "1980 MHz",
        "max_memory": "3201 MHz",
    }


def test_a_copy_of_the_source_names_its_commit_in_a_variable(monkeypatch):
    monkeypatch.setattr("arriero.bench.machine._output_of", lambda *_: None)
    monkeypatch.delenv("ARRIERO_COMMIT", raising=False)
    assert (describe_code().commit, describe_code().dirty) == (None, None)
    monkeypatch.setenv("ARRIERO_COMMIT", "4c0ec6c" + 33 * "0")
    assert (describe_code().commit, describe_code().dirty) == ("4c0ec6c" + 33 * "0", False)


def test_a_commit_that_is_no_hash_is_rejected_before_the_measurement(arriero, monkeypatch):
    monkeypatch.setenv("ARRIERO_COMMIT", "main")
    result = arriero("bench", "step")
    assert result.returncode == 2
    assert "ARRIERO_COMMIT is 'main', not a commit of 40 hexadecimal digits" in result.stderr


@pytest.mark.parametrize(
    ("count", "warmup", "spread"),
    [
        (1, 1, "one step"),
        (1, 0, "one step, the first"),
        (4, 1, "1.0-1.0 of 4 steps"),
        (20, 5, "1.0-1.0"),
        (20, 0, "1.0-1.0, the first among them"),
    ],
)
def test_a_spread_says_what_is_unusual_about_its_steps(count, warmup, spread):
    assert Timing.of([1.0] * count, 10, warmup, 1.0).spread == spread


def test_a_result_states_the_activation_checkpointing_that_auto_became(bench):
    code, _, file = bench("--no-gate", "--no-profile", **{"memory.activation_checkpointing": "auto"})
    assert code == 0
    assert StepResult.read(file).config["memory"]["activation_checkpointing"] == "none"


def test_the_trace_of_the_profiled_steps_is_kept(bench, tmp_path):
    code, out, path = bench("--no-gate", "--trace", "trace.json.gz")
    assert code == 0
    assert "trace written to trace.json.gz" in out
    events = read_trace(tmp_path / "trace.json.gz")["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    assert len(steps) == StepResult.read(path).breakdown.steps
    assert [file.name for file in tmp_path.glob("*trace*")] == ["trace.json.gz"]


def test_a_trace_needs_profiled_steps(bench):
    with pytest.raises(UserError, match="--trace needs profiled steps"):
        bench("--no-gate", "--no-profile", "--trace", "trace.json")
