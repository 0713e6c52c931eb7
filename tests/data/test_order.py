from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.data.order.order import EvalStream, Stream
from arriero.data.order.packing import TokenSource
from arriero.data.order.shuffle import BLOCK, Shares, Shuffle, block_keys, key_of, permute, split_heldout
from arriero.errors import UserError


def starts(stream, located):
    """The dataset position of each window's first token."""
    pairs = zip(located.source.tolist(), located.index.tolist(), strict=True)
    return np.array([stream.cuts[source].start(index) for source, index in pairs])


SECOND_STARTS = [416, 920, 112, 680, 384, 144, 648, 208, 336, 576, 480, 728]
SECOND_FINGERPRINT = "7b6142f0712640b35fa412c110ad9c6b1d5db1da742c63d2cdd25eed671817c0"
SHUFFLED = [47, 16, 76, 17, 45, 34, 35, 46, 56, 53]
KEYS = st.integers(0, 2**64 - 1)


@settings(deadline=None)
@given(n=st.integers(1, 3000), key=KEYS)
def test_a_permutation_visits_every_index_once(n, key):
    image = permute(np.arange(n), n, np.array([key], dtype=np.uint64))
    assert sorted(image.tolist()) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(1, 2**50), key=KEYS, data=st.data())
def test_a_huge_permutation_stays_inside_and_does_not_collide(n, key, data):
    index = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=50))
    image = permute(np.array(index, dtype=np.int64), n, np.array([key], dtype=np.uint64))
    assert len(set(image.tolist())) == len(index)
    assert all(0 <= i < n for i in image.tolist())


def test_a_permutation_has_no_visible_pattern():
    n = 100_000
    image = permute(np.arange(n), n, block_keys(key_of(1), np.array([0])))
    other = permute(np.arange(n), n, block_keys(key_of(1), np.array([1])))
    assert abs(np.corrcoef(image[1:], image[:-1])[0, 1]) < 0.01
    assert abs(np.corrcoef(image, np.arange(n))[0, 1]) < 0.01
    assert abs(np.corrcoef(image, other)[0, 1]) < 0.01
    assert abs(np.mean(image[1:] % 2 == image[:-1] % 2) - 0.5) < 0.01


def test_the_order_is_the_one_that_earlier_runs_used(counting_store):
    """A change here breaks the resumption of every run begun before: it needs a new ORDER_VERSION."""
    image = permute(np.arange(10), 10, block_keys(12345, np.array([3])))
    assert image.tolist() == [1, 4, 2, 0, 5, 3, 6, 9, 7, 8]
    sources = [
        TokenSource(counting_store, range(600), 0.7),
        TokenSource(counting_store, range(600, 1050), 0.3),
    ]
    first = Stream(sources, 16, seed=1, version=1)
    located = first.locate(np.arange(20_000, 20_012))
    assert located.source.tolist() == [0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1]
    assert located.epoch.tolist() == [378, 214, 378, 214, 378, 378, 214, 378, 378, 378, 378, 214]
    assert starts(first, located).tolist() == [288, 680, 416, 648, 112, 384, 728, 144, 208, 336, 576, 712]
    assert first.fingerprint == "9ba7e13886931b7ea40b31b9603636dc10a0e8c4b572c94896a87fbb531642b5"
    second = Stream(sources, 16, seed=1, version=2)
    located = second.locate(np.arange(20_000, 20_012))
    assert starts(second, located).tolist() == SECOND_STARTS
    assert second.fingerprint == SECOND_FINGERPRINT
    shuffle = Shuffle(100, 3, 4)
    assert shuffle.at(np.arange(40, 50), block_keys(7, np.array([1]))).tolist() == SHUFFLED


def test_a_run_of_an_unknown_order_version_is_rejected(counting_store):
    with pytest.raises(UserError, match="ordered by version 3"):
        Stream([TokenSource(counting_store)], 16, 1, version=3)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 2000), chunk=st.integers(1, 40), group=st.integers(1, 40), data=st.data())
def test_a_shuffle_visits_every_index_once_and_knows_the_rest(n, chunk, group, data):
    key = block_keys(data.draw(st.integers(0, 99)), np.array([0]))
    shuffle = Shuffle(n, chunk, group)
    order = shuffle.at(np.arange(n), key)
    assert sorted(order.tolist()) == list(range(n))
    place = data.draw(st.integers(0, n))
    rest = [i for first, end in shuffle.rest(place, key).tolist() for i in range(first, end)]
    assert rest == sorted(order[place:].tolist())


