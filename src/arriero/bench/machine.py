"""The machine and the code of a measurement."""

import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import arriero
from arriero.bench.result import CodeVersion, DeviceInfo
from arriero.errors import UserError
from arriero.train.device import Device
from arriero.train.energy import Meter

COMMIT_VARIABLE = "ARRIERO_COMMIT"


def describe_device(used: Device, ranks: int, busy_mhz: int | None = None) -> DeviceInfo:
    """Describe the device of rank 0; `busy_mhz` is its SM clock during the measurement."""
    found = Meter([used.uuid] if used.uuid else []).describe()
    busy = {"sm_at_work": f"{busy_mhz} MHz"} if busy_mhz else {}
    memory = found.get("memory_gib")
    return DeviceInfo(
        name=used.name,
        count=ranks if used.is_gpu else 1,
        memory_gib=float(memory) if memory else None,
        driver=found.get("driver"),
        clocks=busy | {name: value for name, value in found.items() if value.endswith(" MHz")},
        power_limit=found.get("power_limit"),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
    )


def device_key(used: Device) -> str:
    """Return the name under which measurements of a device are kept; of a CPU, its model and threads."""
    return used.name if used.is_gpu else f"{_cpu_model()}, {used.name.removeprefix('CPU, ')}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_code() -> CodeVersion:
    """Describe the source and library versions; looks at every GPU, so never call it before a fork."""
    source = Path(arriero.__file__).parent
    commit, dirty = _commit(source)
    cudnn: Any = torch.backends.cudnn.version() if torch.version.cuda else None
    return CodeVersion(
        commit=commit,
        dirty=dirty,
        source=source_digest(),
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


def check_commit_variable() -> None:
    """Raise UserError if ARRIERO_COMMIT is set and not a full commit hash."""
    given = os.environ.get(COMMIT_VARIABLE)
    if given and not re.fullmatch(r"[0-9a-f]{40}", given):
        raise UserError(
            f"{COMMIT_VARIABLE} is '{given}', not a commit of 40 hexadecimal digits",
            "set it to the output of `git rev-parse HEAD`, or unset it",
        )


def _commit(source: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the source and whether it has changes.

    A copy without .git, as on a compute node, names its commit in ARRIERO_COMMIT and counts as clean.
    """
    commit = _output_of("git", "-C", str(source), "log", "-1", "--format=%H", "--", ".")
    if commit is not None:
        return commit, bool(_output_of("git", "-C", str(source), "status", "--porcelain", "--", "."))
    check_commit_variable()
    given = os.environ.get(COMMIT_VARIABLE) or None
    return given, False if given else None


def source_digest() -> str:
    """Return a checksum of Arriero's source, which must be the same on all nodes of a run."""
    folder, found = Path(arriero.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output_of(*command: str) -> str | None:
    """Return what a program prints; None if it is missing, fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def process_started() -> float:
    """Return when this process started, by the clock of `time.time`, before its first line of Python."""
    if sys.platform != "linux":
        return time.time()
    # the program name in parentheses may contain spaces
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))
