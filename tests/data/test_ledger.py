import json
from dataclasses import replace

import numpy as np
import pytest

from arriero.data.order.ledger import (
    LEDGER,
    Audit,
    Ledger,
    begin_ledger,
    check_data_unchanged,
    ledger_bytes,
    read_ledger,
)
from arriero.data.order.loader import Loader
from arriero.data.order.order import Change, Stream
from arriero.data.order.packing import Packing, TokenSource
from arriero.errors import UserError


@pytest.fixture(params=["concat", "bestfit", "none"])
def stream(request, three_stores, tmp_path):
    one, two, three = (TokenSource(store, None, w) for store, w in zip(three_stores, (3, 1, 2), strict=True))
    packing = Packing(request.param, cache=tmp_path / "cache")
    return Stream([one, two], 16, 7, packing, [Change(96, [two, three])])


def trained(stream, begin, steps, sequences=8, ranks=1):
    """What the ranks of one process group have read, together."""
    stretches = []
    for rank in range(ranks):
        with Loader(stream, sequences, begin, rank=rank, ranks=ranks) as loader:
            for _ in range(steps):
                next(loader)
            stretches.append(loader.read())
    total = sum(stretch.checksum for stretch in stretches) % 2**64
    slots = sum(stretch.slots for stretch in stretches)
    return replace(stretches[0], checksum=total, slots=slots)


def problems(ledger, stream):
    audit = Audit(ledger, stream)
    audit.run(lambda *_: None)
    return audit.problems


def ledger_of(stream, *stretches):
    names = [source.name for source in stream.sources]
    return Ledger(8, stream.identity, names, list(stretches))


def test_a_run_that_was_rescaled_and_restarted_is_proved(stream, tmp_path):
    stretches = [
        trained(stream, 0, 5, 24, 8),
        trained(stream, 120, 4, 24, 6),
        trained(stream, 168, 3, 24, 3),
        trained(stream, 240, 2, 24, 24),
    ]
    ledger = begin_ledger(tmp_path, stream, 24)
    for stretch in stretches:
        (tmp_path / LEDGER).write_bytes(ledger_bytes(stream, ledger.with_stretch(stretch)))
        ledger = begin_ledger(tmp_path, stream, 24)
    audit = Audit(read_ledger(tmp_path), stream)
    audit.run(lambda *_: None)
    assert audit.problems == []
    assert audit.discarded == 120 + 96 - 168
    assert audit.ledger.samples == 240 + 48
    content = json.loads((tmp_path / LEDGER).read_text())
    assert sum(source["samples"] for source in content["sources"]) == 288


def test_a_gap_is_found(stream):
    ledger = ledger_of(stream, trained(stream, 0, 3), trained(stream, 32, 3))
    assert problems(ledger, stream) == ["samples 24 to 32 were skipped"]


def test_samples_that_are_not_the_orders_are_found(stream):
    other = Stream(stream.sources[:2], 16, 8, stream.packing)
    ledger = ledger_of(stream, trained(stream, 0, 3), trained(other, 24, 3))
    (problem,) = problems(ledger, stream)
    assert problem.startswith("samples 24 to 48 were not the ones the order prescribes")


@pytest.mark.parametrize("chunk", [1, 5, 2**16])
def test_a_sample_seen_twice_is_found(stream, monkeypatch, chunk):
    """An order with a fault in it does not pass, even when training read exactly that order."""
    original = Stream.locate

    def faulty(self, samples):
        located = original(self, samples)
        first = original(self, np.array([0]))
        same = (located.source == first.source) & (located.epoch == 0)
        return located._replace(index=np.where(same, located.index // 2, located.index))

    monkeypatch.setattr(Stream, "locate", faulty)
    monkeypatch.setattr("arriero.data.order.ledger.CHUNK", chunk)
    ledger = ledger_of(stream, trained(stream, 0, 12))
    assert any("came twice within epoch 1" in problem for problem in problems(ledger, stream))


def test_a_sample_left_out_of_an_epoch_is_found(stream, monkeypatch):
    original = Stream.locate

    def skipping(self, samples):
        located = original(self, samples)
        return located._replace(epoch=located.epoch + (samples >= 20))

    monkeypatch.setattr(Stream, "locate", skipping)
    found = problems(ledger_of(stream, trained(stream, 0, 3)), stream)
    assert any("epoch 2 began when" in problem for problem in found)


def test_a_dataset_that_changed_is_named_and_the_run_rejected(stream, make_store, tmp_path):
    (tmp_path / LEDGER).write_bytes(ledger_bytes(stream, ledger_of(stream, trained(stream, 0, 14))))
    check_data_unchanged(tmp_path, stream)
    other = TokenSource(make_store([[range(500)]], vocab_size=3000))
    changed = Stream([stream.sources[0], other], 16, 7, stream.packing)
    with pytest.raises(UserError, match=f"{stream.sources[1].name} has changed since the run began"):
        check_data_unchanged(tmp_path, changed)
    assert "has changed since the run began" in problems(read_ledger(tmp_path), changed)[0]


def test_a_ledger_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"ledger\.json does not exist"):
        read_ledger(tmp_path)
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(UserError, match=r"run\.toml/ledger\.json does not exist"):
        read_ledger(tmp_path / "run.toml")
    (tmp_path / LEDGER).write_text("{}")
    with pytest.raises(UserError, match=r"ledger\.json is damaged"):
        read_ledger(tmp_path)
