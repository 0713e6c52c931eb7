"""How ranks divide a model and a batch: degrees, context parallelism, pipeline stages and schedules."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import isqrt, lcm

from arriero.model.spec import ModelSpec, sequence_flops

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """Parallel degrees, outermost first: ranks that communicate most are neighbours."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def batch(self) -> int:
        """Number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    def rows(self, sequences: int) -> int:
        """Sequences per rank of a global batch, rounded up: a rank with one fewer has an ignored row."""
        return -(-sequences // self.batch)

    @property
    def fsdp(self) -> int:
        """Number of ranks that one copy of the weights is sharded over; context ranks shard it too."""
        return self.dp_shard * self.cp

    @property
    def uses_fsdp(self) -> bool:
        return self.dp_replicate * self.fsdp > 1

    def __str__(self) -> str:
        parts = [f"{axis} {degree}" for axis, degree in asdict(self).items() if degree > 1]
        return " x ".join(parts) or "1 process"

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ in these axes only."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            place = self.coordinates(rank)
            groups.setdefault(tuple(place[a] for a in AXES if a not in axes), []).append(rank)
        return list(groups.values())


def divide_context(cp: int, heads: int, kv_heads: int, method: str = "auto") -> tuple[int, int]:
    """Return the Ulysses and ring degrees of a context-parallel group of `cp` ranks.

    Ulysses takes as many ranks as the heads allow, because it moves fewer bytes; the ring takes the rest.
    Key/value heads that are too few are repeated.
    """
    if method == "ring":
        return 1, cp
    ulysses = max(
        degree
        for degree in divisors(cp)
        if heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
    )
    return ulysses, cp // ulysses


def tokens_divisor(ulysses: int, ring: int) -> int:
    """Return what the sequence length must be a multiple of: each rank of a ring holds two chunks."""
    return ulysses if ring == 1 else ring * lcm(2, ulysses)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule of torch.

    `v_shaped`: rank 0 holds the first and the last stage. `splits_backward`: weight gradients are computed
    separately from input gradients, to fill the bubbles.
    """

    torch_name: str
    stages_per_rank: int = 1
    looped: bool = False
    v_shaped: bool = False
    splits_backward: bool = False

    def allows_stages(self, per_rank: int) -> bool:
        return per_rank == self.stages_per_rank or (self.looped and per_rank > 1)


SCHEDULES = {
    "gpipe": Schedule("GPipe"),
    "1f1b": Schedule("1F1B"),
    "interleaved-1f1b": Schedule("Interleaved1F1B", 2, looped=True),
    "looped-bfs": Schedule("LoopedBFS", 2, looped=True),
    "zero-bubble": Schedule("InterleavedZeroBubble", 2, looped=True, splits_backward=True),
    "zbv": Schedule("ZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
    "dualpipev": Schedule("DualPipeV", 2, v_shaped=True, splits_backward=True),
}


def stages_of(name: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """Return the indices of the stages that a pipeline rank holds."""
    if SCHEDULES[name].v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * i for i in range(per_rank)]


def in_flight(name: str, rank: int, ranks: int, per_rank: int, count: int) -> float:
    """Return how many micro-batches' activations a pipeline rank holds at most, of `count` in a step.

    A looped schedule holds some micro-batches in a part of its stages only.
    """
    if ranks == 1:
        return 1.0
    if name in ("gpipe", "looped-bfs"):
        return float(count)
    if name == "1f1b":
        return float(min(count, ranks - rank))
    if SCHEDULES[name].v_shaped:
        return min(count, ranks + 0.5)
    per_round = count // max(1, count // ranks)
    held = (per_rank - 1) * per_round + 2 * (ranks - 1 - rank) + 1
    return min(count * per_rank, held) / per_rank


def allowed_micro_batches(name: str, count: int, ranks: int, per_rank: int) -> bool:
    """Return whether a schedule accepts this number of micro-batches per step."""
    schedule = SCHEDULES[name]
    if schedule.looped:
        return count % max(1, count // ranks) == 0
    return name == "gpipe" or count >= ranks * per_rank


def micro_batch_counts(name: str, sequences: int, ranks: int, per_rank: int) -> Iterator[int]:
    """Yield the numbers of equal micro-batches that a schedule accepts, in ascending order."""
    return (n for n in divisors(sequences) if allowed_micro_batches(name, n, ranks, per_rank))


def distinct_kinds(spec: ModelSpec) -> tuple[ModelSpec, ...]:
    """Return the different kinds of blocks. Most models have one, and hashing all of them takes long."""
    first, *_ = kinds = spec.kinds
    return (first,) if kinds.count(first) == len(kinds) else tuple(dict.fromkeys(kinds))


def stage_costs(spec: ModelSpec, seq_len: int) -> tuple[int, int, int]:
    """Return the multiply-adds per token of the embedding, of one block and of the head."""
    attention = round(sequence_flops(spec, spec.attended(seq_len)) / 2 / spec.layers)
    return spec.dim, spec.block_matmul_parameters + attention, spec.vocab_size * spec.dim


def cut_stages(spec: ModelSpec, seq_len: int, stages: int) -> tuple[range, ...]:
    """Return the consecutive blocks of each pipeline stage, at least one each.

    The most expensive stage is as cheap as possible; among equal cuts, the stages differ least.
    """
    if len(distinct_kinds(spec)) == 1:
        return _cut(spec.layers, stages, *stage_costs(spec, seq_len))
    blocks = [stage_costs(kind, seq_len)[1] for kind in spec.kinds]
    embedding, _, head = stage_costs(spec, seq_len)
    return _cut_unequal((embedding + blocks[0], *blocks[1:-1], blocks[-1] + head), stages)


@cache
def _cut_unequal(costs: tuple[int, ...], stages: int) -> tuple[range, ...]:
    """Cut blocks of different costs; the first and the last one include the embedding and the head."""
    sums = [0, *accumulate(costs)]
    # best[n]: the most expensive stage, the sum of squares and the ends of the stages of the first n blocks
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (max(most, own := sums[end] - sums[begin]), squares + own**2, (*ends, end))
                for begin, (most, squares, ends) in best.items()
                if begin < end
            )
            for end in range(stage, len(costs) - stages + stage + 1)
        }
    return tuple(range(a, b) for a, b in pairwise(best[len(costs)][2]))


@cache
def _cut(layers: int, stages: int, embedding: int, block: int, head: int) -> tuple[range, ...]:
    if stages == 1:
        return (range(layers),)
    inner = stages - 2

    def cost(first: int, last: int) -> tuple[int, int, int, int]:
        ends = embedding + first * block, head + last * block
        small, larger = divmod(layers - first - last, inner) if inner else (0, 0)
        largest = (small + (larger > 0)) * block
        squares = (inner - larger) * (small * block) ** 2 + larger * ((small + 1) * block) ** 2
        return max(*ends, largest), sum(end**2 for end in ends) + squares, first, -last

    # no end stage of the best cut has more blocks than an even cut over all stages but one
    most = min(layers - stages + 1, -(-layers // (stages - 1)))
    sizes = range(1, most + 1)
    if inner:
        pairs = [(a, b) for a in sizes for b in sizes if a + b + inner <= layers]
    else:
        pairs = [(a, layers - a) for a in range(1, layers)]
    first, last = min(pairs, key=lambda pair: cost(*pair))
    small, larger = divmod(layers - first - last, inner) if inner else (0, 0)
    middle = [small] * (inner - larger) + [small + 1] * larger
    return tuple(range(a, b) for a, b in pairwise(accumulate([0, first, *middle, last])))
