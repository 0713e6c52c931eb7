"""What devices can do at best, from their makers' data sheets."""

import re
from dataclasses import dataclass


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
    """None for a device not in the table: a guessed peak would make a false MFU."""
    for pattern, peak in _PEAKS:
        if re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])", device_name):
            return peak
    return None
