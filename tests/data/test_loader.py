import threading

import numpy as np
import pytest
import torch

from arriero.data.order.loader import IGNORED, Loader
from arriero.data.order.order import EvalStream, Stream
from arriero.data.order.packing import Packing, TokenSource
from arriero.errors import UserError
from benchmarks.data.reading import measure_opening, measure_reading, write_random_documents


@pytest.fixture
def stream(counting_store):
    return Stream(
        [TokenSource(counting_store, range(600), 2), TokenSource(counting_store, range(600, 1050), 1)],
        16,
        seed=3,
    )


def take(loader, n):
    with loader:
        return [next(loader) for _ in range(n)]


def test_labels_are_the_tokens_one_further(stream):
    for batch in take(Loader(stream, 6), 20):
        assert batch.tokens_BT.shape == (6, 16)
        assert batch.tokens_BT.dtype == batch.labels_BT.dtype == torch.int64
        assert torch.equal(batch.labels_BT, batch.tokens_BT + 1)


def test_batches_hold_the_samples_the_stream_names(stream):
    batches = take(Loader(stream, 4, start_sample=8190), 3)
    located = stream.locate(np.arange(8190, 8190 + 12))
    pairs = zip(located.source, located.index, strict=True)
    starts = np.array([stream.cuts[source].start(index) for source, index in pairs])
    assert torch.cat([b.tokens_BT[:, 0] for b in batches]).tolist() == starts.tolist()
    assert [b.first_sample for b in batches] == [8190, 8194, 8198]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 12])
