"""Built-in text: the Python standard library, and words from a Markov chain whose entropy is known."""

import os
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arriero.errors import UserError

WORDS = 64
SUCCESSORS = 4
MEAN_WORDS = 200
CHAIN_SEED = 1
DEFAULT_BYTES = 4_000_000
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


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
        """Return document `number`, which is the same on every machine."""
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
        """Return the mean length of a document in bytes."""
        visits = self._expected_visits()
        lengths = np.array([len(word) + 1 for word in self.words])
        return float(visits @ lengths) - 1

    @property
    def document_nats(self) -> float:
        """Return the mean entropy of a document and its end in nats.

        Divided by the mean tokens of a document, end token included, it is the lowest reachable loss.
        """
        visits = self._expected_visits()
        steps = _entropy(self.chances)
        end = 1 / MEAN_WORDS
        ending = float(_entropy(np.array([end, 1 - end])))
        return float(_entropy(self.first) + visits.sum() * ending + (1 - end) * (visits @ steps))

    def _expected_visits(self) -> np.ndarray:
        """Return how often each word occurs in a document, on average."""
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


class StdlibFile(NamedTuple):
    name: str
    text: str


def stdlib_documents(folder: Path | None = None) -> list[StdlibFile]:
    """Read the source files of the Python standard library without its tests, in the order of their paths."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(_python_files(folder), key=lambda path: path.relative_to(folder).as_posix()):
        try:
            text = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text:
            documents.append(StdlibFile(path.relative_to(folder).as_posix(), text))
    if not documents:
        raise UserError(
            f"the Python standard library at {folder} has no source files",
            "use a Python that carries its sources, or name a prepared dataset",
        )
    return documents


def _python_files(folder: Path) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [Path(parent, name) for name in files if name.endswith(".py")]
    return found
