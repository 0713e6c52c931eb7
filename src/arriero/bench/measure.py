"""Measure steps of an ordinary run with hooks: time and energy first, then a profile of some more steps."""

import gzip
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from arriero.bench.machine import Meter, describe_code, describe_device
from arriero.bench.result import (
    CATEGORIES,
    Breakdown,
    CodeVersion,
    DeviceInfo,
    Energy,
    Losses,
    Memory,
    Timing,
)
from arriero.config.schema import MemorySection, RunConfig
from arriero.events import finite
from arriero.model.spec import Recompute
from arriero.parallel.loss import LOSS
from arriero.train.device import Device, uuid_of
from arriero.train.hooks import Hook
from arriero.train.metrics import StepMetrics
from arriero.train.optim.optimizer import OPTIMIZER
from arriero.train.profiler import WARMUP, StepProfiler
from arriero.train.run import run
from arriero.train.session import Session


@dataclass(frozen=True)
class StepCounts:
    """Numbers of warm-up, timed and profiled steps, in this order; `started` is when the process started."""

    warmup: int
    timed: int
    profiled: int
    started: float

    @property
    def steps(self) -> int:
        return self.warmup + self.timed + (WARMUP + self.profiled if self.profiled else 0)


@dataclass(frozen=True)
class Measured:
    """Measurements over all ranks; device and code are those of rank 0.

    `memory_section` has the derived activation checkpointing, `arithmetic` what other "auto" keys became.
    """

    device: DeviceInfo
    code: CodeVersion
    compute: str
    compiled: bool
    layout: str
    ranks: int
    micro_batch: int
    memory_section: MemorySection
    arithmetic: Mapping[str, Any]
    flops_per_token: float
    recompute: Recompute
    timing: Timing
    memory: Memory
    energy: Energy | None
    losses: Losses
    breakdown: Breakdown | None


def measure(config: RunConfig, counts: StepCounts, trace: Path | None = None) -> Measured | None:
    """Train as one rank and return what was measured on rank 0, which writes the trace; None on others."""
    clock, profiler, end = StepClock(counts), ProfiledSteps(counts, trace), EndOfRun()
    run(config, [clock, end, *([profiler] if counts.profiled else [])])
    if end.session is None:
        return None
    session = end.session
    world = session.mesh.world
    # tokens of a step without padding
    tokens, joules = clock.real_tokens(), clock.joules / counts.timed if clock.joules else None
    return Measured(
        device=describe_device(session.device, world.size, clock.sm_mhz),
        code=describe_code(),
        compute=str(session.compute).removeprefix("torch."),
        compiled=session.resolved.compiled,
        layout=str(session.mesh.layout),
        ranks=world.size,
        micro_batch=session.resolved.micro_batch,
        memory_section=session.resolved.memory,
        arithmetic=session.resolved.arithmetic,
        flops_per_token=clock.flops_per_token(),
        recompute=session.recompute,
        timing=Timing.of(clock.step_ms(), tokens, counts.warmup, clock.start_up_s),
        memory=end.memory,
        energy=Energy(joules_per_step=joules, tokens_per_joule=tokens / joules) if joules else None,
        losses=clock.losses(),
        breakdown=profiler.breakdown,
    )


class EndOfRun(Hook):
    """Keep the session on rank 0, and the peak memory over all ranks."""

    on_all_ranks = True

    def __init__(self) -> None:
        self.session: Session | None = None

    def on_end(self, session: Session, outcome: object) -> None:
        device, largest = session.device, session.mesh.max_over_all
        allocated, reserved = largest(device.peak_memory()) / 2**30, None
        if device.is_gpu:
            reserved = largest(torch.cuda.max_memory_reserved(device.torch_device)) / 2**30
        self.memory = Memory(allocated_gib=allocated, reserved_gib=reserved)
        if session.mesh.world.is_leader:
            self.session = session


