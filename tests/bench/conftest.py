import pytest

from arriero.data.prepare.builtin import prepare_builtin


@pytest.fixture(scope="session")
def synthetic_cache(tmp_path_factory):
    """The corpus of all cases, prepared once."""
    cache = tmp_path_factory.mktemp("synthetic")
    prepare_builtin("builtin:synthetic", cache)
    return cache
