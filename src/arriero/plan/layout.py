"""How ranks share a run: the degrees of each kind of parallelism, and which of them a model allows."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import lcm, prod

from arriero.config.schema import ParallelSection
from arriero.errors import UserError
from arriero.model.family import family_of
from arriero.model.spec import ModelSpec
from arriero.units import counted

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """Degrees, outermost first: neighbouring ranks are those that talk most."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return prod(asdict(self).values())

    @property
    def batch(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    def rows(self, sequences: int) -> int:
        """Rows of a rank in a batch of so many sequences; a rank with a sequence less has an ignored row."""
        return -(-sequences // self.batch)

    @property
    def fsdp(self) -> int:
        """Ranks one copy of the weights is sharded over: those that share a sequence shard them too."""
        return self.dp_shard * self.cp

    def __str__(self) -> str:
        parts = [f"{axis} {degree}" for axis, degree in asdict(self).items() if degree > 1]
        return " x ".join(parts) or "1 process"

    def coordinates(self, rank: int) -> dict[str, int]:
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def groups(self, *axes: str) -> list[list[int]]:
        """Ranks that differ in these axes only, one list for each combination of the others."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            place = self.coordinates(rank)
            groups.setdefault(tuple(place[a] for a in AXES if a not in axes), []).append(rank)
        return list(groups.values())


def resolve(section: ParallelSection, ranks: int) -> Layout:
    """The section's degrees, the one of -1 taking what the others leave."""
    degrees = {axis: getattr(section, axis) for axis in AXES}
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise UserError(f"parallel.{' and parallel.'.join(open_axes)} are both -1", "give all but one")
    fixed = prod(degree for degree in degrees.values() if degree != -1)
    if open_axes and ranks % fixed == 0:
        degrees[open_axes[0]] = ranks // fixed
    layout = Layout(**{axis: abs(degree) for axis, degree in degrees.items()})
    if layout.ranks != ranks:
        asked = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree not in (1, -1))
        number = f"a multiple of {fixed} ranks" if open_axes else counted(fixed, "rank")
        raise UserError(
            f"[parallel] asks for {number} ({asked or 'all degrees are 1'}) and this run has {ranks}",
            "start as many with --nproc, torchrun or srun, or change the degrees",
        )
    return layout


@dataclass(frozen=True)
class Work:
    """What a layout is asked to divide."""

    spec: ModelSpec
    seq_len: int
    sequences: int
    stages: int = 1
    context: str = "auto"


def refuse_illegal(layout: Layout, work: Work) -> None:
    if reasons := list(obstacles(layout, work)):
        whys, todos = zip(*reasons, strict=True)
        raise UserError(
            f"the layout {layout} is not possible: {', and '.join(whys)}", "; ".join(dict.fromkeys(todos))
        )


def obstacles(layout: Layout, work: Work) -> Iterator[tuple[str, str]]:
    """What stands against a layout: why, and what would mend it."""
    spec, tp = work.spec, layout.tp
    if tp > 1 and not family_of(spec.family).placements:
        yield f"the model family '{spec.family}' has no tensor-parallel placements", "set parallel.tp = 1"
    for name, count in (("heads", spec.heads), ("kv_heads", spec.kv_heads), ("ffn", spec.ffn)):
        if count % tp:
            yield f"model.{name} ({count}) does not divide over tp {tp}", "take a tp that divides it"
    rows = -(-spec.vocab_size // tp)
    if rows * (tp - 1) >= spec.vocab_size:
        yield (
            f"a vocabulary of {spec.vocab_size} leaves one of tp {tp} ranks without a row",
            "take a smaller tp",
        )
    if spec.layers < work.stages:
        yield (
            f"{spec.layers} layers cannot fill {work.stages} pipeline stages",
            "lower parallel.pp or parallel.stages_per_rank",
        )
    yield from _sequence_obstacles(layout, work)
    if work.sequences < layout.batch:
        yield (
            f"a batch of {counted(work.sequences, 'sequence')} leaves some of the {layout.batch} "
            "data-parallel ranks without any",
            "change train.batch, or give more ranks to cp, tp or pp",
        )


def _sequence_obstacles(layout: Layout, work: Work) -> Iterator[tuple[str, str]]:
    if work.spec.heads % layout.tp or work.spec.kv_heads % layout.tp:
        return
    heads, kv_heads = work.spec.heads // layout.tp, work.spec.kv_heads // layout.tp
    ulysses, ring = divide_context(layout.cp, heads, kv_heads, work.context)
    pieces = tokens_divisor(ulysses, ring)
    cp, tp = layout.cp, layout.tp
    for what, divisor in ((f"cp {cp}", pieces), (f"cp {cp} x tp {tp}", cp * tp)):
        if work.seq_len % divisor:
            halves = ", in two pieces each" if ring > 1 and divisor == pieces else ""
            yield (
                f"data.seq_len ({work.seq_len}) does not divide over {what}{halves}",
                f"make it a multiple of {divisor}",
            )
            return


def divide_context(cp: int, heads: int, kv_heads: int, kind: str = "auto") -> tuple[int, int]:
    """Degrees of Ulysses and of the ring that share a context: Ulysses as far as the heads allow, as it
    moves fewer bytes; the ring takes the rest. Key/value heads that are too few are repeated."""
    if kind == "ring":
        return 1, cp
    fitting = [
        u
        for u in range(1, cp + 1)
        if cp % u == 0 and heads % u == 0 and (kv_heads % u == 0 or u % kv_heads == 0)
    ]
    if kind == "ulysses" and max(fitting) < cp:
        raise UserError(
            f"parallel.context 'ulysses' cannot share {heads} heads and {kv_heads} kv heads over cp {cp}",
            "set it to 'auto', which adds a ring",
        )
    return max(fitting), cp // max(fitting)


def tokens_divisor(ulysses: int, ring: int) -> int:
    """What the length of a sequence must be a multiple of: a ring's ranks hold two chunks each."""
    return ulysses if ring == 1 else ring * lcm(2, ulysses)
