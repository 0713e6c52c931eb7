"""Profile some steps of a run into a trace in Chrome's format, for chrome://tracing and Perfetto."""

from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from arriero.errors import UserError
from arriero.train.device import Device

# the first profiled step includes the start of the profiler
WARMUP = 1


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
