"""The timeline of a pipeline schedule: when each rank computes which micro-batch of which stage.

`pipeline_seconds` is a closed form for ranking many layouts, `simulate` plays the schedule for a picture.
"""

from dataclasses import dataclass

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
    held = [stages_of(schedule, rank, ranks, per_rank) for rank in range(ranks)]
    busy = max(sum(stages[s].busy(micro_batches) for s in own) for own in held)
    whole = sum(stage.forward + stage.backward for stage in stages)
    forward = sum(stage.forward for stage in stages)
    # a micro-batch passes all stages once; a rank computes its own share of that time
    ramp = whole * (ranks - 1) / ranks / per_rank
    if SCHEDULES[schedule].splits_backward:
        # weight gradients fill the wait; about a forward pass per stage remains, half of it in a V
        ramp = forward * (ranks - 1) / ranks / per_rank * (0.5 if SCHEDULES[schedule].v_shaped else 1.0)
    hops = 2 * (ranks * per_rank - 1) * max(stage.sent for stage in stages)
    # sends run beside the computation, but a rank waits for the start of each
    steady = micro_batches * per_rank * max(stage.sent for stage in stages)
    return busy + ramp + hops + steady, ramp + hops
