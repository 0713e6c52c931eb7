import math
from collections import Counter, defaultdict

import pytest

from arriero.data.text.builtin import MarkovText, markov_text


@pytest.fixture(scope="module")
def documents():
    return [markov_text().document(number).split(" ") for number in range(3000)]


def test_documents_are_the_same_in_any_order_and_process():
    assert [MarkovText().document(n) for n in (5, 2)] == [
        list(markov_text().documents(2, 6))[i] for i in (3, 0)
    ]


def test_the_stated_length_is_that_of_the_text(documents):
    mean = sum(len(" ".join(words)) for words in documents) / len(documents)
    assert mean == pytest.approx(markov_text().document_bytes, rel=0.05)


def test_a_model_that_knows_the_chain_reaches_the_stated_entropy_and_none_does_better(documents):
    """Counts of word pairs of one half code the other half at the entropy, words alone do not."""
    half = len(documents) // 2
    pairs, singles = defaultdict(Counter), Counter()
    for words in documents[:half]:
        for before, word in zip(["", *words], [*words, "end"], strict=True):
            pairs[before][word] += 1
            singles[word] += 1
    pair_nats = single_nats = 0.0
    for words in documents[half:]:
        for before, word in zip(["", *words], [*words, "end"], strict=True):
            seen = pairs[before]
            pair_nats -= math.log((seen[word] + 0.01) / (seen.total() + 0.01 * 65))
            single_nats -= math.log(singles[word] / singles.total())
    floor = markov_text().document_nats
    assert pair_nats / half == pytest.approx(floor, rel=0.05)
    assert single_nats / half > 2 * floor
