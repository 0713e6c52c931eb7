"""Ranks that are persistently slower than the others: by a probe of the device, or by waiting for data.

In synchronous training all ranks take the same time per step, because they wait for the slowest. So each rank
times a fixed matmul of its own at every logged step, and its waits for the data loader.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from arriero.train.device import Device

_SLOWER = 1.2
_LAPS = 20
_CPU_SIZE, _GPU_SIZE = 128, 2048
_REPEATS = 3


class SpeedProbe:
    """Times a matmul on the device of this rank. On a GPU the time of a call is known at the next one."""

    def __init__(self, device: Device) -> None:
        self._is_gpu = device.is_gpu
        size, dtype = (_GPU_SIZE, torch.bfloat16) if self._is_gpu else (_CPU_SIZE, torch.float32)
        self._matrix = torch.ones(size, size, dtype=dtype, device=device.torch_device)
        self._out = torch.empty_like(self._matrix)
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @torch.no_grad()
    def seconds(self) -> float:
        """Return the shortest time of the matmul; 0 if it is not known yet."""
        if not self._is_gpu:
            return min(self._once() for _ in range(_REPEATS))
        known = 0.0
        if self._events is not None:
            self._events[1].synchronize()
            known = self._events[0].elapsed_time(self._events[1]) / 1e3
        torch.mm(self._matrix, self._matrix, out=self._out)
        self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._events[0].record()
        torch.mm(self._matrix, self._matrix, out=self._out)
        self._events[1].record()
        return known

    def _once(self) -> float:
        start = time.perf_counter()
        torch.mm(self._matrix, self._matrix, out=self._out)
        return time.perf_counter() - start


@dataclass(frozen=True)
class SlowRank:
    """A rank and why it is slow."""

    rank: int
    why: str


class Stragglers:
    """Compares the ranks over the last 20 logged steps; reports each rank once per cause."""

    def __init__(self) -> None:
        self._probes: deque[Sequence[float]] = deque(maxlen=_LAPS)
        self._waits: deque[Sequence[float]] = deque(maxlen=_LAPS)
        self._reported: set[tuple[int, str]] = set()

    def add(self, probes: Sequence[float], waits: Sequence[float], step_s: float) -> list[SlowRank]:
        """Add a logged step: per rank the seconds of its probe and of its waits for data per step."""
        if len(probes) > 1 and all(probes):
            self._probes.append([each / statistics.median_low(probes) for each in probes])
        self._waits.append([(each - statistics.median_low(waits)) / step_s for each in waits])
        found = []
        for rank in range(len(probes)):
            if len(self._probes) == _LAPS and (slower := _typical(self._probes, rank)) > _SLOWER:
                found.append((rank, "device", f"its matmul takes {slower:.2f} times the median of the ranks"))
            if len(self._waits) == _LAPS and (share := _typical(self._waits, rank)) > _SLOWER - 1:
                found.append(
                    (rank, "data", f"it waits for data {share:.0%} of a step longer than the others")
                )
        new = [each for each in found if each[:2] not in self._reported]
        self._reported |= {each[:2] for each in new}
        return [SlowRank(rank, why) for rank, _, why in new]


def _typical(laps: Sequence[Sequence[float]], rank: int) -> float:
    return statistics.median(lap[rank] for lap in laps)
