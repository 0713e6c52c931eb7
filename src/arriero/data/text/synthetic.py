"""Text drawn from a known Markov chain of words, so that the best reachable loss is known."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

WORDS = 64
SUCCESSORS = 4
MEAN_WORDS = 200
CHAIN_SEED = 1
DEFAULT_BYTES = 4_000_000


class MarkovText:
    """Each word allows four successors; after each word the document ends with probability 1 / MEAN_WORDS."""

    def __init__(self) -> None:
        rng = np.random.default_rng(CHAIN_SEED)
        self.words = _distinct_words(rng)
        self.successors = np.stack([rng.permutation(WORDS)[:SUCCESSORS] for _ in range(WORDS)])
        self.chances = rng.dirichlet(np.ones(SUCCESSORS), size=WORDS)
        self.first = rng.dirichlet(np.ones(WORDS))
        self._bounds = self.chances.cumsum(axis=1)
        self._first_bounds = self.first.cumsum()

    def document(self, number: int) -> str:
        """Document `number`: the same on every machine and in any order."""
        rng = np.random.default_rng([CHAIN_SEED, number])
        draws = rng.random(int(rng.geometric(1 / MEAN_WORDS)))
        word = int(np.searchsorted(self._first_bounds, draws[0] * self._first_bounds[-1], side="right"))
        chosen = [self.words[word]]
        for draw in draws[1:]:
            bounds = self._bounds[word]
            word = int(self.successors[word, np.searchsorted(bounds, draw * bounds[-1], side="right")])
            chosen.append(self.words[word])
        return " ".join(chosen)

    def documents(self, begin: int, end: int) -> Iterator[str]:
        return (self.document(number) for number in range(begin, end))

    @property
    def document_bytes(self) -> float:
        """The mean length of a document."""
        visits = self._expected_visits()
        lengths = np.array([len(word) + 1 for word in self.words])
        return float(visits @ lengths) - 1

    @property
    def document_nats(self) -> float:
        """The mean information in a document and its end: no model can code it in less.

        Divided by the mean tokens of a document, its end token included, it is the lowest reachable loss.
        """
        visits = self._expected_visits()
        steps = _entropy(self.chances)
        end = 1 / MEAN_WORDS
        ending = float(_entropy(np.array([end, 1 - end])))
        return float(_entropy(self.first) + visits.sum() * ending + (1 - end) * (visits @ steps))

    def _expected_visits(self) -> np.ndarray:
        """How often each word occurs in a document, on average."""
        transition = np.zeros((WORDS, WORDS))
        np.put_along_axis(transition, self.successors, self.chances, axis=1)
        return np.linalg.solve(np.eye(WORDS) - (1 - 1 / MEAN_WORDS) * transition.T, self.first)


@lru_cache(maxsize=1)
def markov_text() -> MarkovText:
    return MarkovText()


def _distinct_words(rng: np.random.Generator) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words: dict[str, None] = {}
    while len(words) < WORDS:
        words["".join(letters[i] for i in rng.integers(len(letters), size=rng.integers(3, 8)))] = None
    return list(words)


def _entropy(chances: np.ndarray) -> np.ndarray:
    return -(chances * np.log(chances)).sum(axis=-1)
