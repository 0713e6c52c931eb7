"""What a round costs on the network: bytes, seconds, share of the round, and the smallest useful H."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from arriero.errors import UserError

# what a site ships of a parameter (int8 has an fp32 scale per 256), and the fp32 model that it receives
UP_BYTES = {"bf16": 2.0, "int8": 1 + 4 / 256, "fp32": 4.0}
DOWN_BYTES = 4.0
TARGET_SHARE = 0.05
_RATES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class RoundCost:
    """The traffic of one round through the coordinator's link, which all sites share.

    `overlaps`: the model is sent in parts while training continues, so only what exceeds the training time
    is waited for.
    """

    parameters: int
    sites: int
    bits_per_s: float
    codec: str
    step_s: float
    steps: int
    overlaps: bool = False

    @property
    def bytes(self) -> float:
        return self.sites * self.parameters * (UP_BYTES[self.codec] + DOWN_BYTES)

    @property
    def transfer_s(self) -> float:
        return 8 * self.bytes / self.bits_per_s

    @property
    def train_s(self) -> float:
        return self.steps * self.step_s

    @property
    def waited_s(self) -> float:
        return max(0.0, self.transfer_s - self.train_s) if self.overlaps else self.transfer_s

    @property
    def share(self) -> float:
        """Return the part of a round in which sites wait for the network."""
        return self.waited_s / (self.waited_s + self.train_s)

    @property
    def least_steps(self) -> int:
        """Return the smallest H at which communication stays under 5 % of the round."""
        if self.overlaps:
            return max(
                1, math.ceil(self.transfer_s / (self.step_s * (1 + TARGET_SHARE / (1 - TARGET_SHARE))))
            )
        return max(1, math.ceil(self.transfer_s * (1 - TARGET_SHARE) / (TARGET_SHARE * self.step_s)))


def parse_rate(text: str) -> float:
    """Return the bits per second of '10 Gbit/s'."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT])(?:bit/s|bps)\s*", text)
    if not match or float(match[1]) == 0:
        raise UserError(f"'{text}' is not a bandwidth", "write it like '10 Gbit/s'")
    return float(match[1]) * _RATES[match[2]]


_METHODS = (("FedAvg bf16", "bf16", False), ("DiLoCo int8", "int8", False), ("streaming int8", "int8", True))
_MODELS = (("8B", 8_030_261_248, 7.9), ("70B", 70_553_706_496, 69.0))
_STEPS = 500


def documented() -> Iterator[str]:
    """Yield the rows of the table in docs/federation.md."""
    yield "| model | sites | link | method | per round | transfer | share of the round | least H under 5 % |"
    yield "|---|---|---|---|---|---|---|---|"
    for model, parameters, step_s in _MODELS:
        for sites in (2, 8, 64):
            for link in ("1 Gbit/s", "10 Gbit/s"):
                for method, codec, overlaps in _METHODS:
                    cost = RoundCost(parameters, sites, parse_rate(link), codec, step_s, _STEPS, overlaps)
                    size, hours = f"{cost.bytes / 1e9:,.0f} GB", f"{cost.transfer_s / 60:,.0f} min"
                    row = (
                        model,
                        sites,
                        link,
                        method,
                        size,
                        hours,
                        f"{cost.share:.1%}",
                        f"{cost.least_steps:,}",
                    )
                    yield f"| {' | '.join(map(str, row))} |"
