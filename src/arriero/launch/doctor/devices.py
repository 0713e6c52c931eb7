"""Checks of the devices: present, idle, without memory errors, fast, and equal results every time.

NVIDIA GPUs are read through NVML (nvidia-ml-py), AMD GPUs through sysfs. On a node without a GPU the same
checks measure the CPU. AMD: written from the kernel's documentation, never run.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from arriero.launch.doctor.check import Finding, verdict
from arriero.plan.hardware import device_like
from arriero.units import counted, human_bytes

if TYPE_CHECKING:
    import torch

GIB = 2**30
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
# memory of an idle device that the driver itself may use
_IDLE_BYTES = 2 * GIB
_LEAVE_OUT = "leave the node out and report the device to the site"
SLOW = 0.8


@dataclass(frozen=True)
class Gpu:
    """What the driver reports about a GPU; `problems` are reasons not to use it."""

    name: str
    used: int
    total: int
    problems: tuple[str, ...] = ()
    processes: tuple[int, ...] = field(default_factory=tuple)


def pci_gpus(root: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Return the vendors of the GPUs on the bus, also of those that no driver or container exposes."""
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        # 0x0300 VGA, 0x0302 3D controller, 0x0380 other display, 0x1200 accelerator
        kind, vendor = (path / "class").read_text()[:6], (path / "vendor").read_text().strip()
        if vendor in _VENDORS and kind in ("0x0300", "0x0302", "0x0380", "0x1200"):
            found.append(_VENDORS[vendor])
    return found


def check_devices(expected: int | None) -> Finding:
    """Compare the GPUs that torch sees with those that are expected, and find those in use or faulty.

    Without a number, those are expected that Slurm gave this job on this node.
    """
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    expected = int(given) if expected is None and given.isdigit() else expected
    on_bus = pci_gpus()
    if not visible:
        return _without_gpu(torch, expected, on_bus)
    names = [torch.cuda.get_device_properties(i).name for i in range(visible)]
    gpus = _amd_gpus() if torch.version.hip else _nvidia_gpus(torch, visible)
    fails, warns = [], []
    if expected is not None and visible != expected:
        fails.append(f"torch sees {counted(visible, 'GPU')}, the job has {expected} on this node")
    if len(set(names)) > 1:
        warns.append(f"different GPUs: {', '.join(sorted(set(names)))}")
    for number, gpu in enumerate(gpus):
        who = f" by process {', '.join(map(str, gpu.processes))}" if gpu.processes else ""
        if gpu.used > _IDLE_BYTES:
            fails.append(f"GPU {number} is in use: {human_bytes(gpu.used)}{who}")
        fails.extend(f"GPU {number}: {problem}" for problem in gpu.problems)
    free = min((gpu.total - gpu.used for gpu in gpus), default=0)
    seen = (
        f", at least {human_bytes(free)} free" if gpus else ", state unknown (pip install 'arriero[nvidia]')"
    )
    facts = {"count": visible, "name": names[0], "free": free}
    return verdict(f"{visible} x {names[0]}{seen}", fails, warns, _LEAVE_OUT, **facts)


