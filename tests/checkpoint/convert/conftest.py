import tempfile
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def memory():
    """A folder in memory where there is one: a hundred small conversions are a thousand fsyncs."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def folder(memory):
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