class StepClock(Hook):
    """Record the end of each timed step as an event in the GPU's stream, without synchronizing.

    The GPU is synchronized twice, before the first timed step and after the last, to read its energy meter.
    """

    def __init__(self, counts: StepCounts) -> None:
        self._counts = counts
        self._marks: list[Any] = []
        self._logged: list[StepMetrics] = []
        self.start_up_s = 0.0
        self.joules: float | None = None
        self.sm_mhz: int | None = None

    def on_start(self, session: Session) -> None:
        self._mark, self._meter = _marker(session.device), _meter(session)
        if self._counts.warmup == 0:
            self._begin(session)

    def on_step(self, session: Session, step: int, tokens: int) -> None:
        first, last = self._counts.warmup, self._counts.warmup + self._counts.timed
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
            self.start_up_s = time.time() - self._counts.started
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
            first_grad_norm=finite(first.grad_norm),
            last_grad_norm=finite(last.grad_norm),
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
    """Return a meter of all GPUs of the run; of none if some are on other nodes or not visible here."""
    world, visible = session.mesh.world, torch.cuda.device_count()
    if not session.device.is_gpu or world.local_size < world.size or visible < world.size:
        return Meter([])
    used = range(world.size) if world.size > 1 else [session.device.torch_device]
    return Meter([uuid_of(gpu) for gpu in used])


class ProfiledSteps(Hook):
    """Profile the last steps of the run, which are not timed; a trace with a path is kept."""

    def __init__(self, counts: StepCounts, trace: Path | None = None) -> None:
        self._begin = counts.warmup + counts.timed
        self._profiled = counts.profiled
        self._trace = trace
        self.breakdown: Breakdown | None = None

    def on_step(self, session: Session, step: int, tokens: int) -> None:
        if step == self._begin:
            self._folder = tempfile.TemporaryDirectory(prefix="arriero-trace-")
            self._path = self._trace or Path(self._folder.name) / "trace.json"
            self._profiler = StepProfiler(session.device, self._profiled, self._path)
        elif step > self._begin and self._profiler.step():
            self.breakdown = break_down(read_trace(self._path), session.device.is_gpu)
            self._folder.cleanup()


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace in Chrome's format, compressed or not."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(content.decode(errors="replace"))


_ATTENTION = r"flash|fmha|sdpa|attention|attn|scaled_?dot_?product"
_BY_NAME = [
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        (
            "communication",
            r"nccl|rccl|^gloo|^c10d|_c10d|all_?gather|all_?reduce|reduce_?scatter|all_?to_?all",
        ),
        ("copies", r"^mem(cpy|set)|^aten::(copy_|_to_copy|to|clone|contiguous)$"),
        # Inductor names a kernel after everything it fused, perhaps "attention"
        ("elementwise", r"^triton_(poi|red|per|for)_"),
        ("attention", _ATTENTION),
        (
            "GEMM",
            r"gemm|gemv|cutlass|nvjet|cublas|xmma|split_?k|s\d+816|^triton_(tem|mm)|^Cijk_|scaled_mm"
            r"|^aten::(mm|addmm_?|bmm|baddbmm_?|matmul|linear)$|^mk[ld].*linear",
        ),
    )
]


class Event(NamedTuple):
    """An activity of a device in microseconds; `annotation` is the named range of code that it belongs to."""

    name: str
    start: float
    end: float
    stream: int
    annotation: str = ""


def category_of(name: str, annotation: str = "") -> str:
    """Classify a kernel by name, then by range.

    Matmuls of the output head are GEMMs, everything else in the loss is loss. All computation of the
    optimizer, Muon's matmuls included, is optimizer. Unknown kernels are elementwise.
    """
    known = next((category for category, pattern in _BY_NAME if pattern.search(name)), "elementwise")
    if known in ("communication", "copies"):
        return known
    if annotation == OPTIMIZER:
        return "optimizer"
    if annotation == LOSS and known == "elementwise":
        return "loss"
    return "attention" if is_attention(annotation) else known


def is_attention(name: str) -> bool:
    return re.search(_ATTENTION, name, re.IGNORECASE) is not None