def _without_gpu(torch: Any, expected: int | None, on_bus: list[str]) -> Finding:
    hidden = any(name in os.environ for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
    facts = {"count": 0, "name": "CPU", "free": 0}
    cores = counted(len(os.sched_getaffinity(0)), "core")
    build = torch.version.cuda or torch.version.hip
    if expected and build is None and not on_bus:
        # a scheduler may count devices that are no GPUs, as test clusters do
        what = f"the job has {counted(expected, 'GPU')} on this node, and this torch is a build for CPUs"
        return Finding("warn", what, "install torch for CUDA or ROCm", facts)
    if expected:
        what = f"the job has {counted(expected, 'GPU')} on this node, torch sees none"
        return Finding("fail", what, _LEAVE_OUT, facts)
    if on_bus and not hidden:
        todo = _LEAVE_OUT if build else "install torch for CUDA or ROCm, and load the driver"
        return Finding("warn", f"{counted(len(on_bus), 'GPU')} on the bus, torch sees none", todo, facts)
    return Finding("pass", f"no GPU; {cores}", facts=facts)


def _nvidia_gpus(torch: Any, visible: int) -> list[Gpu]:
    try:
        import pynvml as nvml
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []

    def read(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(*arguments)
        except nvml.NVMLError:
            return None

    found = []
    for number in range(visible):
        uuid = f"GPU-{torch.cuda.get_device_properties(number).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory: Any = nvml.nvmlDeviceGetMemoryInfo(handle)
        problems = []
        errors = read("nvmlDeviceGetTotalEccErrors", handle, 1, 0)  # uncorrected, since the last reset
        if errors:
            problems.append(f"{counted(errors, 'uncorrected memory error')} since the last reset")
        rows = read("nvmlDeviceGetRemappedRows", handle)
        if rows and (rows[2] or rows[3]):
            problems.append(
                "memory rows could not be remapped" if rows[3] else "waits for a reset to remap rows"
            )
        reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        # hardware slowdown, hardware thermal slowdown and power brake
        if reasons & 0xC8:
            problems.append("slowed down by the hardware (temperature or power)")
        running = read("nvmlDeviceGetComputeRunningProcesses", handle) or []
        others = tuple(each.pid for each in running if each.pid != os.getpid())
        name = torch.cuda.get_device_properties(number).name
        found.append(Gpu(name, memory.used, memory.total, tuple(problems), others))
    return found


def _amd_gpus() -> list[Gpu]:
    found = []
    for path in sorted(Path("/sys/class/drm").glob("card[0-9]*/device")):
        used, total = path / "mem_info_vram_used", path / "mem_info_vram_total"
        if not total.exists():
            continue
        errors = path / "ras" / "umc_err_count"
        lines = errors.read_text().splitlines() if errors.exists() else []
        uncorrected = sum(int(line.split()[-1]) for line in lines if line.startswith("ue:"))
        problems = (f"{counted(uncorrected, 'uncorrected memory error')}",) if uncorrected else ()
        found.append(Gpu("AMD", int(used.read_text()), int(total.read_text()), problems))
    return found


def check_matmul() -> Finding:
    """Multiply on all devices at the same time: rate, equal bits when repeated, and equal bits everywhere."""
    import torch

    devices = _torch_devices(torch)
    is_gpu = devices[0].type == "cuda"
    size, repeats, dtype = (8192, 40, torch.bfloat16) if is_gpu else (1024, 8, torch.float32)
    factors = [_factors(device, size, dtype) for device in devices]
    first = [a @ b for a, b in factors]
    seconds = _timed(torch, devices, lambda i: torch.mm(*factors[i]), repeats)
    exact = [torch.equal(before, torch.mm(*pair)) for before, pair in zip(first, factors, strict=True)]
    sums = [int(each.view(torch.int16 if is_gpu else torch.int32).sum(dtype=torch.int64)) for each in first]
    rates = [2 * size**3 * repeats / each / 1e12 for each in seconds]
    fails = [
        f"device {i} computes other bits when it repeats a matmul" for i, same in enumerate(exact) if not same
    ]
    common = max(sums, key=sums.count)
    fails += [f"device {i} computes other bits than the others" for i, s in enumerate(sums) if s != common]
    slow = [i for i, rate in enumerate(rates) if rate < SLOW * median(rates)]
    fails += [f"device {i}: {rates[i]:.0f} TFLOP/s, the others {median(rates):.0f}" for i in slow]
    name = torch.cuda.get_device_properties(0).name if is_gpu else "CPU"
    known, warns, share = device_like(name), [], ""
    if known is not None and known.bf16:
        expected = known.bf16 * known.rates.matmul
        share = f", {min(rates) / expected:.0%} of what is usual for {name}"
        if min(rates) < SLOW * expected:
            warns.append(f"{min(rates):.0f} TFLOP/s in bf16{share}")
    rate = f"{min(rates):.0f} TFLOP/s in bf16{share}" if is_gpu else f"{1e3 * rates[0]:.0f} GFLOP/s in fp32"
    shown = f"{rate}, repeated with equal bits"
    facts = {"tflops": [round(rate, 3) for rate in rates], "bits": common, "device": name}
    return verdict(shown, fails, warns, f"look at clocks, power limit and temperature; {_LEAVE_OUT}", **facts)


def check_bandwidth() -> Finding:
    """Measure copies between host and device, and within device memory (bytes read and written)."""
    import torch

    devices = _torch_devices(torch)
    is_gpu = devices[0].type == "cuda"
    size = (GIB if is_gpu else GIB // 16) // 4
    source = [torch.ones(size, dtype=torch.float32, device=device) for device in devices]
    target = [torch.empty_like(each) for each in source]
    copied = _timed(torch, devices, lambda i: target[i].copy_(source[i]), 5)
    rates = {"memory": [8 * size * 5 / each / 1e9 for each in copied]}
    if is_gpu:
        host = [torch.ones(size // 4, dtype=torch.float32, pin_memory=True) for _ in devices]
        part = [each[: size // 4] for each in target]
        for name, work in (
            ("to device", lambda i: part[i].copy_(host[i], non_blocking=True)),
            ("to host", lambda i: host[i].copy_(part[i], non_blocking=True)),
        ):
            # one device at a time: together they may share a link to the host
            alone = [
                _timed(torch, [each], lambda _, i=i, w=work: w(i), 5)[0] for i, each in enumerate(devices)
            ]
            rates[name] = [size * 5 / each / 1e9 for each in alone]
    warns = []
    for name, found in rates.items():
        slow = [i for i, rate in enumerate(found) if rate < SLOW * median(found)]
        warns += [f"device {i}: {name} {found[i]:.0f} GB/s, the others {median(found):.0f}" for i in slow]
    known = device_like(torch.cuda.get_device_properties(0).name) if is_gpu else None
    if known is not None and min(rates["memory"]) < SLOW * 1e3 * known.bandwidth * known.rates.memory:
        usual = 1e3 * known.bandwidth * known.rates.memory
        warns.append(f"memory copies at {min(rates['memory']):.0f} GB/s, {usual:.0f} are usual")
    if is_gpu and min(rates["to device"]) < 8:
        warns.append(f"only {min(rates['to device']):.1f} GB/s from host to device")
    shown = ", ".join(f"{name} {min(found):.0f} GB/s" for name, found in rates.items())
    facts = {name: [round(rate, 1) for rate in found] for name, found in rates.items()}
    return verdict(shown, [], warns, f"look at the PCIe link of the device; {_LEAVE_OUT}", **facts)


def _torch_devices(torch: Any) -> "list[torch.device]":
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]


def _factors(device: "torch.device", size: int, dtype: "torch.dtype") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return two matrices with the same bits on every device of a type."""
    import torch

    source = torch.Generator(device).manual_seed(1)
    made = [torch.randn(size, size, generator=source, device=device, dtype=dtype) for _ in range(2)]
    return made[0], made[1]


def _timed(torch: Any, devices: list[Any], work: Callable[[int], Any], repeats: int) -> list[float]:
    """Return the seconds that each device takes for `repeats` calls when all work at the same time."""
    for number in range(len(devices)):
        for _ in range(3):
            work(number)
    if devices[0].type == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            work(0)
        return [time.perf_counter() - start]
    pairs = []
    for device in devices:
        torch.cuda.synchronize(device)
    for number, device in enumerate(devices):
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                work(number)
            end.record()
            pairs.append((device, begin, end))
    for device, _, _ in pairs:
        torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for _, begin, end in pairs]
