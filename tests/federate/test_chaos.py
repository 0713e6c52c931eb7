"""A short version of `make chaos`: every kind of fault while local sites train."""

import pytest

from benchmarks.federation_chaos import FAULTS, Chaos


@pytest.mark.slow
def test_through_every_fault_each_token_is_counted_once(tmp_path, corpus_cache):
    chaos = Chaos(tmp_path / "fed", corpus_cache, sites=4, seconds=20, interval=2, steps=8, step_s=0.25)
    chaos.run()
    found = chaos.check()
    assert found["counted once"] and found["replayed"], found
    assert found["rounds"] >= 1 and found["tokens"] > 0 and found["loss"] > 0, found
    assert set(found["injected"]) == set(FAULTS)
