import importlib

import pytest
import torch

from gpu.alone import alone


@pytest.fixture(scope="session", autouse=True)
def compiler():
    """Imported once, for all the processes that are forked from here."""
    importlib.import_module("torch._inductor.compile_fx")
    if not alone(torch.cuda.is_available):
        pytest.exit("importing torch's compiler has touched the GPU: no test could use it any more", 3)
