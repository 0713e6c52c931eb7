"""One process with the GPU to itself, and a model in it as a run makes it."""

import torch

from arriero.config.fields import ActivationCheckpointing
from arriero.config.schema import MemorySection, PrecisionSection
from arriero.kernels import enable_kernels
from arriero.parallel.apply import ModelOptions, parallelize
from arriero.parallel.fsdp import Sharding
from arriero.parallel.loss import LossOptions
from arriero.parallel.mesh import make_mesh
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import World
from arriero.plan.layout import Layout

DEVICE = torch.device("cuda")
MESH = make_mesh(Layout(), World(), 1, DEVICE)


def alone(work):
    """Forked, as the tests' own process must never touch the GPU: see tests/conftest.py."""
    return run_ranks(work, 1, leader_prints=False)


def made(spec, compiled=False, weights=torch.float32, checkpointing="none", loss_chunk=2048, kernels=True):
    """`kernels` are for all that this process computes from here on."""
    enable_kernels(kernels)
    recipe = ModelOptions(
        sharding=Sharding(weights, torch.float32, True, 1, False),
        compiled=compiled,
        async_tp=False,
        memory=MemorySection(activation_checkpointing=ActivationCheckpointing.parse(checkpointing)),
        precision=PrecisionSection(),
        loss=LossOptions(loss_chunk),
        weights=weights,
        splits_backward=False,
        widths_vary=False,
        seed=1,
    )
    [model], _ = parallelize(spec, [range(spec.layers)], MESH, recipe, DEVICE)
    return model


def relative_error(found, expected):
    """The norm of the difference, by that of what was expected."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
