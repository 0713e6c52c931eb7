import pytest
import torch

from arriero.config.load import load_run
from arriero.errors import UserError
from arriero.model.presets import expand, load_preset
from arriero.plan.layout import Layout
from arriero.train.arrange import _compiled
from arriero.train.device import Device, choose_compute, choose_device

GPU = Device(torch.device("cuda"), "a GPU", 2**30, None)
CPU = Device(torch.device("cpu"), "a CPU", 2**30, None)


@pytest.mark.parametrize("supported", [True, False])
def test_bf16_is_asked_of_the_device(monkeypatch, supported):
    asked = []

    def answer(including_emulation):
        asked.append(including_emulation)
        return supported

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", answer)
    assert choose_compute("auto", GPU)[0] == (torch.bfloat16 if supported else torch.float32)
    assert asked == [False]
    if not supported:
        with pytest.raises(UserError, match="a GPU does not compute it"):
            choose_compute("bf16", GPU)


def test_a_cpu_computes_fp32_unless_told_otherwise():
    assert choose_compute("auto", CPU)[0] == torch.float32
    assert choose_compute("bf16", CPU)[0] == torch.bfloat16
    assert choose_compute("fp16", CPU)[0] == torch.float16
    assert choose_compute("auto", CPU, master="bf16")[0] == torch.bfloat16


def test_a_second_process_on_the_only_gpu_is_refused(monkeypatch):
    """NCCL would refuse it later, and less clearly."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    with pytest.raises(UserError, match="process 1 of this node has no GPU of its own: there are 1"):
        choose_device("auto", local_rank=1, local_size=2)


def test_the_cpu_knows_its_free_memory():
    device = choose_device("cpu")
    assert 2**28 < device.memory < 2**50
    assert device.peak_memory() > 2**20


@pytest.mark.parametrize(
    ("model", "device", "compiled"),
    [("llama3.2-1b", GPU, True), ("llama-demo", GPU, False), ("llama3.2-1b", CPU, False)],
)
def test_blocks_are_compiled_on_gpus_unless_they_are_tiny(model, device, compiled):
    config = load_run(None, [f"model.preset={model}"], expand).config
    assert _compiled(config, load_preset(model), Layout(), device)[0] is compiled


def test_the_peak_of_a_process_is_not_that_of_the_one_which_started_it(python):
    child = "from arriero.train.device import choose_device; print(choose_device('cpu').peak_memory())"
    parent = f"import subprocess, sys; kept = b'x' * 2**31; subprocess.run([sys.executable, '-c', {child!r}])"
    started = python("-c", parent)
    assert started.returncode == 0, started.stderr
    assert 2**26 < int(started.stdout) < 2**30
