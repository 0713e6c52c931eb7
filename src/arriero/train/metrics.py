"""Metrics of a logged step, the stopwatch that measures them, and the hooks that write files of a run."""

import io
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensorboard.compat.proto.event_pb2 import Event  # pyrefly: ignore[missing-module-attribute]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]
from tensorboard.summary.writer.record_writer import RecordWriter

from arriero.checkpoint.manager import SaveReport
from arriero.data.order.ledger import LEDGER, Stretch, begin_ledger, ledger_bytes
from arriero.events import EVENTS, EventLog, GrowingFile, LineFile, Tolerant, finite
from arriero.files import publish_file
from arriero.interrupt import Interrupted
from arriero.parallel.mesh import Mesh
from arriero.train.device import Device
from arriero.train.hooks import Hook

if TYPE_CHECKING:
    from arriero.train.saving import Outcome
    from arriero.train.session import Session


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Rates are means over the steps since the line before."""

    step: int
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_s: float
    data_wait: float
    peak_mem_gib: float
    mfu: float | None
    flops_per_token: float = 0.0
    skipped: int = 0
    eval_loss: float | None = None
    save_s: float | None = None

    def line(self) -> dict[str, Any]:
        """Return the metrics without keys of what did not happen at this step."""
        optional = ("eval_loss", "save_s")
        return {k: value for k, value in asdict(self).items() if value is not None or k not in optional}


class Stopwatch:
    """Time of the steps since the last lap; evaluation and other pauses do not count.

    Tokens, FLOPs and `peak_flops` are those of all ranks, peak memory is that of the rank that uses most. MFU
    is None where the peak for the precision in use is not known.
    """

    def __init__(self, device: Device, peak_flops: float | None, mesh: Mesh) -> None:
        self._mesh = mesh
        self._device = device
        self._peak_flops = peak_flops
        self._reset()

    def _reset(self) -> None:
        self._start = time.perf_counter()
        self._paused = 0.0
        self._waited = 0.0
        self._steps = 0
        self._tokens = 0
        self._flops = 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._device.synchronize()
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def count(self, tokens: int, flops: float) -> None:
        """A step of so many real tokens and so much work was done."""
        self._steps += 1
        self._tokens += tokens
        self._flops += flops

    def lap(self, global_values: Sequence[torch.Tensor] = ()) -> tuple[dict[str, Any], list[float]]:
        """Called by all ranks together: one collective on the device and one copy to the host.

        `global_values` are scalars on the device, alike on all ranks; they come back as numbers.
        """
        counts = (self._tokens, self._flops) if self._mesh.is_batch_leader else (0, 0)
        device = self._device.torch_device
        own = torch.tensor([*counts, self._device.peak_memory()], dtype=torch.float64, device=device)
        given = [value.detach().to(device, torch.float64).reshape(1) for value in global_values]
        ranks = self._mesh.all_gather(torch.cat([own, *given])).cpu()
        tokens, flops = ranks[:, :2].sum(dim=0).tolist()
        seconds = time.perf_counter() - self._start - self._paused
        lap = {
            "tokens_per_s": tokens / seconds,
            "step_s": seconds / self._steps,
            "data_wait": self._waited / seconds,
            "peak_mem_gib": ranks[:, 2].max().item() / 2**30,
            "mfu": flops / seconds / self._peak_flops if self._peak_flops else None,
            "flops_per_token": flops / tokens,
        }
        self._reset()
        return lap, ranks[0, 3:].tolist()


class MetricsFile(Hook):
    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / "metrics.jsonl")

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        self._file.line(metrics.line())

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self._file.close()

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        self._file.close()


class LedgerFile(Hook):
    """What data the run has consumed. All ranks keep it together.

    It is written at the start, when a checkpoint is in place, and at the end: it never claims samples that a
    restart would read again, and a logged step costs nothing. `checkpoint` is what the run resumes from.
    """

    def __init__(self, run_dir: Path, checkpoint: Path | None = None) -> None:
        self._checkpoint = checkpoint
        self._tolerant = Tolerant(run_dir / LEDGER)
        self._in_saves: deque[bytes] = deque()
        self._unwritten = b""

    def on_start(self, session: "Session") -> None:
        if session.mesh.world.is_leader:
            sequences = session.timeline.phases[0].sequences
            self._begun = begin_ledger(session.run_dir, session.data.stream, sequences, self._checkpoint)
        self._write(self._content(session))

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        self._write(self._unwritten)

    def on_save(self, session: "Session", report: SaveReport) -> None:
        """Saves are reported in the order in which they were made."""
        content = self._in_saves.popleft() if self._in_saves else b""
        if report.error is None:
            self._write(content)

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self._write(self._content(session))

    def write(self, session: "Session") -> bytes:
        """What a checkpoint made now holds as its ledger, on rank 0. Called by all ranks."""
        content = self._content(session)
        self._in_saves.append(content)
        return content

    def _content(self, session: "Session") -> bytes:
        stretch = _read_by_all(session)
        if not session.mesh.world.is_leader:
            return b""
        return ledger_bytes(session.data.stream, self._begun.with_stretch(stretch))

    def _write(self, content: bytes) -> None:
        if content:
            done = self._tolerant.attempt(
                lambda: publish_file(self._tolerant.path, content), "and it is written when that is possible"
            )
            self._unwritten = b"" if done else content


def _read_by_all(session: "Session") -> Stretch:
    """Checksums and counts add up over ranks that read different sequences."""
    own = session.data.loader.read()
    wrapped = own.checksum - (1 << 64) if own.checksum >= 1 << 63 else own.checksum
    sums = torch.tensor([wrapped, own.real_tokens, own.slots])
    if not session.mesh.is_cp_leader:
        sums.zero_()
    checksum, real_tokens, slots = session.mesh.sum_over(sums, "loss").tolist()
    return Stretch(own.first, own.end, checksum % (1 << 64), real_tokens, slots)


class EventsFile(Hook):
    def __init__(self, run_dir: Path) -> None:
        self._events = EventLog(run_dir / EVENTS)
        self._skipped = 0

    def on_start(self, session: "Session") -> None:
        self._skipped = session.optimizer.skipped
        self._events.write("start", **session.describe())
        for remark in session.record.remarks:
            self._events.write("remark", text=remark)

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        if metrics.skipped > self._skipped:
            updates = metrics.skipped - self._skipped
            self._events.write("skip", step=metrics.step, updates=updates, skipped=metrics.skipped)
        self._skipped = metrics.skipped

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        self._events.write("evaluation", step=step, tokens=tokens, eval_loss=loss)

    def on_save(self, session: "Session", report: SaveReport) -> None:
        fields = {name: value for name, value in asdict(report).items() if name != "error" or value}
        self._events.write("save" if report.error is None else "save failed", **fields)

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self._events.write("end", **outcome.describe())
        self._events.close()

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        if isinstance(error, Interrupted):
            self._events.write("signal", step=step, signal=error.name)
        else:
            self._events.write("fault", step=step, error=type(error).__name__, message=str(error))
        self._events.close()


class TensorBoard(Hook):
    """Event files written by the main thread: torch's SummaryWriter cannot go on after a full disk."""

    def __init__(self, run_dir: Path) -> None:
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(run_dir / "tensorboard" / name)
        self._begun = False

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        line = metrics.line()
        step = line.pop("step")
        line.pop("eval_loss", None)
        self._add(step, {name: value for name, value in line.items() if finite(value) is not None})

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        self._add(step, {"eval_loss": loss})

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self._file.close()

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        self._file.close()

    def _add(self, step: int, scalars: dict[str, float]) -> None:
        if not self._begun:
            self._append(Event(file_version="brain.Event:2"))
            self._begun = True
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._append(Event(step=step, summary=Summary(value=values)))

    def _append(self, event: Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue())
