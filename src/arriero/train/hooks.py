"""The one way optional behaviour attaches to a run, and the hooks that write files."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.tensorboard import SummaryWriter

from arriero.checkpoint.manager import Report
from arriero.data.order.ledger import Stretch, begin_ledger, write_ledger
from arriero.events import EVENTS, EventLog
from arriero.train.interrupt import Interrupted
from arriero.train.metrics import StepMetrics

if TYPE_CHECKING:
    from arriero.train.outcome import Outcome
    from arriero.train.session import Session


class Hook:
    """Override what you need. Hooks are called in the order they are listed; none knows of the others."""

    def on_start(self, session: "Session") -> None: ...

    def on_step(self, session: "Session", step: int, tokens: int) -> None: ...

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None: ...

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None: ...

    def on_save(self, session: "Session", report: Report) -> None: ...

    def on_end(self, session: "Session", outcome: "Outcome") -> None: ...

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None: ...


class Hooks(Hook):
    """All hooks of a run as one."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks

    def on_start(self, session: "Session") -> None:
        for hook in self._hooks:
            hook.on_start(session)

    def on_step(self, session: "Session", step: int, tokens: int) -> None:
        for hook in self._hooks:
            hook.on_step(session, step, tokens)

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        for hook in self._hooks:
            hook.on_metrics(session, metrics)

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        for hook in self._hooks:
            hook.on_evaluation(session, step, tokens, loss)

    def on_save(self, session: "Session", report: Report) -> None:
        for hook in self._hooks:
            hook.on_save(session, report)

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        for hook in self._hooks:
            hook.on_end(session, outcome)

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        """A hook that fails here must not keep the others from hearing of the fault."""
        for hook in self._hooks:
            try:
                hook.on_fault(session, step, error)
            except Exception as second:
                error.add_note(f"{type(hook).__name__} failed too: {second}")


class MetricsFile(Hook):
    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        with (session.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics.line()) + "\n")


class LedgerFile(Hook):
    """What data the run has consumed, up to date at every logged step. All ranks keep it together.

    `checkpoint` is what the run goes on from.
    """

    def __init__(self, checkpoint: Path | None = None) -> None:
        self._checkpoint = checkpoint

    def on_start(self, session: "Session") -> None:
        if session.mesh.world.leads:
            sequences = session.timeline.phases[0].sequences
            self._begun = begin_ledger(session.run_dir, session.stream, sequences, self._checkpoint)
        self.write(session)

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        self.write(session)

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self.write(session)

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        if session.mesh.world.size == 1:
            self.write(session)

    def write(self, session: "Session") -> bytes:
        """What was written, on the first rank."""
        stretch = _read_by_all(session)
        if not session.mesh.world.leads:
            return b""
        return write_ledger(session.run_dir, session.stream, self._begun.with_stretch(stretch))


def _read_by_all(session: "Session") -> Stretch:
    """Checksums and counts add up over ranks that read different sequences."""
    own = session.loader.read()
    wrapped = own.checksum - (1 << 64) if own.checksum >= 1 << 63 else own.checksum
    sums = torch.tensor([wrapped, own.real_tokens, own.slots])
    if not session.mesh.speaks_for_sequences:
        sums.zero_()
    checksum, real_tokens, slots = session.mesh.total(sums, "loss").tolist()
    return Stretch(own.first, own.end, checksum % (1 << 64), real_tokens, slots)


class EventsFile(Hook):
    def __init__(self, run_dir: Path) -> None:
        self._events = EventLog(run_dir / EVENTS)

    def on_start(self, session: "Session") -> None:
        self._events.write("start", **session.describe())
        for remark in session.remarks:
            self._events.write("remark", text=remark)

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        self._events.write("evaluation", step=step, tokens=tokens, eval_loss=loss)

    def on_save(self, session: "Session", report: Report) -> None:
        fields = {name: value for name, value in asdict(report).items() if name != "error" or value}
        self._events.write("save" if report.error is None else "save failed", **fields)

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self._events.write("end", **outcome.describe())

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        if isinstance(error, Interrupted):
            self._events.write("signal", step=step, signal=error.name)
        else:
            self._events.write("fault", step=step, error=type(error).__name__, message=str(error))


class TensorBoard(Hook):
    def __init__(self, run_dir: Path) -> None:
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def on_metrics(self, session: "Session", metrics: StepMetrics) -> None:
        for name, value in metrics.line().items():
            if value is not None and name not in ("step", "eval_loss"):
                self._writer.add_scalar(name, value, metrics.step)

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        self._writer.add_scalar("eval_loss", loss, step)

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self._writer.close()

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        self._writer.close()
