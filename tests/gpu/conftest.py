import importlib

import pytest
import torch

from gpu.alone import DEVICE, alone


@pytest.fixture(scope="session", autouse=True)
def compiler():
    """Imported once for all processes forked from here, if a trial shows that they can still use the GPU."""
    if alone(usable_after_import):
        importlib.import_module("torch._inductor.compile_fx")


def usable_after_import():
    importlib.import_module("torch._inductor.compile_fx")
    return alone(usable)


def usable():
    try:
        return torch.zeros(1, device=DEVICE).sum().item() == 0.0
    except RuntimeError:
        return False
