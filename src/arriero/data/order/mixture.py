"""How many samples of each source a block of the mixture holds."""

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite

from arriero.errors import UserError

BLOCK = 8192


def quotas(
    weights: Sequence[float], tokens: Sequence[Fraction] | None = None, names: Sequence[str] | None = None
) -> tuple[int, ...]:
    """Samples of each source in a block, by largest remainder; exact, ties to the earlier source.

    `tokens` is the mean of each source's samples: the quota is by tokens, not by samples.
    """
    names = names or [f"source {i}" for i in range(len(weights))]
    for name, weight in zip(names, weights, strict=True):
        if not (isfinite(weight) and weight > 0):
            raise UserError(f"{name} has weight {weight}", "give every source a weight above 0, or remove it")
    exact = [Fraction(w) / t for w, t in zip(weights, tokens or [Fraction(1)] * len(weights), strict=True)]
    shares = [BLOCK * weight / sum(exact) for weight in exact]
    result = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: result[i] - shares[i])
    for i in by_remainder[: BLOCK - sum(result)]:
        result[i] += 1
    for i, quota in enumerate(result):
        if quota == 0:
            raise UserError(
                f"{names[i]} has weight {weights[i]}, less than 1 sample in {BLOCK}",
                "raise its weight, or merge it with another source when preparing",
            )
    return tuple(result)
