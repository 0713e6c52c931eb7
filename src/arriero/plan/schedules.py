"""The orders in which a pipeline's stages take micro-batches, and what each needs."""

from collections.abc import Iterator
from dataclasses import dataclass

from arriero.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """`v_shaped`: rank 0 holds the first and the last stage. `splits_backward`: gradients of weights are
    computed apart from those of inputs, to fill the bubbles."""

    torch_name: str
    stages_per_rank: int = 1
    looped: bool = False
    v_shaped: bool = False
    splits_backward: bool = False


SCHEDULES = {
    "gpipe": Schedule("GPipe"),
    "1f1b": Schedule("1F1B"),
    "interleaved-1f1b": Schedule("Interleaved1F1B", 2, looped=True),
    "looped-bfs": Schedule("LoopedBFS", 2, looped=True),
    "zero-bubble": Schedule("InterleavedZeroBubble", 2, looped=True, splits_backward=True),
    "zbv": Schedule("ZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
    "dualpipev": Schedule("DualPipeV", 2, v_shaped=True, splits_backward=True),
}


def stages_per_rank(name: str, asked: int | None) -> int:
    schedule = SCHEDULES[name]
    if asked is None or asked == schedule.stages_per_rank or (schedule.looped and asked > 1):
        return asked or schedule.stages_per_rank
    needs = "two or more stages" if schedule.looped else f"{schedule.stages_per_rank} stages"
    raise UserError(
        f"parallel.stages_per_rank is {asked}, and the schedule '{name}' needs {needs} a rank",
        "leave it out, or choose another parallel.schedule",
    )


def stages_of(name: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """Which stages a pipeline rank holds."""
    if SCHEDULES[name].v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * i for i in range(per_rank)]


def allowed_micro_batches(name: str, count: int, ranks: int, per_rank: int) -> bool:
    schedule = SCHEDULES[name]
    if schedule.looped:
        return count % max(1, count // ranks) == 0
    return name == "gpipe" or count >= ranks * per_rank


def micro_batch_counts(name: str, sequences: int, ranks: int, per_rank: int) -> Iterator[int]:
    """How many micro-batches a rank's sequences may be cut into, fewest first."""
    for count in range(1, sequences + 1):
        if sequences % count == 0 and allowed_micro_batches(name, count, ranks, per_rank):
            yield count
