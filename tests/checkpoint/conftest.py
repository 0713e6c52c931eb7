import pytest

from arriero.checkpoint.manager import Checkpoints
from arriero.checkpoint.ranks import Ranks
from checkpoint.running import Runs


@pytest.fixture
def runs(tmp_path, corpus_cache):
    return Runs(tmp_path, corpus_cache)


@pytest.fixture
def checkpoints(tmp_path):
    """Each call is a new process's view of the checkpoints of one run directory."""
    return lambda **options: Checkpoints(tmp_path, Ranks(), 1000, **options)
