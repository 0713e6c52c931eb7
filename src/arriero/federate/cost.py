"""What a round costs on the network: bytes, seconds, share of the round, and the smallest useful H."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from arriero.config.load import load_run
from arriero.errors import UserError
from arriero.federate.coordinator import Coordinator
from arriero.model.adapters import adapter_of
from arriero.model.name_maps import own_tensors
from arriero.model.presets import expand
from arriero.plan.rules import spec_of

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


@dataclass(frozen=True)
class PlannedRound:
    """A round of the slowest site; `source` says where its speed comes from.

    `sites_bits_per_s` is what all sites send together when each is as slow as the slowest link of a site.
    """

    parameters: int
    sites: int
    steps: int
    step_s: float
    codec: str
    source: str
    sites_bits_per_s: float | None = None


def planned_round(path: Path, tokens_per_s: float | None) -> PlannedRound:
    coordinator = Coordinator.of(path)
    model = coordinator.config.federation.model
    sets = [f"checkpoint.start_from='{model}'"] if model else []
    configs = [
        load_run(Path(site.run_file), [*site.set, *sets], expand).config for site in coordinator.config.sites
    ]
    spec = spec_of(configs[0])
    adapter = adapter_of(configs[0].model_dump())
    shipped = spec.parameters
    if adapter is not None:
        shipped = sum(tensor.numel() for tensor in adapter.tensors(own_tensors(spec)).values())
    batch = max(config.train.batch.amount for config in configs)
    source = "--tokens-per-s"
    if tokens_per_s is None:
        speeds = coordinator.measured_speeds() if coordinator.rounds.model(0).is_dir() else {}
        if not speeds:
            raise UserError(
                "the speed of the sites is not known yet",
                "give --tokens-per-s of the slowest one (`arriero plan` predicts it), or run a round first",
            )
        slowest = min(speeds, key=speeds.__getitem__)
        tokens_per_s, source = speeds[slowest], f"measured at {slowest}"
    steps = max(1, round(coordinator.config.federation.tokens.in_tokens(batch) / batch))
    codec = coordinator.config.outer.codec
    links = [len(configs) * parse_rate(site.bandwidth) for site in coordinator.config.sites if site.bandwidth]
    return PlannedRound(
        shipped,
        len(configs),
        steps,
        batch / tokens_per_s,
        codec,
        f"{tokens_per_s:,.0f} tokens/s, {source}",
        min(links, default=None),
    )
