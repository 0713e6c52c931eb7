"""Metrics of a logged step, the stopwatch that measures them, and the hooks that write files of a run."""

import io
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arriero.checkpoint.directory import find_checkpoints
from arriero.checkpoint.manager import SaveReport
from arriero.checkpoint.ranks import Ranks
from arriero.data.order.documents import documents_of
from arriero.data.order.ledger import LEDGER, Stretch, begin_ledger, ledger_bytes
from arriero.errors import UserError
from arriero.events import (
    EVENTS,
    METRICS,
    STARTED,
    STOPPED,
    AppendedFile,
    EventLog,
    LineFile,
    TolerantWriter,
)
from arriero.files import publish_file
from arriero.interrupt import Interrupted
from arriero.parallel.mesh import Mesh
from arriero.train.device import Device
from arriero.train.energy import energy_counter
from arriero.train.hooks import Hook
from arriero.train.stragglers import SlowRank, SpeedProbe, Stragglers
from arriero.units import JOULES_PER_KWH

if TYPE_CHECKING:
    from arriero.train.guard import BadStep
    from arriero.train.saving import Outcome
    from arriero.train.session import Session


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Rates are means over the steps since the previous line."""

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
    hfu: float | None = None
    reserved_mem_gib: float | None = None
    joules_per_token: float | None = None
    energy_kwh: float | None = None
    alloc_retries: int | None = None
    ooms: int | None = None
    skipped: int = 0
    eval_loss: float | None = None
    eval_losses: dict[str, float] | None = None
    eval_s: float | None = None
    save_s: float | None = None

    def line(self) -> dict[str, Any]:
        """Return the metrics without keys of what did not happen at this step."""
        optional = {each.name for each in fields(self) if each.default is None}
        return {k: value for k, value in asdict(self).items() if value is not None or k not in optional}

    def scalars(self) -> dict[str, float]:
        """Return the finite numbers of the line, without the step and without evaluations."""
        numbers = {k: v for k, v in self.line().items() if isinstance(v, int | float) and math.isfinite(v)}
        return {k: v for k, v in numbers.items() if k not in ("step", "eval_loss")}


class Stopwatch:
    """Measure the steps since the last lap, without pauses for evaluation and checkpoints.

    Tokens, FLOPs and `peak_flops` are of all ranks, peak memory is of the rank that uses most. MFU is None if
    the peak of the precision in use is unknown.
    """

    def __init__(
        self, device: Device, peak_flops: float | None, mesh: Mesh, shares_gpu: bool = False
    ) -> None:
        self._mesh = mesh
        self._device = device
        self._peak_flops = peak_flops
        self._energy = energy_counter(device, mesh.world, shares_gpu)
        self._probe, self._stragglers = SpeedProbe(device), Stragglers()
        self.slow_ranks: list[SlowRank] = []
        self._reset()

    def _reset(self) -> None:
        self._start = time.perf_counter()
        self._paused = 0.0
        self._waited = 0.0
        self._steps = 0
        self._tokens = 0
        self._flops = 0.0
        self._hardware_flops = 0.0

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

    def count(self, tokens: int, flops: float, hardware_flops: float = 0.0) -> None:
        """Add a step with its number of tokens without padding, its FLOPs, and those with recomputation."""
        self._steps += 1
        self._tokens += tokens
        self._flops += flops
        self._hardware_flops += hardware_flops

    def lap(self, global_values: Sequence[torch.Tensor] = ()) -> tuple[dict[str, Any], list[float]]:
        """Return the rates since the last lap, and `global_values` as numbers; called by all ranks.

        `global_values` are scalars on the device that are equal on all ranks. A lap costs one collective on
        the device and one copy to the host.
        """
        counts = (self._tokens, self._flops, self._hardware_flops)
        counts = counts if self._mesh.is_batch_leader else (0, 0, 0)
        device, allocator = self._device.torch_device, _allocator_counts(self._device)
        speed = (self._probe.seconds(), self._waited / self._steps) if self._mesh.world.size > 1 else (0, 0)
        joules = self._energy.since_last()
        fixed = [*counts, self._device.peak_memory(), *allocator, *speed]
        own = torch.tensor(
            [*fixed, math.nan if joules is None else joules], dtype=torch.float64, device=device
        )
        given = [value.detach().to(device, torch.float64).reshape(1) for value in global_values]
        ranks = self._mesh.all_gather(torch.cat([own, *given])).cpu()
        tokens, flops, hardware_flops = ranks[:, :3].sum(dim=0).tolist()
        seconds = time.perf_counter() - self._start - self._paused
        lap = {
            "tokens_per_s": tokens / seconds,
            "step_s": seconds / self._steps,
            "data_wait": self._waited / seconds,
            "peak_mem_gib": ranks[:, 3].max().item() / 2**30,
            "mfu": flops / seconds / self._peak_flops if self._peak_flops else None,
            "flops_per_token": flops / tokens,
        }
        if self._peak_flops and hardware_flops:
            lap["hfu"] = hardware_flops / seconds / self._peak_flops
        if allocator:
            reserved, retries, ooms = ranks[:, 4 : 4 + len(allocator)].max(dim=0).values.tolist()
            lap |= {"reserved_mem_gib": reserved / 2**30, "alloc_retries": int(retries), "ooms": int(ooms)}
        first = 4 + len(allocator)
        if self._mesh.world.size > 1:
            probes, waits = ranks[:, first : first + 2].T.tolist()
            self.slow_ranks = self._stragglers.add(probes, waits, seconds / self._steps)
        # the sum is NaN if a rank has no meter
        if not math.isnan(energy := ranks[:, first + 2].sum().item()):
            lap |= {"joules": energy, "joules_per_token": energy / tokens}
        self._reset()
        return lap, ranks[0, first + 3 :].tolist()


def _allocator_counts(device: Device) -> list[float]:
    """Return what torch's allocator of a GPU has counted: peak of reserved bytes, retries after it freed its
    cache, and failed allocations; nothing on a CPU."""
    if not device.is_gpu:
        return []
    counted = torch.cuda.memory_stats(device.torch_device)
    names = ("reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
    return [float(counted.get(name, 0)) for name in names]


def measure_step(
    session: "Session", outcome: "Outcome", watch: Stopwatch, lr: float, loss: Tensor, grad_norm: Tensor
) -> dict[str, Any]:
    """Return the fields of a line of metrics.jsonl. Only here does training wait for the device.

    Raise UserError if too many updates were skipped because the loss or the gradient norm was not finite.
    """
    optimizer = session.optimizer
    counts = [optimizer.taken, optimizer.skipped_in_a_row, session.guard.bad_count]
    lap, (loss_value, norm, taken, skipped_in_a_row, bad) = watch.lap([loss, grad_norm, *counts])
    outcome.add(loss_value, lap["tokens_per_s"])
    if (joules := lap.pop("joules", None)) is not None:
        outcome.joules = (outcome.joules or 0.0) + joules
        lap["energy_kwh"] = outcome.joules / JOULES_PER_KWH
    line: dict[str, Any] = {"step": outcome.steps, "tokens": outcome.tokens, "loss": loss_value}
    line |= {"grad_norm": norm, "lr": lr, "skipped": outcome.steps - int(taken), **lap}
    session.guard.learn(session, int(bad))
    for slow in watch.slow_ranks:
        session.record.hooks.on_slow_rank(session, slow)
    never_updated = outcome.steps == session.total_steps and taken == 0
    if skipped_in_a_row > session.config.optim.max_skips or never_updated:
        session.record.hooks.on_metrics(session, StepMetrics(**line))
        # the message names the newest checkpoint, which a background save may still be writing
        session.record.saver.wait(session)
        raise _too_many_skips(session, outcome.steps, int(skipped_in_a_row))
    return line


def _too_many_skips(session: "Session", step: int, in_a_row: int) -> UserError:
    optim = session.config.optim
    saved = [each.step for each in find_checkpoints(session.run_dir) if each.problem is None]
    resume = f" --set checkpoint.resume_from={session.run_dir}" if saved else ""
    start = f"resume from the checkpoint of step {saved[-1]}" if saved else "start again"
    return UserError(
        f"{in_a_row} updates in a row were skipped up to step {step}, because the loss or the gradient norm "
        f"was not finite, or the loss was a spike (optim.max_skips is {optim.max_skips})",
        f"{start} with a lower learning rate: --set run.name=NEW{resume} --set optim.lr={optim.lr / 2:g}",
    )


class MetricsFile(Hook):
    """Write metrics.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / METRICS)

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        self._file.line(metrics.line() | {"time": round(time.time(), 3)})

    def on_stop(self) -> None:
        self._file.close()


