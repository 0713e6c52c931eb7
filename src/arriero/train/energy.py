"""Energy meters: of NVIDIA GPUs (NVML), AMD GPUs (amdsmi) and CPUs (RAPL).

A rank reads the meter of its own device. CPUs are metered once per node, by its first rank, and only for runs
on CPUs: the meter counts everything on the node. The amdsmi part follows its documentation and was never run.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arriero.parallel.world import World
from arriero.train.device import Device

RAPL = Path("/sys/class/powercap")
_MISSING = "clocks and energy need the package nvidia-ml-py: pip install 'arriero[nvidia]'"


class Meter:
    """The energy meters and clocks of NVIDIA GPUs through NVML (package nvidia-ml-py).

    Reads None, and `problem` says why, if the package or the driver is missing or one GPU has no meter.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self.problem: str | None = "no NVIDIA GPU" if not uuids else None
        self._gpus: list[Any] = []
        if not uuids:
            return
        try:
            import pynvml
        except ImportError:
            self.problem = _MISSING
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except pynvml.NVMLError as error:
            self.problem = f"NVML: {error}"

    def joules(self) -> float | None:
        """Return the energy of all GPUs since the driver was loaded."""
        found = [self._read(gpu, "nvmlDeviceGetTotalEnergyConsumption") for gpu in self._gpus]
        return sum(found) / 1e3 if found and None not in found else None

    def sm_mhz(self) -> int | None:
        """Return the current SM clock of the first GPU."""
        return self._read(self._gpus[0], "nvmlDeviceGetClockInfo", 1) if self._gpus else None

    def describe(self) -> dict[str, str]:
        """Return driver, memory, power limit and clocks of the first GPU, if the driver reports them."""
        if not self._gpus:
            return {}
        gpu, nvml = self._gpus[0], self._nvml
        sm, memory = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        total = self._read(gpu, "nvmlDeviceGetMemoryInfo")
        milliwatts = self._read(gpu, "nvmlDeviceGetEnforcedPowerLimit")
        clocks = {
            "sm": self._read(gpu, "nvmlDeviceGetClockInfo", sm),
            "memory": self._read(gpu, "nvmlDeviceGetClockInfo", memory),
            "max_sm": self._read(gpu, "nvmlDeviceGetMaxClockInfo", sm),
            "max_memory": self._read(gpu, "nvmlDeviceGetMaxClockInfo", memory),
        }
        found = {name: f"{mhz} MHz" for name, mhz in clocks.items() if mhz is not None}
        found["driver"] = nvml.nvmlSystemGetDriverVersion()
        if total is not None:
            found["memory_gib"] = str(total.total / 2**30)
        if milliwatts is not None:
            found["power_limit"] = f"{milliwatts / 1e3:.2f} W"
        return found

    def _read(self, gpu: Any, function: str, *arguments: Any) -> Any:
        """Call an NVML function; None if this GPU does not support it."""
        try:
            return getattr(self._nvml, function)(gpu, *arguments)
        except self._nvml.NVMLError:
            return None


@dataclass(frozen=True)
class Counter:
    """A meter that counts joules; it starts again from zero after `limit`."""

    read: Callable[[], float | None]
    limit: float | None = None


class EnergyCounter:
    """The energy of this rank's device; ranks whose device another rank reads have no counters."""

    def __init__(self, counters: Sequence[Counter] | None) -> None:
        self._counters = counters
        self._last = [counter.read() for counter in counters or ()]

    def since_last(self) -> float | None:
        """Return the joules since the previous call; None if a meter is missing."""
        if self._counters is None:
            return None
        before, self._last = self._last, [counter.read() for counter in self._counters]
        total = 0.0
        for counter, then, now in zip(self._counters, before, self._last, strict=True):
            if then is None or now is None:
                return None
            total += now - then if now >= then or counter.limit is None else now - then + counter.limit
        return total


def energy_counter(device: Device, world: World, shared: bool = False) -> EnergyCounter:
    """Return the meters that this rank reads; `shared` ranks use the GPU of the first one."""
    if (shared or not device.is_gpu) and world.local_rank:
        return EnergyCounter([])
    if not device.is_gpu:
        return EnergyCounter(rapl_counters() or None)
    if torch.version.hip:
        counter = _amd_counter(device.torch_device)
        return EnergyCounter(None if counter is None else [counter])
    meter = Meter([device.uuid] if device.uuid else [])
    return EnergyCounter(None if meter.problem else [Counter(meter.joules)])


def rapl_counters(root: Path | None = None) -> list[Counter]:
    """Return the meters of the CPU packages that this user may read; most systems allow root alone."""
    found = []
    for package in sorted((root or RAPL).glob("intel-rapl:[0-9]*")):
        # 'intel-rapl:0:1' is a part of 'intel-rapl:0'
        if package.name.count(":") == 1 and _microjoules(package / "energy_uj") is not None:
            limit = _microjoules(package / "max_energy_range_uj")
            found.append(Counter(partial(_microjoules, package / "energy_uj"), limit))
    return found


def _microjoules(file: Path) -> float | None:
    try:
        return int(file.read_text()) / 1e6
    except (OSError, ValueError):
        return None


def _amd_counter(gpu: torch.device) -> Counter | None:
    # the library raises many kinds, and a meter must not end a run
    with suppress(Exception):
        import amdsmi  # pyrefly: ignore[missing-import]

        about: Any = torch.cuda.get_device_properties(gpu)
        wanted = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}"
        amdsmi.amdsmi_init()
        for handle in amdsmi.amdsmi_get_processor_handles():
            if amdsmi.amdsmi_get_gpu_device_bdf(handle).lower().startswith(wanted):
                return Counter(partial(_amd_joules, amdsmi, handle))
    return None


def _amd_joules(amdsmi: Any, handle: Any) -> float | None:
    try:
        found = amdsmi.amdsmi_get_energy_count(handle)
        return found.get("energy_accumulator", found.get("power")) * found["counter_resolution"] / 1e6
    except Exception:
        return None