def time_by_category(events: Iterable[Event], begin: float, end: float) -> dict[str, float]:
    """Return microseconds by category between two times; they add up to the difference.

    Where streams overlap, time counts once, and for communication and copies only while nothing is computed.
    """
    changes: list[tuple[float, int, str]] = []
    for event in events:
        start, stop = max(event.start, begin), min(event.end, end)
        if stop > start:
            category = category_of(event.name, event.annotation)
            changes += [(start, 1, category), (stop, -1, category)]
    total = dict.fromkeys(CATEGORIES, 0.0)
    active: Counter[str] = Counter()
    now = begin
    for when, change, category in sorted(changes):
        if when > now:
            total[next((c for c in CATEGORIES if active[c]), "idle")] += when - now
            now = when
        active[category] += change
    total["idle"] += end - now
    return total


_STEP = "ProfilerStep#"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


class _Range(NamedTuple):
    name: str
    start: float
    end: float
    kind: str
    thread: Any
    arguments: Mapping[str, Any]


def break_down(trace: Mapping[str, Any], on_gpu: bool) -> Breakdown | None:
    """Break down the mean step of a profiler trace (Chrome's format); None if it has no GPU events.

    A GPU is classified by the kernels on its streams. A CPU is classified by the innermost operator of the
    main thread; the remainder is Python and waiting for other ranks.
    """
    ranges = [_range(raw) for raw in trace["traceEvents"] if raw.get("ph") == "X"]
    steps = [r for r in ranges if r.name.startswith(_STEP) and r.kind == "user_annotation"]
    if not steps or (on_gpu and not any(r.kind == "kernel" for r in ranges)):
        return None
    begin, end = min(r.start for r in steps), max(r.end for r in steps)
    events = _on_streams(ranges) if on_gpu else _innermost(ranges, steps[0].thread)
    parts = time_by_category(events, begin, end)
    each = 1e3 * len(steps)
    return Breakdown(
        steps=len(steps),
        step_ms=(end - begin) / each,
        parts={category: time / each for category, time in parts.items()},
    )


def _range(raw: Mapping[str, Any]) -> _Range:
    start = float(raw["ts"])
    thread = (raw.get("pid"), raw.get("tid"))
    arguments = raw.get("args", {})
    return _Range(raw["name"], start, start + float(raw.get("dur", 0)), raw.get("cat", ""), thread, arguments)


def _on_streams(ranges: Sequence[_Range]) -> Iterator[Event]:
    """Assign each kernel to the range whose code launched it, or else to the range on its stream."""
    marked = [r for r in ranges if r.name in (LOSS, OPTIMIZER)]
    by_code = [r for r in marked if r.kind == "user_annotation"]
    by_stream = [r for r in marked if r.kind == "gpu_user_annotation"]
    launches = {
        r.arguments["correlation"]: r for r in ranges if r.kind in _LAUNCHES and "correlation" in r.arguments
    }
    for r in ranges:
        if r.kind not in _ON_GPU:
            continue
        launch = launches.get(r.arguments.get("correlation"))
        around = _enclosing(launch, by_code) if launch is not None else ""
        around = around or _enclosing(r, by_stream)
        yield Event(r.name, r.start, r.end, int(r.arguments.get("stream", 0)), around)


def _enclosing(inner: _Range, marked: Sequence[_Range]) -> str:
    found = (
        m.name for m in marked if m.thread == inner.thread and m.start <= inner.start and inner.end <= m.end
    )
    return next(found, "")


def _innermost(ranges: Sequence[_Range], thread: Any) -> Iterator[Event]:
    """Yield the intervals of a thread with the innermost operator of each; ranges nest."""
    nested = [r for r in ranges if r.thread == thread and r.kind in ("cpu_op", "user_annotation")]
    stack: list[_Range] = []
    now = 0.0

    def until(when: float) -> Iterator[Event]:
        if stack and when > now and stack[-1].kind == "cpu_op":
            annotation = next((r.name for r in stack if _is_category_range(r.name)), "")
            yield Event(stack[-1].name, now, when, 0, annotation)

    for r in sorted(nested, key=lambda r: (r.start, -r.end)):
        while stack and stack[-1].end <= r.start:
            yield from until(stack[-1].end)
            now = max(now, stack.pop().end)
        yield from until(r.start)
        now = max(now, r.start)
        stack.append(r)
    while stack:
        yield from until(stack[-1].end)
        now = max(now, stack.pop().end)


def _is_category_range(name: str) -> bool:
    return name in (LOSS, OPTIMIZER) or is_attention(name)