@settings(max_examples=25, deadline=None)
@given(seq_len=st.integers(1, 1049), seed=st.integers(0, 2**63), begin=st.integers(0, 3))
def test_an_epoch_predicts_every_token_of_the_source_once(counting_store, seq_len, seed, begin):
    span = range(begin, 1050) if 1050 - begin > seq_len else range(1050)
    stream = Stream([TokenSource(counting_store, span)], seq_len, seed)
    n = stream.samples_per_epoch
    located = stream.locate(np.arange(3 * n))
    assert located.epoch.tolist() == [epoch for epoch in range(3) for _ in range(n)]
    for epoch in range(3):
        begins = starts(stream, located)[epoch * n : (epoch + 1) * n]
        predicted = Counter(t for s in begins for t in counting_store.read(s + 1, seq_len).tolist())
        expected = range(span.start + 1, span.stop - stream.cuts[0].unused)
        assert predicted == Counter(expected)
    assert stream.cuts[0].unused < seq_len


def test_epochs_seeds_and_sources_are_shuffled_apart(counting_store):
    stream = Stream([TokenSource(counting_store)], 5, seed=1)
    n = stream.samples_per_epoch
    first, second = stream.locate(np.arange(n)).index, stream.locate(np.arange(n, 2 * n)).index
    assert not np.array_equal(first, second)
    assert not np.array_equal(
        first, Stream([TokenSource(counting_store)], 5, seed=2).locate(np.arange(n)).index
    )
    assert not np.array_equal(first, np.sort(first))


@settings(max_examples=25, deadline=None)
@given(weights=st.lists(st.floats(1e-9, 100), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_a_mixture_is_exact_at_the_end_of_every_block(counting_store, weights, seed):
    sources = [TokenSource(counting_store, range(100 * i, 100 * i + 100), w) for i, w in enumerate(weights)]
    stream = Stream(sources, 9, seed)
    for blocks in (1, 2, 1000, 10**9):
        exact = blocks * BLOCK * np.array(weights) / sum(weights)
        drawn = stream.drawn(blocks * BLOCK)
        assert drawn.sum() == blocks * BLOCK
        assert np.abs(drawn - exact).max() < 1.5 + 1e-15 * blocks * BLOCK
    located = stream.locate(np.arange(2 * BLOCK))
    for end in (1, BLOCK - 1, BLOCK, BLOCK + 5, 2 * BLOCK):
        seen = np.bincount(located.source[:end], minlength=len(weights))
        assert seen.tolist() == stream.drawn(end).tolist()
    for i in range(len(weights)):
        visits = located.index[located.source == i]
        n = stream.counts[i]
        for e in range(len(visits) // n):
            assert len(set(visits[e * n : (e + 1) * n].tolist())) == n
        assert np.all(np.diff(located.epoch[located.source == i]) >= 0)


@pytest.mark.parametrize(
    "weights",
    [
        [0.9999, 0.0001],
        [1 / i for i in range(1, 151)],
        [1.0] * 150,
        [1.0, 1e-9],
        [1e-6, 1e6, 1e-6],
        [2.0**-i for i in range(60)],
    ],
)
def test_a_source_of_any_weight_gets_its_share(weights):
    shares = Shares(weights, [Fraction(1)] * len(weights), [str(i) for i in range(len(weights))])
    exact = [Fraction(repr(w)) / sum(Fraction(repr(w)) for w in weights) for w in weights]
    before = np.zeros(len(weights))
    for blocks in range(1, 300):
        drawn = shares.after(blocks)
        assert (drawn >= before).all() and drawn.sum() == blocks * BLOCK
        assert max(abs(int(d) - blocks * BLOCK * s) for d, s in zip(drawn, exact, strict=True)) < 1.5
        before = drawn


def test_shares_and_proportions_are_one_mixture(counting_store):
    def stream(a, b):
        return Stream(
            [TokenSource(counting_store, range(500), a), TokenSource(counting_store, range(500, 900), b)],
            9,
            1,
        )

    assert stream(0.9, 0.1).fingerprint == stream(9, 1).fingerprint == stream(45, 5).fingerprint


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.floats(0.1, 5), min_size=1, max_size=3),
    start=st.integers(0, 3 * BLOCK),
    ranks=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), min_size=1, max_size=4),
)
def test_the_list_of_samples_does_not_depend_on_ranks_or_restarts(counting_store, weights, start, ranks):
    sources = [TokenSource(counting_store, range(100 * i, 100 * i + 100), w) for i, w in enumerate(weights)]
    whole = Stream(sources, 7, 5).locate(np.arange(start, start + 24 * len(ranks)))
    seen = []
    for step, world in enumerate(ranks):
        restarted = Stream(sources, 7, 5)
        share = 24 // world
        for rank in reversed(range(world)):
            g = start + 24 * step + rank * share + np.arange(share)
            located = restarted.locate(g)
            seen += zip(g, *(part.tolist() for part in located), strict=True)
    expected = zip(range(start, start + 24 * len(ranks)), *(part.tolist() for part in whole), strict=True)
    assert sorted(seen) == list(expected)