def test_ranks_together_see_the_global_batch(stream, ranks):
    whole = take(Loader(stream, 12), 2)
    parts = [take(Loader(stream, 12, rank=rank, ranks=ranks), 2) for rank in range(ranks)]
    for step in range(2):
        assert torch.equal(torch.cat([part[step].tokens_BT for part in parts]), whole[step].tokens_BT)


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_a_batch_that_ranks_do_not_divide_is_read_once_and_in_equal_shapes(stream, ranks):
    whole = take(Loader(stream, 10), 2)
    loaders = [Loader(stream, 10, rank=rank, ranks=ranks) for rank in range(ranks)]
    parts = [take(loader, 2) for loader in loaders]
    for step in range(2):
        labels = [part[step].labels_BT for part in parts]
        assert {tuple(each.shape) for each in labels} == {(-(-10 // ranks), 16)}
        real = [(each != IGNORED).any(dim=1) for each in labels]
        assert {int(rows.sum()) for rows in real} <= {10 // ranks, -(-10 // ranks)}
        kept = torch.cat([each[rows] for each, rows in zip(labels, real, strict=True)])
        assert torch.equal(kept, whole[step].labels_BT)
    assert sum(loader.read().slots for loader in loaders) == 2 * 10 * 16


def test_batches_may_grow_on_the_way(stream):
    loader = Loader(stream, lambda sample: 4 if sample < 8 else 6)
    batches = take(loader, 4)
    assert [(b.first_sample, len(b.tokens_BT)) for b in batches] == [(0, 4), (4, 4), (8, 6), (14, 6)]
    assert loader.state()["sample"] == 20


def test_resuming_from_the_state_continues_without_gap_or_repeat(stream):
    whole = torch.cat([b.tokens_BT for b in take(Loader(stream, 6), 8)])
    first = Loader(stream, 6, prefetch=4)
    before = take(first, 3)
    state = first.state()
    assert state == {"sample": 18, "fingerprint": stream.fingerprint}
    after = take(Loader(stream, 6, start_sample=state["sample"]), 5)
    assert torch.equal(torch.cat([b.tokens_BT for b in before + after]), whole)


def test_every_rank_holds_the_same_state(stream):
    loaders = [Loader(stream, 6, start_sample=12, rank=rank, ranks=3) for rank in range(3)]
    assert [take(loader, 2)[-1].first_sample for loader in loaders] == [18, 18, 18]
    assert [loader.state()["sample"] for loader in loaders] == [24, 24, 24]


def test_batches_keep_their_content_while_later_ones_are_read(stream):
    kept = take(Loader(stream, 6, prefetch=1), 12)
    again = take(Loader(stream, 6, prefetch=3), 12)
    assert all(torch.equal(a.tokens_BT, b.tokens_BT) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_evaluation_ends_with_ignored_labels_on_every_rank(counting_store, ranks):
    stream = EvalStream([TokenSource(counting_store, range(51))], 5)
    parts = []
    for rank in range(ranks):
        with Loader(stream, 8, rank=rank, ranks=ranks) as loader:
            parts.append(list(loader))
    assert {len(part) for part in parts} == {2}
    labels = torch.cat([torch.cat([part[step].labels_BT for part in parts]) for step in range(2)]).flatten()
    assert labels.tolist() == [*range(1, 51), *[IGNORED] * 30]


def test_positions_and_documents_restart_where_a_document_begins(counting_store):
    stream = EvalStream([TokenSource(counting_store, range(3, 54))], 10)
    with Loader(stream, 2, documents=True) as loader:
        batches = list(loader)
    positions = torch.cat([b.positions_BT for b in batches])
    documents = torch.cat([b.documents_BT for b in batches])
    for w in range(5):
        tokens = range(3 + 10 * w, 13 + 10 * w)
        assert documents[w].tolist() == [t // 7 - tokens[0] // 7 for t in tokens]
        assert positions[w].tolist() == [min(t % 7, t - tokens[0]) for t in tokens]


def test_sources_of_different_token_width_mix(make_store):
    narrow, wide = make_store([[range(400)]]), make_store([[range(500, 900)]], vocab_size=70_000)
    stream = Stream([TokenSource(narrow), TokenSource(wide)], 8, 1)
    tokens = torch.cat([b.tokens_BT for b in take(Loader(stream, 8), 20)])
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(8))
    assert {bool(first >= 500) for first in tokens[:, 0]} == {True, False}


def test_an_error_in_the_thread_reaches_the_consumer(make_store):
    store = make_store([[range(100)], [range(100)]])
    (store.directory / "00001.bin").unlink()
    loader = Loader(EvalStream([TokenSource(store)], 10), 1)
    with pytest.raises(UserError, match=r"00001\.bin is missing"):
        list(loader)
    assert loader.state()["sample"] == 9
    assert list(loader) == []


def test_close_stops_a_thread_that_waits_to_hand_over(stream):
    before = threading.active_count()
    loaders = [Loader(stream, 6, prefetch=1) for _ in range(20)]
    for loader in loaders:
        next(loader)
        loader.close()
    assert threading.active_count() == before
    assert list(loaders[0]) == []


def test_the_cost_of_reading_is_measured_for_every_packing(tmp_path):
    store = write_random_documents(tmp_path / "set", 20_000, mean_length=100)
    for kind in ("concat", "bestfit", "none"):
        packing = Packing(kind, cache=tmp_path / "cache")
        reading = measure_reading(store, 256, batch_sequences=4, tokens=10_000, packing=packing)
        assert reading.tokens >= 10_000
        assert reading.state_bytes < 1000
        assert reading.tokens_per_cpu_second > 0
    opening = measure_opening(store.directory)
    assert 0 < opening.resident_bytes <= opening.peak_bytes


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_several_threads_read_the_same_batches(three_stores, tmp_path, packing):
    stream = Stream([TokenSource(s) for s in three_stores], 16, 3, Packing(packing, cache=tmp_path))
    for rows in (2, 7):
        one = take(Loader(stream, rows, documents=True), 4)
        many = take(Loader(stream, rows, documents=True, threads=3), 4)
        for a, b in zip(one, many, strict=True):
            assert torch.equal(a.tokens_BT, b.tokens_BT) and torch.equal(a.labels_BT, b.labels_BT)
            assert torch.equal(a.documents_BT, b.documents_BT) and torch.equal(a.positions_BT, b.positions_BT)
            assert (a.real_tokens, a.checksum) == (b.real_tokens, b.checksum)