class LedgerFile(Hook):
    """Write ledger.json: what data the run has consumed. All ranks contribute.

    It is written at the start, after each checkpoint and at the end. So it never claims samples that a
    restart would read again, and a logged step costs nothing. `checkpoint` is what the run resumes from.
    """

    def __init__(self, run_dir: Path, checkpoint: Path | None = None) -> None:
        self._checkpoint = checkpoint
        self._writer = TolerantWriter(run_dir / LEDGER)
        self._in_saves: deque[bytes] = deque()
        self._unwritten = b""

    def on_start(self, session: "Session") -> None:
        if session.mesh.world.is_leader:
            sequences = session.timeline.phases[0].sequences
            self._ledger = begin_ledger(session.run_dir, session.data.stream, sequences, self._checkpoint)
        ranks = Ranks(session.mesh.world.rank, session.mesh.world.size, session.mesh.group("checkpoint"))
        session.guard.skip(ranks.on_leader(lambda: self._ledger.skipped))
        self._write(self._content(session))

    def end_stretch(self, session: "Session") -> None:
        """Close the current range of samples, because the loader continues elsewhere. Called by all ranks."""
        stretch = _read_by_all(session)
        if session.mesh.world.is_leader:
            self._ledger = self._ledger.with_stretch(stretch)

    def publish(self, session: "Session") -> None:
        """Write the ledger as it is now. Called by all ranks."""
        self._write(self._content(session))

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        self._write(self._unwritten)

    def on_save(self, session: "Session", report: SaveReport) -> None:
        # saves are reported in the order in which they were made
        content = self._in_saves.popleft() if self._in_saves else b""
        if report.error is None:
            self._write(content)

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self._write(self._content(session))

    def write(self, session: "Session") -> bytes:
        """Return the ledger for a checkpoint of this step, empty on ranks above 0; called by all ranks."""
        content = self._content(session)
        self._in_saves.append(content)
        return content

    def _content(self, session: "Session") -> bytes:
        stretch = _read_by_all(session)
        if not session.mesh.world.is_leader:
            return b""
        ledger = replace(self._ledger.with_stretch(stretch), skipped=session.guard.skipped)
        return ledger_bytes(session.data.stream, ledger)

    def _write(self, content: bytes) -> None:
        if content:
            done = self._writer.attempt(
                lambda: publish_file(self._writer.path, content), "and it is written as soon as possible"
            )
            self._unwritten = b"" if done else content


