"""How many samples of each source a block of the mixture holds."""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, isfinite, lcm

import numpy as np

from arriero.errors import UserError

BLOCK = 8192


class Shares:
    """Shares of sources in a mixture, exact at the end of every block to about one sample, for any weight.

    Samples are divided along a binary tree. A node that gets n samples gives its left child
    round(n * share) of them and its right child the rest. Both counts grow with n, so the quotas of a block,
    the differences between its end and its beginning, are never negative and always fill the block. The tree
    is Huffman's: large sources lie near the root, where rounding errors do not add up.

    `weights` are shares of tokens, 0 for a source that does not take part; `tokens` is the mean number of
    tokens of each source's samples.
    """

    def __init__(self, weights: Sequence[float], tokens: Sequence[Fraction], names: Sequence[str]) -> None:
        _check_weights(weights, names)
        exact = [Fraction(repr(float(w))) for w in weights]
        self.recorded = _smallest_integers(exact)
        by_samples = _smallest_integers([w / t for w, t in zip(exact, tokens, strict=True)])
        self._sources = len(weights)
        self._root = _tree(by_samples)
        total = sum(by_samples)
        self.per_sample = np.array([float(Fraction(w, total)) for w in by_samples])
        self.after = lru_cache(maxsize=16)(self._after)

    @property
    def only(self) -> int | None:
        """The source, where there is only one."""
        return None if len(self._root) == 3 else self._root[1]

    def _after(self, blocks: int) -> np.ndarray:
        """Samples of each source in the first `blocks` blocks."""
        drawn = np.zeros(self._sources, dtype=np.int64)
        waiting = [(self._root, blocks * BLOCK)]
        while waiting:
            node, samples = waiting.pop()
            if len(node) == 2:
                drawn[node[1]] = samples
                continue
            weight, left, right = node
            to_left = (2 * samples * left[0] + weight) // (2 * weight)
            waiting += [(left, to_left), (right, samples - to_left)]
        return drawn


class FixedQuotas:
    """Version 1 of the order: the same quotas in every block, rounded to 1/8192 by largest remainder."""

    def __init__(self, weights: Sequence[float], tokens: Sequence[Fraction], names: Sequence[str]) -> None:
        _check_weights(weights, names)
        taking_part = [i for i, weight in enumerate(weights) if weight]
        exact = [Fraction(weights[i]) / tokens[i] for i in taking_part]
        shares = [BLOCK * weight / sum(exact) for weight in exact]
        result = [int(share) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda i: result[i] - shares[i])
        for i in by_remainder[: BLOCK - sum(result)]:
            result[i] += 1
        for i, quota in zip(taking_part, result, strict=True):
            if quota == 0:
                raise UserError(
                    f"{names[i]} has weight {weights[i]}, less than 1 sample in {BLOCK}, and this run began "
                    "with an order that cannot mix less",
                    "raise its weight, or choose another run.name",
                )
        self.recorded = [0] * len(weights)
        for i, quota in zip(taking_part, result, strict=True):
            self.recorded[i] = quota
        self.per_sample = np.array(self.recorded) / BLOCK
        self.only = self.recorded.index(BLOCK) if BLOCK in self.recorded else None

    def after(self, blocks: int) -> np.ndarray:
        return blocks * np.array(self.recorded, dtype=np.int64)


def _check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    for name, weight in zip(names, weights, strict=True):
        if not (isfinite(weight) and weight >= 0):
            raise bad_weight(name, weight)


def bad_weight(name: str, weight: float) -> UserError:
    return UserError(f"{name} has weight {weight}", "give every source a weight above 0, or remove it")


def _smallest_integers(ratios: Sequence[Fraction]) -> list[int]:
    denominator = lcm(*(ratio.denominator for ratio in ratios))
    whole = [int(ratio * denominator) for ratio in ratios]
    common = gcd(*whole)
    return [number // common for number in whole]


def _tree(weights: Sequence[int]) -> tuple:
    """Leaves are (weight, source), nodes (weight, left, right); ties go to the earlier source."""
    heap: list[tuple[int, int, tuple]] = [
        (weight, i, (weight, i)) for i, weight in enumerate(weights) if weight
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        a, b = heapq.heappop(heap), heapq.heappop(heap)
        weight = a[0] + b[0]
        heapq.heappush(heap, (weight, min(a[1], b[1]), (weight, a[2], b[2])))
    return heap[0][2]
