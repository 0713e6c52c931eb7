import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.data.order.ledger import Audit, Ledger, check_same_order, difference
from arriero.data.order.loader import Loader
from arriero.data.order.order import Change, Stream
from arriero.data.order.packing import TokenSource
from arriero.data.order.shuffle import BLOCK
from arriero.errors import UserError

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MIXTURE = st.lists(st.sampled_from([0, 0.3, 1, 2.5]), min_size=3, max_size=3).filter(any)


def mixture(stores, weights, **more):
    return [TokenSource(store, None, w, **more) for store, w in zip(stores, weights, strict=True) if w]


def draws(stream, end):
    """Per source (by dataset), the (epoch, index) of each of its draws, in order."""
    located = stream.locate(np.arange(end))
    return {
        source.store.fingerprint: [
            (int(e), int(k)) for e, k in zip(located.epoch[mine], located.index[mine], strict=True)
        ]
        for i, source in enumerate(stream.sources)
        for mine in [located.source == i]
    }


@QUICK
@given(mixtures=st.lists(MIXTURE, min_size=2, max_size=4), data=st.data())
def test_a_later_phase_keeps_the_past_and_every_sources_place(three_stores, mixtures, data):
    lengths = data.draw(
        st.lists(st.integers(1, 2 * BLOCK), min_size=len(mixtures) - 1, max_size=len(mixtures) - 1)
    )
    edges = np.cumsum(lengths).tolist()
    sources = [mixture(three_stores, weights) for weights in mixtures]
    changes = [Change(g, part) for g, part in zip(edges, sources[1:], strict=True)]
    stream = Stream(sources[0], 16, 3, changes=changes)
    before = Stream(sources[0], 16, 3, changes=changes[:-1])
    past = np.arange(max(0, edges[-1] - 300), edges[-1])

    def named(one):
        located = one.locate(past)
        return [(one.sources[s].name, e, i) for s, e, i in zip(*located, strict=True)]

    assert named(stream) == named(before)
    assert stream.identity_until(edges[-1]) == before.identity
    assert stream.identity != before.identity

    end = edges[-1] + 500
    seen = draws(stream, end)
    assert stream.drawn(end).tolist() == [len(seen[s.store.fingerprint]) for s in stream.sources]
    for source, n in zip(stream.sources, stream.counts, strict=True):
        alone = Stream([TokenSource(source.store)], 16, 3)
        mine = seen[source.store.fingerprint]
        if mine:
            assert mine == draws(alone, len(mine))[source.store.fingerprint]
            assert sorted(k for e, k in mine if e == 0) == list(range(n))[: len(mine)] or len(mine) < n
    last = stream.locate(np.arange(edges[-1], edges[-1] + BLOCK))
    drawn = stream.drawn(edges[-1] + BLOCK) - stream.drawn(edges[-1])
    assert np.bincount(last.source, minlength=len(stream.sources)).tolist() == drawn.tolist()


@QUICK
@given(source=st.integers(0, 1), draw=st.integers(0, 3 * BLOCK), edge=st.integers(1, 2 * BLOCK))
def test_the_sample_of_a_draw_is_found(three_stores, source, draw, edge):
    changes = [Change(edge, mixture(three_stores, [1, 3, 0]))]
    stream = Stream(mixture(three_stores, [2, 1, 0]), 16, 3, changes=changes)
    found = stream.sample_of_draw(source, draw, 6 * BLOCK)
    drawn = stream.locate(np.arange(6 * BLOCK)).source
    places = np.flatnonzero(drawn == source)
    assert found == (int(places[draw]) if draw < len(places) else None)


def test_a_cap_on_repetition_stops_the_stream_at_its_sample(three_stores):
    stream = Stream(mixture(three_stores, [1, 1, 0], max_epochs=2.5), 16, 1)
    sample, source = stream.first_beyond_cap(10**6)
    limit = int(2.5 * stream.counts[source])
    assert stream.drawn(sample)[source] == limit
    stream.locate(np.arange(sample))
    with pytest.raises(UserError, match=r"has been read 2\.5 times, its max_epochs"):
        stream.locate(np.arange(sample, sample + 1))
    with Loader(stream, 1, start_sample=sample - 1) as loader:
        next(loader)
        with pytest.raises(UserError, match="max_epochs"):
            next(loader)


def test_phases_out_of_order_or_with_a_source_twice_are_rejected(three_stores):
    first = mixture(three_stores, [1, 0, 0])
    for changes in ([Change(0, first)], [Change(5, first), Change(5, first)]):
        with pytest.raises(UserError, match="out of order"):
            Stream(first, 16, 1, changes=changes)
    with pytest.raises(UserError, match=rf"same tokens, of {first[0].name};"):
        Stream(first, 16, 1, changes=[Change(5, [*first, *first])])
    part = TokenSource(three_stores[0], range(100))
    with pytest.raises(UserError, match="same tokens"):
        Stream(first, 16, 1, changes=[Change(5, [part])])


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_an_invalid_weight_is_rejected_by_name(three_stores, weight):
    with pytest.raises(UserError, match=rf"{three_stores[1].directory} has weight"):
        Stream([TokenSource(three_stores[0]), TokenSource(three_stores[1], None, weight)], 16, 1)