def _read_by_all(session: "Session") -> Stretch:
    """Add up checksums and counts over the ranks that read different sequences."""
    own = session.data.loader.read()
    wrapped = own.checksum - (1 << 64) if own.checksum >= 1 << 63 else own.checksum
    sums = torch.tensor([wrapped, own.real_tokens, own.slots])
    if not session.mesh.is_cp_leader:
        sums.zero_()
    checksum, real_tokens, slots = session.mesh.sum_over(sums, "loss").tolist()
    return Stretch(own.first, own.end, checksum % (1 << 64), real_tokens, slots)


class EventsFile(Hook):
    """Write events.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self._events = EventLog(run_dir / EVENTS)
        self._marker = TolerantWriter(run_dir / STOPPED)
        self._skipped = 0

    def on_start(self, session: "Session") -> None:
        self._skipped = session.optimizer.skipped
        with suppress(OSError):
            self._marker.path.unlink(missing_ok=True)
        started = float(os.environ.get(STARTED, 0)) or session.record.began
        about = {"step": session.record.outcome.steps, "startup_s": round(time.time() - started, 3)}
        self._events.write("start", **session.describe(), **about)
        for remark in session.record.remarks:
            self._events.write("remark", text=remark)

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        if metrics.skipped > self._skipped:
            updates = metrics.skipped - self._skipped
            self._events.write("skip", step=metrics.step, updates=updates, skipped=metrics.skipped)
        self._skipped = metrics.skipped

    def on_slow_rank(self, session: "Session", slow: SlowRank) -> None:
        node, step = session.record.nodes[slow.rank], session.record.outcome.steps
        self._events.write("slow rank", step=step, rank=slow.rank, node=node, why=slow.why)

    def on_bad_step(self, session: "Session", bad: "BadStep", samples: tuple[int, int]) -> None:
        documents = documents_of(session.data.stream, range(*samples))
        about = {"step": bad.step, "reason": bad.reason, "samples": list(samples)}
        self._events.write("bad step", **about, documents=documents)

    def on_rollback(self, session: "Session", to_step: int | None, about: dict[str, Any]) -> None:
        if to_step is None:
            why = "there is no checkpoint before it"
            self._events.write("no rollback", **about, why=why)
        else:
            self._events.write("rollback", to_step=to_step, **about)

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        several = {"eval_losses": session.eval_losses} if session.eval_losses else {}
        self._events.write("evaluation", step=step, tokens=tokens, eval_loss=loss, **several)

    def on_save(self, session: "Session", report: SaveReport) -> None:
        fields = {name: value for name, value in asdict(report).items() if name != "error" or value}
        self._events.write("save" if report.error is None else "save failed", **fields)

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self._events.write("end", **outcome.describe())
        self._events.close()

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        if isinstance(error, Interrupted):
            stop = {"step": step, "signal": error.name, "saved": error.saved}
            self._events.write("signal", **stop)
            content = json.dumps({"time": round(time.time(), 3)} | stop).encode() + b"\n"
            self._marker.attempt(lambda: publish_file(self._marker.path, content), "and the run stops")
        else:
            self._events.write("fault", step=step, error=type(error).__name__, message=str(error))
        self._events.close()


def evaluation_scalars(session: "Session", loss: float) -> dict[str, float]:
    """Return the validation loss and, if there are several sources, that of each."""
    return {"eval_loss": loss} | {f"eval_loss/{name}": each for name, each in session.eval_losses.items()}


class TensorBoard(Hook):
    """Write TensorBoard files without torch's SummaryWriter, which does not recover from a full disk."""

    def __init__(self, run_dir: Path) -> None:
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(run_dir / "tensorboard" / name)
        self._has_header = False

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        self._add(metrics.step, metrics.scalars())

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        self._add(step, evaluation_scalars(session, loss))

    def on_stop(self) -> None:
        self._file.close()

    def _add(self, step: int, scalars: dict[str, float]) -> None:
        # 190 modules that the other ranks need not read from a shared file system
        from tensorboard.compat.proto.event_pb2 import Event  # pyrefly: ignore[missing-module-attribute]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]

        if not self._has_header:
            self._append(Event(file_version="brain.Event:2"))
            self._has_header = True
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._append(Event(step=step, summary=Summary(value=values)))

    def _append(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue())
