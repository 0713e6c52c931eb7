import pytest

from checkpoint.running import Runs


@pytest.fixture
def runs(tmp_path, corpus_cache):
    return Runs(tmp_path, corpus_cache)
