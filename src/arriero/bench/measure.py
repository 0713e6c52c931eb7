"""Steps of an ordinary run, timed from outside, and then some more of them profiled."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from arriero.bench.energy import Meter
from arriero.bench.machine import describe_code, describe_machine
from arriero.bench.result import Breakdown, Code, Losses, Machine
from arriero.bench.trace import broken_down
from arriero.config.schema import RunConfig
from arriero.train.device import Device, uuid_of
from arriero.train.hooks import Hook
from arriero.train.metrics import StepMetrics
from arriero.train.run import run
from arriero.train.session import Session

# its first steps are slower: the profiler itself begins
_PROFILER_WARMUP = 1


@dataclass(frozen=True)
class Plan:
    """Steps of a benchmark, one after the other; `started` is when the first process did."""

    warmup: int
    timed: int
    profiled: int
    started: float

    @property
    def steps(self) -> int:
        return self.warmup + self.timed + (_PROFILER_WARMUP + self.profiled if self.profiled else 0)


@dataclass(frozen=True)
class Measured:
    """What the ranks saw together; device and code are those of the first. `real_tokens` are those of a step
    without padding, `joules` those of all timed steps."""

    device: Machine
    code: Code
    compute: str
    compiled: bool
    layout: str
    ranks: int
    micro_batch: int
    step_ms: list[float]
    real_tokens: int
    flops_per_token: float
    start_up_s: float
    losses: Losses
    joules: float | None
    allocated: int
    reserved: int | None
    breakdown: Breakdown | None


def measure(config: RunConfig, plan: Plan) -> Measured | None:
    """Train as one rank and return what was measured on rank 0, None on others."""
    clock, profiler, facts = Clock(plan), ProfiledSteps(plan), Facts()
    run(config, [clock, facts, *([profiler] if plan.profiled else [])])
    if facts.session is None:
        return None
    session = facts.session
    world = session.mesh.world
    return Measured(
        device=describe_machine(session.device, world.size, clock.sm_mhz),
        code=describe_code(),
        compute=str(session.compute).removeprefix("torch."),
        compiled=session.resolved.compiled,
        layout=str(session.mesh.layout),
        ranks=world.size,
        micro_batch=session.resolved.micro_batch,
        step_ms=clock.step_ms(),
        real_tokens=clock.real_tokens(),
        flops_per_token=clock.flops_per_token(),
        start_up_s=clock.start_up_s,
        losses=clock.losses(),
        joules=clock.joules,
        allocated=facts.allocated,
        reserved=facts.reserved,
        breakdown=profiler.breakdown,
    )


class Facts(Hook):
    """Collect what is known at the end of a run: the session, and the peak memory over all ranks."""

    on_all_ranks = True

    def __init__(self) -> None:
        self.session: Session | None = None
        self.allocated = 0
        self.reserved: int | None = None

    def on_end(self, session: Session, outcome: object) -> None:
        device, largest = session.device, session.mesh.max_over_all
        self.allocated = int(largest(device.peak_memory()))
        if device.is_gpu:
            self.reserved = int(largest(torch.cuda.max_memory_reserved(device.torch_device)))
        if session.mesh.world.is_leader:
            self.session = session


class Clock(Hook):
    """Marks the end of each timed step where it happens: in the GPU's own queue, without waiting for it.

    The GPU is waited for twice, before the first timed step and after the last, to read its energy meter.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._marks: list[Any] = []
        self._logged: list[StepMetrics] = []
        self.start_up_s = 0.0
        self.joules: float | None = None
        self.sm_mhz: int | None = None

    def on_start(self, session: Session) -> None:
        self._mark, self._meter = _marker(session.device), _meter(session)
        if self._plan.warmup == 0:
            self._begin(session)

    def on_step(self, session: Session, step: int, tokens: int) -> None:
        first, last = self._plan.warmup, self._plan.warmup + self._plan.timed
        if step == first:
            self._begin(session)
        elif first < step <= last:
            self._marks.append(self._mark())
        if step == last:
            self.sm_mhz = self._meter.sm_mhz()
            session.device.synchronize()
            after = self._meter.joules()
            if after is not None and self._joules_before is not None:
                self.joules = after - self._joules_before

    def _begin(self, session: Session) -> None:
        session.device.synchronize()
        self._joules_before = self._meter.joules()
        self._marks.append(self._mark())

    def on_metrics(self, session: Session, metrics: StepMetrics) -> None:
        if metrics.step == 1:
            self.start_up_s = time.time() - self._plan.started
        self._logged.append(metrics)

    def step_ms(self) -> list[float]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) if isinstance(a, torch.cuda.Event) else (b - a) * 1e3 for a, b in pairs]

    def real_tokens(self) -> int:
        counted = [metrics.tokens_per_s * metrics.step_s for metrics in self._logged]
        return round(sum(counted) / len(counted))

    def flops_per_token(self) -> float:
        return statistics.fmean(metrics.flops_per_token for metrics in self._logged)

    def losses(self) -> Losses:
        first, last = self._logged[0], self._logged[-1]
        return Losses(
            first_step=first.step,
            first=first.loss,
            last_step=last.step,
            last=last.loss,
            first_grad_norm=first.line()["grad_norm"],
            last_grad_norm=last.line()["grad_norm"],
        )


def _marker(device: Device) -> Callable[[], Any]:
    if not device.is_gpu:
        return time.perf_counter

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return mark


def _meter(session: Session) -> Meter:
    """The GPUs of this node; a meter of none where the run has others, or not all are seen from here."""
    world, visible = session.mesh.world, torch.cuda.device_count()
    if not session.device.is_gpu or world.local_size < world.size or visible < world.size:
        return Meter([])
    used = range(world.size) if world.size > 1 else [session.device.torch_device]
    return Meter([uuid_of(gpu) for gpu in used])


class ProfiledSteps(Hook):
    """The last steps of the run, which are not timed."""

    def __init__(self, plan: Plan) -> None:
        self._begin = plan.warmup + plan.timed
        self._profiled = plan.profiled
        self.breakdown: Breakdown | None = None

    def on_step(self, session: Session, step: int, tokens: int) -> None:
        done = step - self._begin
        if done == 0:
            self._start(session)
        elif done > 0:
            if done in (_PROFILER_WARMUP, _PROFILER_WARMUP + self._profiled):
                # or work of the step before would be counted, and some of the last would not
                session.device.synchronize()
            self._profile.step()
        if done == _PROFILER_WARMUP + self._profiled:
            self._profile.stop()

    def _start(self, session: Session) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if session.device.is_gpu else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=_PROFILER_WARMUP, active=self._profiled, repeat=1),
            on_trace_ready=partial(self._read, session.device.is_gpu),
        )
        self._profile.start()

    def _read(self, on_gpu: bool, finished: profile) -> None:
        with tempfile.TemporaryDirectory(prefix="arriero-trace-") as folder:
            path = Path(folder) / "trace.json"
            finished.export_chrome_trace(str(path))
            self.breakdown = broken_down(json.loads(path.read_text(errors="replace")), on_gpu)
