"""The timeline of a pipeline schedule: when each rank computes which micro-batch of which stage.

`pipeline_seconds` is a closed form for ranking many layouts, `simulate` plays the schedule for a picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from arriero.plan.layout import SCHEDULES, stages_of


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage for one micro-batch. `first_forward` includes gathers that happen once per step,
    `last_backward` the reduction of gradients; `sent` is the transfer to the next stage.

    `waits` is exposed communication of FSDP: of each micro-batch, of the first forward, of the last backward.
    """

    forward: float
    backward: float
    first_forward: float
    last_backward: float
    sent: float
    accumulate: float
    parameters: float
    waits: tuple[float, float, float] = (0.0, 0.0, 0.0)
    hosts: float = 0.0

    def busy(self, micro_batches: int) -> float:
        """Return the seconds of work of this stage in a step."""
        once = self.first_forward - self.forward + self.last_backward - self.backward + self.accumulate
        return micro_batches * (self.forward + self.backward) + once

    def exposed(self, micro_batches: int) -> float:
        each, first, last = self.waits
        return max(0, micro_batches - 1) * each + first + last

    def host(self, micro_batches: int) -> float:
        return micro_batches * self.hosts


def pipeline_seconds(
    schedule: str, stages: list[StageTimes], ranks: int, per_rank: int, micro_batches: int
) -> tuple[float, float]:
    """Return the seconds of all micro-batches, and how many of them the busiest rank waits."""
    if ranks == 1:
        return stages[0].busy(micro_batches), 0.0
    # most stages are equal
    each = {id(stage): stage.busy(micro_batches) for stage in {id(s): s for s in stages}.values()}
    busy = max(sum(each[id(stages[s])] for s in own) for own in held_stages(schedule, ranks, per_rank))
    whole = sum(stage.forward + stage.backward for stage in stages)
    forward = sum(stage.forward for stage in stages)
    # a micro-batch passes all stages once; a rank computes its own share of that time
    ramp = whole * (ranks - 1) / ranks / per_rank
    if SCHEDULES[schedule].splits_backward:
        # weight gradients fill the wait; about a forward pass per stage remains, half of it in a V
        ramp = forward * (ranks - 1) / ranks / per_rank * (0.5 if SCHEDULES[schedule].v_shaped else 1.0)
    hops = 2 * (ranks * per_rank - 1) * max(stage.sent for stage in stages)
    # sends overlap with the computation, but a rank waits for the start of each
    steady = micro_batches * per_rank * max(stage.sent for stage in stages)
    return busy + ramp + hops + steady, ramp + hops


@dataclass(frozen=True)
class Slot:
    """One computation of a pipeline rank: `kind` is 'forward', 'backward' or 'weights'."""

    rank: int
    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float


@cache
def held_stages(schedule: str, ranks: int, per_rank: int) -> list[list[int]]:
    """Return the stages of each rank."""
    return [stages_of(schedule, rank, ranks, per_rank) for rank in range(ranks)] if ranks > 1 else [[0]]


def simulate(
    schedule: str, stages: Sequence[StageTimes], ranks: int, per_rank: int, micro_batches: int
) -> list[Slot]:
    """Play a step of a pipeline and return what each rank computes when.

    Each rank starts what its schedule prefers of what is ready: a backward pass, else a forward pass if fewer
    micro-batches are in flight than allowed; separately computed weight gradients fill the waits.
    """
    held = held_stages(schedule, ranks, per_rank)
    rank_of = {stage: rank for rank, own in enumerate(held) for stage in own}
    kind, last = SCHEDULES[schedule], len(stages) - 1
    all_forward = schedule in ("gpipe", "looped-bfs")
    limits = [_in_flight(schedule, rank, ranks, per_rank, micro_batches) for rank in range(ranks)]
    ready: list[list[tuple[tuple[int, ...], float, str, int, int]]] = [[] for _ in range(ranks)]
    free, flight, slots = [0.0] * ranks, [0] * ranks, []

    def add(name: str, stage: int, micro: int, at: float) -> None:
        turn = stage // ranks if not kind.v_shaped else int(stage >= ranks)
        place = micro // ranks if kind.looped and not all_forward else 0
        order = turn if name == "forward" else per_rank - turn
        ready[rank_of[stage]].append(((place, order, micro), at, name, stage, micro))

    for micro in range(micro_batches):
        add("forward", 0, micro, 0.0)
    share = 0.5 if kind.splits_backward else 1.0
    while any(ready):
        # the rank that can start something first
        choices = [_next(ready[r], free[r], flight[r], limits[r], ranks) for r in range(ranks)]
        rank = min((r for r in range(ranks) if choices[r]), key=lambda r: choices[r][0])  # type: ignore[index]
        start, item = choices[rank]  # type: ignore[misc]
        ready[rank].remove(item)
        _, _, name, stage, micro = item
        times = stages[stage]
        seconds = {
            "forward": times.first_forward if micro == 0 else times.forward,
            "backward": share * (times.last_backward if micro == micro_batches - 1 else times.backward),
            "weights": share * times.backward,
        }[name]
        end = free[rank] = start + seconds
        slots.append(Slot(rank, stage, micro, name, start, end))
        if name == "forward":
            flight[rank] += 1
            if stage < last:
                add("forward", stage + 1, micro, end + (times.sent if rank_of[stage + 1] != rank else 0.0))
            else:
                add("backward", stage, micro, end)
        elif name == "backward":
            flight[rank] -= 1
            if stage > 0:
                add("backward", stage - 1, micro, end + (times.sent if rank_of[stage - 1] != rank else 0.0))
            if kind.splits_backward:
                add("weights", stage, micro, end)
    return slots


def _in_flight(schedule: str, rank: int, ranks: int, per_rank: int, micro_batches: int) -> int:
    """Return how many forward passes of a rank may wait for their backward pass."""
    if schedule in ("gpipe", "looped-bfs"):
        return per_rank * micro_batches
    if SCHEDULES[schedule].looped:
        return min(per_rank * micro_batches, 2 * (ranks - rank - 1) + (per_rank - 1) * ranks + 1)
    return 2 * ranks if SCHEDULES[schedule].v_shaped else ranks - rank


def _next(waiting: list, free: float, flight: int, limit: int, ranks: int):
    """Return when a rank can start which of its waiting computations; None if it must wait for others."""
    best = None
    for item in waiting:
        order, at, name, stage, _ = item
        # only entering the pipeline is limited: what is in it must be able to leave
        if name == "forward" and flight >= limit and stage < ranks:
            continue
        start = max(at, free)
        rank = {"backward": 0, "forward": 1, "weights": 2}[name]
        key = (start, rank, order)
        if best is None or key < best[0]:
            best = key, item
    return None if best is None else (best[0][0], best[1])
