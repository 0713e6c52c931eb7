"""Machines as data: memory, number formats and peak FLOP/s from the makers' data sheets."""

import os
import re
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from arriero.errors import UserError, nearest

GIB = 2**30
# what the driver takes of a device's memory for a process
_CONTEXT = 600 * 2**20


def _installed_torch() -> tuple[int, int]:
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Machine:
    """One device of a run, and how many of them a node has. All ranks have the same device.

    `memory_free` and `memory_total` are bytes per device. `bf16` and `float8` say whether the hardware
    multiplies these formats; `bf16_peak_flops` is the dense peak, None where it is not known.
    """

    name: str
    kind: Literal["cpu", "cuda", "rocm"]
    memory_free: int
    memory_total: int
    devices_per_node: int = 1
    bf16: bool = True
    float8: bool = False
    bf16_peak_flops: float | None = None
    torch: tuple[int, int] = field(default_factory=_installed_torch)

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"


@dataclass(frozen=True)
class Peak:
    """Dense peak FLOP/s of one device as torch sees it: one MI250X is two devices."""

    bf16: float
    fp8: float | None = None


# Matched as whole words, first hit wins: "GH200" and "GB200" are other devices than "H200" and "B200".
_PEAKS = (
    (r"A100", Peak(312e12)),
    (r"H100 PCIe", Peak(756e12, 1513e12)),
    (r"H100 NVL", Peak(835e12, 1671e12)),
    (r"H100", Peak(989e12, 1979e12)),
    (r"H200 NVL", Peak(835e12, 1671e12)),
    (r"H200", Peak(989e12, 1979e12)),
    (r"B200", Peak(2250e12, 4500e12)),
    (r"MI250X", Peak(191.5e12)),
    (r"MI300X", Peak(1307.4e12, 2614.9e12)),
)


def peak_of(device_name: str) -> Peak | None:
    """Return the peak of a device, or None if it is not in the table: a guess would give a wrong MFU."""
    for pattern, peak in _PEAKS:
        if re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])", device_name):
            return peak
    return None


# name: the device's own name, GiB that torch reports, devices per node
_GPUS = {
    "a100-40": ("NVIDIA A100-SXM4-40GB", 39.4, 8),
    "a100-64": ("NVIDIA A100-SXM-64GB", 63.4, 4),
    "a100-80": ("NVIDIA A100-SXM4-80GB", 79.2, 8),
    "h100": ("NVIDIA H100 80GB HBM3", 79.2, 8),
    "h100-nvl": ("NVIDIA H100 NVL", 93.1, 8),
    "h100-pcie": ("NVIDIA H100 PCIe", 79.2, 8),
    "h200": ("NVIDIA H200", 139.8, 8),
    "b200": ("NVIDIA B200", 178.3, 8),
    "mi250x": ("AMD Instinct MI250X", 64.0, 8),
    "mi300x": ("AMD Instinct MI300X", 191.7, 8),
}
MACHINES = ("cpu", *_GPUS)


def machine_named(name: str, ranks: int = 1) -> Machine:
    """Return a machine of the table; 'cpu' has this host's memory, divided between `ranks` processes."""
    name = name.lower()
    if name == "cpu":
        free = available_ram() // ranks
        return Machine("CPU", "cpu", free, free, devices_per_node=ranks)
    if name not in _GPUS:
        near = nearest(name, MACHINES)
        hint = f"did you mean '{near}'? " if near else ""
        raise UserError(f"there is no device '{name}'", f"{hint}known devices: {', '.join(MACHINES)}")
    device, gib, per_node = _GPUS[name]
    peak, total = peak_of(device), int(gib * GIB)
    assert peak is not None
    return Machine(
        name=device,
        kind="rocm" if device.startswith("AMD") else "cuda",
        memory_free=total - _CONTEXT,
        memory_total=total,
        devices_per_node=per_node,
        float8=peak.fp8 is not None,
        bf16_peak_flops=peak.bf16,
    )


def proc_bytes(file: Path, field: str) -> int | None:
    """Return a field of a file like /proc/meminfo in bytes, or None where it is missing."""
    lines = file.read_text().splitlines() if file.exists() else []
    values = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(values[0]) * 1024 if values else None


def available_ram() -> int:
    """Return the bytes of memory this process may still take, from the host and from its cgroup."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pages = proc_bytes(Path("/proc/meminfo"), "MemAvailable") or pages
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        return min(pages, int(text) - int(used.read_text()))
    return pages
