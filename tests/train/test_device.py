from types import SimpleNamespace

import pytest
import torch

from arriero.errors import NodeError, UserError
from arriero.train.device import Device, choose_device


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize(("hip", "kind"), [(None, "cuda"), ("7.0", "rocm")])
def test_machine_of_a_gpu_is_what_torch_reports(monkeypatch, supported, hip, kind):
    asked = []

    def answer(including_emulation):
        asked.append(including_emulation)
        return supported

    properties = SimpleNamespace(name="a GPU", total_memory=2**31, gcnArchName="gfx942" if hip else "")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", answer)
    monkeypatch.setattr(torch.version, "hip", hip)
    machine = Device(torch.device("cuda"), "a GPU", 2**30, None).machine(8)
    assert (machine.kind, machine.memory_free, machine.memory_total) == (kind, 2**30, 2**31)
    assert (machine.bf16, machine.float8, machine.devices_per_node) == (supported, True, 8)
    assert asked == [False]


def test_second_process_on_the_only_gpu_is_rejected(monkeypatch):
    """NCCL would refuse it later, and less clearly."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    with pytest.raises(UserError, match="process 1 of this node has no GPU of its own: there are 1"):
        choose_device("auto", local_rank=1, local_size=2)


@pytest.mark.parametrize(("allocated", "visible", "is_of_node"), [(2, 0, True), (2, 1, True), (1, 1, False)])
def test_a_gpu_that_slurm_allocated_and_is_missing_is_an_error_of_the_node(
    monkeypatch, allocated, visible, is_of_node
):
    """More processes than GPUs were allocated for is a mistake of the user."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", str(allocated))
    with pytest.raises(UserError) as error:
        choose_device("cuda", local_rank=1, local_size=2)
    assert isinstance(error.value, NodeError) == is_of_node


def test_cpu_reports_its_free_memory():
    device = choose_device("cpu")
    assert 2**28 < device.memory < 2**50
    assert device.peak_memory() > 2**20


def test_peak_memory_of_a_process_excludes_its_parent(python):
    child = "from arriero.train.device import choose_device; print(choose_device('cpu').peak_memory())"
    parent = f"import subprocess, sys; kept = b'x' * 2**31; subprocess.run([sys.executable, '-c', {child!r}])"
    started = python("-c", parent)
    assert started.returncode == 0, started.stderr
    assert 2**26 < int(started.stdout) < 2**30
