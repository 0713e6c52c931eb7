"""What a measurement was made with: the device, the libraries, the code."""

import hashlib
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import arriero
from arriero.bench.result import Code, Machine
from arriero.train.device import Device

_QUERY = {
    "driver_version": "driver",
    "power.limit": "power_limit",
    "clocks.sm": "sm",
    "clocks.mem": "memory",
    "clocks.max.sm": "max_sm",
    "clocks.max.mem": "max_memory",
}
_CLOCKS = ("sm", "memory", "max_sm", "max_memory")


def describe_machine(used: Device, ranks: int, busy_mhz: int | None = None) -> Machine:
    """By then the GPU rests, so that its clock at work is handed in."""
    told = _from_driver(used.uuid) if used.uuid else {}
    busy = {"sm_at_work": f"{busy_mhz} MHz"} if busy_mhz else {}
    memory = told.get("memory_total", "").removesuffix(" MiB")
    return Machine(
        name=used.name,
        count=ranks if used.is_gpu else 1,
        memory_gib=float(memory) / 1024 if memory.isdigit() else None,
        driver=told.get("driver"),
        clocks=busy | {clock: told[clock] for clock in _CLOCKS if clock in told},
        power_limit=told.get("power_limit"),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
    )


def _from_driver(uuid: str) -> dict[str, str]:
    fields = {"memory.total": "memory_total"} | _QUERY
    said = _said("nvidia-smi", "-i", uuid, f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    if not said:
        return {}
    values = [value.strip() for value in said.splitlines()[0].split(",")]
    return dict(zip(fields.values(), values, strict=False))


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_code() -> Code:
    source = Path(arriero.__file__).parent
    commit = _said("git", "-C", str(source), "log", "-1", "--format=%H", "--", ".")
    changed = _said("git", "-C", str(source), "status", "--porcelain", "--", ".")
    # looks at every GPU: never in a process that forks others
    cudnn: Any = torch.backends.cudnn.version() if torch.version.cuda else None
    return Code(
        commit=commit,
        dirty=None if commit is None else bool(changed),
        source=_digest(source),
        versions={
            "arriero": arriero.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": str(cudnn) if cudnn else None,
            "triton": _installed("triton"),
            "torchao": _installed("torchao"),
        },
    )


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    """None where there is no such program, it fails, or says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def process_started() -> float:
    """When this process did, by the clock of `time.time`: long before its first line of Python."""
    if sys.platform != "linux":
        return time.time()
    # the name of the program, in parentheses, may hold spaces
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))
