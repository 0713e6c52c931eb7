"""A federation of tiny runs on this machine."""

import pytest

from benchmarks.federation_chaos import run_file

TINY = {"batch": 256, "schedule": "cosine", "warmup": 2, "lr": 1e-3, "every": 2}


@pytest.fixture
def federate(tmp_path, corpus_cache):
    """Write a federation file with sites that differ in their data order."""

    def write(sites="ab", rounds=2, federation="", outer="", **site_keys):
        lines = [f"[federation]\nname = 'fed'\nrounds = {rounds}\ntokens = '4 steps'\n{federation}"]
        lines += [f"[outer]\n{outer}"]
        for number, name in enumerate(sites):
            (tmp_path / f"{name}.toml").write_text(run_file(number + 1, corpus_cache, **TINY))
            lines += [f"[[sites]]\nname = '{name}'\nrun_file = '{name}.toml'"]
            lines += [f"{key} = {value}" for key, value in site_keys.items()]
        path = tmp_path / "fed.toml"
        path.write_text("\n".join(lines))
        return path

    return write
