"""The meters of NVIDIA GPUs, through the library their driver brings along."""

import ctypes
from collections.abc import Sequence
from contextlib import suppress

_SM_CLOCK = 1


class Meter:
    """Of several GPUs together; reads None where there is no driver, or a GPU has no meter."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._handles: list[ctypes.c_void_p] = []
        self._library = None
        with suppress(OSError):
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        if self._library is None or self._library.nvmlInit_v2() != 0:
            self._library = None
            return
        for uuid in uuids:
            handle = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0:
                self._handles.append(handle)
        if len(self._handles) < len(uuids):
            self._handles = []

    def sm_mhz(self) -> int | None:
        """The clock of the first GPU, now."""
        if self._library is None or not self._handles:
            return None
        mhz = ctypes.c_uint()
        failed = self._library.nvmlDeviceGetClockInfo(self._handles[0], _SM_CLOCK, ctypes.byref(mhz))
        return None if failed else mhz.value

    def joules(self) -> float | None:
        """Since the driver was loaded."""
        if self._library is None or not self._handles:
            return None
        total = 0
        for handle in self._handles:
            millijoules = ctypes.c_ulonglong()
            if self._library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) != 0:
                return None
            total += millijoules.value
        return total / 1e3
