"""The device a process computes on: which, in what precision, at what peak, with how much memory."""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from arriero.errors import UserError
from arriero.plan.hardware import peak_of

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Device:
    """NVIDIA and AMD GPUs are both 'cuda' to torch; nothing here asks which. `memory` is what is free."""

    torch_device: torch.device
    name: str
    memory: int
    bf16_peak_flops: float | None

    @property
    def is_gpu(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def gpu_memory(self) -> int | None:
        """All there is, whoever uses it."""
        return torch.cuda.get_device_properties(self.torch_device).total_memory if self.is_gpu else None

    @property
    def uuid(self) -> str | None:
        """By which the driver's tools know it."""
        return uuid_of(self.torch_device) if self.is_gpu else None

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def peak_memory(self) -> int:
        """Most bytes in use so far: of the GPU, or of this process."""
        if self.is_gpu:
            return torch.cuda.max_memory_allocated(self.torch_device)
        return _peak_of_process()


def uuid_of(gpu: torch.device | int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"


def choose_device(wanted: str, local_rank: int = 0, local_size: int = 1) -> Device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is 'cuda' but torch sees no GPU here", "set run.device = 'auto' or 'cpu'")
    if wanted == "cpu" or not torch.cuda.is_available():
        threads = torch.get_num_threads()
        name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        return Device(torch.device("cpu"), name, available_ram() // local_size, None)
    visible = torch.cuda.device_count()
    # Slurm may show each process its own GPU alone
    bound = visible == 1 and "SLURM_STEP_ID" in os.environ
    if local_rank >= visible and not bound:
        raise UserError(
            f"process {local_rank} of this node has no GPU of its own: there are {visible}",
            "start one process per GPU, or set run.device = 'cpu'",
        )
    device = torch.device("cuda", 0 if bound else local_rank)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    peak = peak_of(properties.name)
    free, _ = torch.cuda.mem_get_info(device)
    return Device(device, properties.name, free, peak.bf16 if peak else None)


def _peak_of_process() -> int:
    # on Linux the other figure is never below that of the process which started this one
    if peak := _bytes_told(Path("/proc/self/status"), "VmHWM"):
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _bytes_told(file: Path, field: str) -> int | None:
    """By a file of Linux's like /proc/meminfo; None where it is not there, or does not tell."""
    lines = file.read_text().splitlines() if file.exists() else []
    told = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(told[0]) * 1024 if told else None


def available_ram() -> int:
    """What this process may still take: of the machine, and of its container or job."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pages = _bytes_told(Path("/proc/meminfo"), "MemAvailable") or pages
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        return min(pages, int(text) - int(used.read_text()))
    return pages


def choose_compute(wanted: str, device: Device, master: str = "fp32") -> tuple[torch.dtype, str]:
    """The precision of activations and matmuls, and why."""
    if wanted == "auto" and master == "bf16":
        return choose_compute("bf16", device)[0], "precision.master is 'bf16'"
    supported = not device.is_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted == "bf16" and not supported:
        raise UserError(
            f"precision.compute is 'bf16' but {device.name} does not compute it", "set it to 'fp32' or 'fp16'"
        )
    if wanted != "auto":
        return _TYPES[wanted], "as configured"
    if not device.is_gpu:
        return torch.float32, "the safe choice on a CPU"
    if not supported:
        return torch.float32, f"{device.name} does not compute bf16"
    return torch.bfloat16, f"{device.name} computes bf16"


def make_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