def test_a_state_is_accepted_by_the_same_past_alone(three_stores):
    first, second = mixture(three_stores, [1, 1, 0]), mixture(three_stores, [0, 1, 1])
    stream = Stream(first, 16, 1)
    with Loader(stream, 4) as loader:
        next(loader)
        state = loader.state()
    check_same_order(state, stream, "the checkpoint")
    check_same_order(state, Stream(first, 16, 1, changes=[Change(4, second)]), "the checkpoint")
    for other in (
        Stream(first, 16, 1, changes=[Change(3, second)]),
        Stream(second, 16, 1),
        Stream(first, 16, 2),
        Stream(first, 8, 1),
    ):
        with pytest.raises(UserError, match="the checkpoint was trained on other data"):
            check_same_order(state, other, "the checkpoint")


def test_what_changed_is_named(three_stores, make_store):
    stream = Stream(mixture(three_stores, [1, 1, 0]), 16, 1)
    names = [source.name for source in stream.sources]
    other = make_store([[range(500)]], vocab_size=3000)
    changed = Stream([TokenSource(three_stores[0]), TokenSource(other)], 16, 1)
    assert difference(stream.identity, names, stream, 100) is None
    words = difference(stream.identity, names, changed, 100)
    assert words.startswith(f"{names[1]} has changed since the run began")
    seeded = Stream(mixture(three_stores, [1, 1, 0]), 16, 2)
    assert "order of samples has changed since the run began (seed)" in difference(
        stream.identity, names, seeded, 100
    )


def predicted(stream, begin, end):
    """The labels of samples, by source: each token of the datasets is a different number."""
    labels = []
    for sample in range(begin, end):
        with Loader(stream, 1, sample, prefetch=1) as loader:
            labels += next(loader).labels_BT[0].tolist()
    return labels


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.sampled_from([4, 6, 8, 16, 24, 64]), min_size=1, max_size=3),
    edges=st.lists(st.integers(1, 50), min_size=3, max_size=3),
    version=st.sampled_from([1, 2]),
    weights=st.sampled_from([[1, 0, 0], [1, 2, 0]]),
)
def test_no_token_is_lost_or_repeated_where_the_sequence_length_changes(
    three_stores, lengths, edges, version, weights
):
    firsts = np.cumsum(edges)[: len(lengths)].tolist()
    changes = [Change(first, seq_len=length) for first, length in zip(firsts, lengths, strict=True)]
    sources = mixture(three_stores, weights)
    with pytest.MonkeyPatch.context() as patch:
        # small enough that the datasets have several groups
        patch.setattr("arriero.data.order.packing.CHUNK_TOKENS", 32)
        patch.setattr("arriero.data.order.packing.GROUP_CHUNKS", 3)
        stream = Stream(sources, 8, 3, changes=changes, version=version)
        end = firsts[-1] + 60
        located = stream.locate(np.arange(end))
        seen = predicted(stream, 0, end)
        widths = [stream.seq_len_at(sample) for sample in range(end)]
        stretch = read_by(stream, widths)
        audit = Audit(Ledger(1, stream.identity, [s.name for s in stream.sources], [stretch]), stream)
        audit.run(lambda *_: None)
    assert audit.problems == []
    begins = np.cumsum([0, *widths])
    for i, source in enumerate(stream.sources):
        first = int(source.store.read(0, 1)[0])
        every = set(range(first + 1, first + source.store.tokens))
        for epoch in range(3):
            here = np.flatnonzero((located.source == i) & (located.epoch == epoch))
            read = [t for sample in here for t in seen[begins[sample] : begins[sample + 1]]]
            assert len(read) == len(set(read)) and set(read) <= every
            ended = ((located.source == i) & (located.epoch > epoch)).any()
            assert not ended or len(every) - len(read) < max(8, *lengths)


def read_by(stream, widths):
    with Loader(stream, 1) as loader:
        assert [next(loader).tokens_BT.shape[1] for _ in widths] == widths
        return loader.read()


def test_an_audit_finds_a_token_that_comes_twice_after_a_change_of_length(three_stores):
    """A change that cut the whole source again would repeat tokens that the epoch has read."""
    stream = Stream(mixture(three_stores, [1, 0, 0]), 8, 3, changes=[Change(20, seq_len=16)])
    leg = stream.source_orders[0].legs[1]
    stream.source_orders[0].legs[1] = leg.__class__(leg.first, leg.seq_len, leg.epoch, leg.whole, leg.whole)
    stretch = read_by(stream, [8] * 20 + [16] * 30)
    audit = Audit(Ledger(1, stream.identity, [s.name for s in stream.sources], [stretch]), stream)
    audit.run(lambda *_: None)
    assert any("twice within epoch 1" in problem for problem in audit.problems)


def test_a_change_of_length_leaves_the_past_and_its_fingerprint(three_stores):
    sources = mixture(three_stores, [1, 1, 0])
    before, after = Stream(sources, 8, 3), Stream(sources, 8, 3, changes=[Change(30, seq_len=24)])
    assert after.identity_until(30) == before.identity
    assert after.identity_until(31) != before.identity
    names = [source.name for source in sources]
    assert difference(before.identity, names, after, 30) is None
    assert "lengths" in difference(before.identity, names, after, 31)
