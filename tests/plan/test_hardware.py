import pytest

from arriero.plan.hardware import peak_of


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI250X/MI250", 191.5e12),
        ("AMD Instinct MI300X OAM", 1307.4e12),
    ],
)
def test_known_devices_have_their_published_peak(name, peak):
    assert peak_of(name).bf16 == peak


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090", "NVIDIA GB200", "NVIDIA GH200 480GB", "AMD Instinct MI300A", "CPU"]
)
def test_an_unknown_device_has_no_peak_rather_than_a_guess(name):
    assert peak_of(name) is None
