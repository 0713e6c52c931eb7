"""Events out of the trace file that torch's profiler writes (Chrome's format)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from arriero.bench.breakdown import LOSS, OPTIMIZER, Event, is_attention, spent
from arriero.bench.result import Breakdown

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


def broken_down(trace: Mapping[str, Any], on_gpu: bool) -> Breakdown | None:
    """The mean step of a trace whose steps the profiler has marked; None where it saw nothing of a GPU.

    On a GPU by what its streams did. On a CPU by the operator the main thread was in, its own time without
    those it called; what is left is Python, and waiting for other ranks.
    """
    ranges = [_range(raw) for raw in trace["traceEvents"] if raw.get("ph") == "X"]
    steps = [r for r in ranges if r.name.startswith(_STEP) and r.kind == "user_annotation"]
    if not steps or (on_gpu and not any(r.kind == "kernel" for r in ranges)):
        return None
    begin, end = min(r.start for r in steps), max(r.end for r in steps)
    events = _on_streams(ranges) if on_gpu else _innermost(ranges, steps[0].thread)
    parts = spent(events, begin, end)
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
    """A kernel belongs to the range whose code launched it, or to the one drawn over it on its stream."""
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
        around = _around(launch, by_code) if launch is not None else ""
        around = around or _around(r, by_stream)
        yield Event(r.name, r.start, r.end, int(r.arguments.get("stream", 0)), around)


def _around(inner: _Range, marked: Sequence[_Range]) -> str:
    found = (
        m.name for m in marked if m.thread == inner.thread and m.start <= inner.start and inner.end <= m.end
    )
    return next(found, "")


def _innermost(ranges: Sequence[_Range], thread: Any) -> Iterator[Event]:
    """The stretches of a thread with the operator that was at work in each; ranges nest."""
    nested = [r for r in ranges if r.thread == thread and r.kind in ("cpu_op", "user_annotation")]
    stack: list[_Range] = []
    now = 0.0

    def until(when: float) -> Iterator[Event]:
        if stack and when > now and stack[-1].kind == "cpu_op":
            annotation = next((r.name for r in stack if _tells(r.name)), "")
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


def _tells(name: str) -> bool:
    return name in (LOSS, OPTIMIZER) or is_attention(name)