def test_changing_the_mixture_keeps_each_sources_own_order(counting_store):
    a, b = TokenSource(counting_store, range(500), 1), TokenSource(counting_store, range(500, 1000), 1)
    alone = Stream([a], 4, 1).locate(np.arange(100)).index
    mixed = Stream([b, a], 4, 1).locate(np.arange(BLOCK))
    assert mixed.index[mixed.source == 1][:100].tolist() == alone.tolist()


def test_the_fingerprint_names_everything_that_moves_a_sample(counting_store, make_store):
    def fingerprint(store=counting_store, span=None, weight=1.0, seq_len=8, seed=1):
        other = TokenSource(make_store([[range(50)]], vocab_size=2000), None, 1.0)
        return Stream([TokenSource(store, span, weight), other], seq_len, seed).fingerprint

    changes = [{}, {"span": range(900)}, {"weight": 2.0}, {"seq_len": 9}, {"seed": 2}]
    changes.append({"store": make_store([[range(60)]], vocab_size=2000)})
    assert len({fingerprint(**change) for change in changes}) == len(changes)
    assert fingerprint() == fingerprint()


def test_evaluation_visits_every_window_once_in_plain_order(counting_store):
    sources = [TokenSource(counting_store, range(10, 31)), TokenSource(counting_store, range(100, 111))]
    stream = EvalStream(sources, 5)
    located = stream.locate(np.arange(stream.samples))
    assert starts(stream, located).tolist() == [10, 15, 20, 25, 100, 105]
    assert located.source.tolist() == [0, 0, 0, 0, 1, 1]


@settings(max_examples=50, deadline=None)
@given(tokens=st.integers(0, 510))
def test_heldout_is_the_tail_and_shares_no_document(counting_store, tokens):
    train, heldout = split_heldout(counting_store, tokens)
    assert (train.start, train.stop, heldout.stop) == (0, heldout.start, counting_store.tokens)
    assert heldout.start % 7 == 0
    assert tokens <= len(heldout) < tokens + 7


@pytest.mark.parametrize("tokens", [560, 1049, 1050, 10**9])
def test_too_large_a_heldout_part_is_rejected(counting_store, tokens):
    with pytest.raises(UserError, match="for training"):
        split_heldout(counting_store, tokens)


def test_one_gigantic_document_cannot_be_split(make_store):
    with pytest.raises(UserError, match="leaves 0 of 500"):
        split_heldout(make_store([[range(500)]]), 10)


def test_unusable_sources_are_rejected(counting_store, make_store):
    with pytest.raises(UserError, match="no data source"):
        Stream([], 8, 1)
    with pytest.raises(UserError, match="needs 1051"):
        Stream([TokenSource(counting_store)], 1050, 1)
    with pytest.raises(UserError, match="weight 0"):
        Stream([TokenSource(counting_store, None, 0)], 8, 1)
    rare = [TokenSource(counting_store, range(500)), TokenSource(counting_store, range(500, 900), 1e-9)]
    with pytest.raises(UserError, match="less than 1 sample"):
        Stream(rare, 8, 1, version=1)
    with pytest.raises(UserError, match="same tokens"):
        Stream([TokenSource(counting_store, range(500)), TokenSource(counting_store, range(499, 900))], 8, 1)
    foreign = make_store([[range(50)]], tokenizer="[]")
    with pytest.raises(UserError, match="different tokenizers"):
        Stream([TokenSource(counting_store), TokenSource(foreign)], 8, 1)
    with pytest.raises(IndexError):
        Stream([TokenSource(counting_store)], 8, 1).locate(np.array([-1]))
