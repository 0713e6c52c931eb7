"""Profile some steps of a run into a trace in Chrome's format, for chrome://tracing and Perfetto."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from arriero.errors import UserError
from arriero.events import warn
from arriero.train.device import Device
from arriero.train.hooks import Hook

if TYPE_CHECKING:
    from arriero.train.session import Session

# the first profiled step includes the start of the profiler
WARMUP = 1


PROFILE_NOW = "profile-now"
PROFILES = "profiles"
_STEPS_ON_DEMAND = 3
_MEMORY_EVENTS = 100_000


class ProfileOnDemand(Hook):
    """Profile three steps of rank 0 when RUN/profile-now appears: a trace, and on GPUs a memory snapshot."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._profiler: StepProfiler | None = None
        self._is_refused = False

    def on_step(self, session: "Session", step: int, tokens: int) -> None:
        if self._profiler is None:
            self._start(session, step)
        elif self._attempt(self._profiler.step) is not False:
            self._profiler = None
            if session.device.is_gpu:
                self._attempt(lambda: _dump_memory(self._path("memory", "pickle")))
            warn(f"profiled steps {self._first} to {step}: {self._run_dir / PROFILES}")

    def _start(self, session: "Session", step: int) -> None:
        request = self._run_dir / PROFILE_NOW
        # Path.exists would raise a transient error of the file system
        if self._is_refused or not os.path.lexists(request):
            return
        self._first = step + 1
        self._attempt(lambda: self._begin(request, session.device))
        # a request that cannot be deleted would be read again at every step
        self._is_refused = os.path.lexists(request)

    def _begin(self, request: Path, device: Device) -> None:
        request.unlink()
        trace = self._path("trace", "json.gz")
        trace.parent.mkdir(exist_ok=True)
        if device.is_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profiler = StepProfiler(device, _STEPS_ON_DEMAND, trace)

    def _path(self, kind: str, suffix: str) -> Path:
        return self._run_dir / PROFILES / f"{kind}-{self._first:08d}.{suffix}"

    def _attempt(self, work: Callable[[], bool | None]) -> bool | None:
        """Run something that must not end training; torch raises RuntimeError if another profiler runs."""
        try:
            return work()
        except (OSError, RuntimeError, UserError) as error:
            warn(f"the profile was not written: {error}")
            return None


def _dump_memory(path: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


class StepProfiler:
    """Profile the next `steps` steps of this rank, after one that is not recorded, and write them to `path`.

    Create it between two steps and call `step` at the end of each one until it returns True. A path that ends
    in ".gz" is compressed. The device is synchronized before the first and after the last recorded step,
    because work of neighbouring steps would be recorded otherwise.
    """

    def __init__(self, device: Device, steps: int, path: Path) -> None:
        self._device, self._steps, self._path = device, steps, path
        self._done = 0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_gpu else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARMUP, active=steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def step(self) -> bool:
        """End a step; return whether the trace is complete and written."""
        self._done += 1
        last = WARMUP + self._steps
        if self._done in (WARMUP, last):
            self._device.synchronize()
        self._profile.step()
        if self._done == last:
            self._profile.stop()
        return self._done >= last

    def _write(self, finished: profile) -> None:
        """Write the trace under another name first, so that a file of this name is whole."""
        partial = self._path.with_name(
            f".{self._path.name}.part" + (".gz" if self._path.suffix == ".gz" else "")
        )
        try:
            finished.export_chrome_trace(str(partial))
            partial.replace(self._path)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"the trace {self._path} cannot be written ({error})", "give another file"
            ) from None
