"""Where to cut a model into pipeline stages, by what each part costs."""

from functools import cache
from itertools import pairwise

from arriero.model.spec import ModelSpec


def stage_costs(spec: ModelSpec, seq_len: int) -> tuple[float, float, float]:
    """Multiply-adds per token of the embedding, one block and the head."""
    embedding = spec.dim
    head = spec.vocab_size * spec.dim
    attention = seq_len * spec.attention_width
    block = spec.block_matmul_parameters + attention
    return embedding, block, head


def cut_stages(spec: ModelSpec, seq_len: int, stages: int) -> list[range]:
    """Consecutive blocks for each stage, at least one each, the dearest stage as cheap as can be.

    Among equal cuts, the one whose stages differ least.
    """
    embedding, block, head = stage_costs(spec, seq_len)

    def cost(first: int, end: int) -> float:
        ends = (embedding if first == 0 else 0.0) + (head if end == spec.layers else 0.0)
        return ends + (end - first) * block

    @cache
    def best(end: int, parts: int) -> tuple[float, float, tuple[int, ...]]:
        """(dearest, sum of squares, cuts) for the blocks before `end` in so many parts."""
        if parts == 1:
            return cost(0, end), cost(0, end) ** 2, (0, end)
        options = []
        for cut in range(parts - 1, end):
            dearest, squares, cuts = best(cut, parts - 1)
            here = cost(cut, end)
            options.append((max(dearest, here), squares + here**2, (*cuts, end)))
        return min(options)

    cuts = best(spec.layers, stages)[2]
    return [range(a, b) for a, b in pairwise(cuts)]
