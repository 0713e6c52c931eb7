"""Resolve a run for the device of this process, before the process group is created."""

from dataclasses import dataclass

import torch

from arriero.config.schema import RunConfig
from arriero.parallel.world import World
from arriero.plan.resolve import Resolved, resolve
from arriero.train.device import DTYPES, Device, choose_device
from arriero.train.rundir import check_run_directory


@dataclass(frozen=True)
class Arrangement:
    """A resolved run on the device of one rank."""

    resolved: Resolved
    world: World
    device: Device

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def dtype(self) -> torch.dtype:
        """The compute precision as torch's type."""
        return DTYPES[self.resolved.compute]


def arrange(config: RunConfig, world: World) -> Arrangement:
    """Choose the device of this rank and resolve the run for it."""
    check_run_directory(config)
    device = choose_device(config.run.device, world.local_rank, world.local_size, config.run.share_gpu)
    return Arrangement(resolve(config, device.machine(world.local_size), world.size), world, device)
