"""plan.json of a run: the layout with its predicted time and memory, and what was measured."""

import json
import statistics
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.events import TolerantWriter
from arriero.files import publish_file
from arriero.plan.auto import prediction
from arriero.train.hooks import Hook

if TYPE_CHECKING:
    from arriero.train.metrics import StepMetrics
    from arriero.train.saving import Outcome
    from arriero.train.session import Session

PLAN = "plan.json"


class PlanFile(Hook):
    """Write the prediction when a run starts, and the measurement beside it when it ends.

    The first logged step is left out: it includes compilation and warm-up.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = TolerantWriter(run_dir / PLAN)
        self._facts: dict[str, Any] = {}
        self._step_s: deque[float] = deque(maxlen=1000)
        self._peak_gib = 0.0
        self._lines = 0

    def on_start(self, session: "Session") -> None:
        resolved = session.resolved
        self._facts = {
            "schema_version": 1,
            "layout": asdict(resolved.layout),
            "schedule": resolved.config.parallel.schedule if resolved.layout.pp > 1 else None,
            "micro_batch": resolved.micro_batch,
            "gradient_accumulation": resolved.shares[0].gradient_accumulation,
            "activation_checkpointing": str(resolved.activation_checkpointing),
            "decisions": [asdict(each) for each in resolved.decisions],
            "predicted": prediction(resolved),
            "measured": None,
        }
        self._write()

    def on_metrics(self, session: "Session", metrics: "StepMetrics") -> None:
        self._peak_gib = max(self._peak_gib, metrics.peak_mem_gib)
        if self._lines:
            self._step_s.append(metrics.step_s)
        self._lines += 1

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        if self._facts and self._step_s:
            self._facts["measured"] = {
                "step_s": statistics.median(self._step_s),
                "memory_bytes": round(self._peak_gib * 2**30),
            }
            self._write()

    def _write(self) -> None:
        content = (json.dumps(self._facts, indent=1) + "\n").encode()
        self._file.attempt(lambda: publish_file(self._file.path, content), "without it")


def predicted_and_measured(run_dir: Path) -> list[tuple[str, str, str]]:
    """Return rows of the summary that compare the prediction with the measurement; none without both."""
    rows = []
    shown = [("step", "step_s", 1.0, "s"), ("memory", "memory_bytes", 2**30, "GiB")]
    # a file that is missing or damaged, or the plan of a run that has not ended
    with suppress(OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        facts = json.loads((run_dir / PLAN).read_bytes())
        predicted, measured = facts["predicted"], facts["measured"]
        # the memory of a process on a CPU includes torch itself
        for name, key, scale, unit in shown[: 1 if predicted["cluster"] == "cpu" else 2]:
            there, here = predicted[key] / scale, measured[key] / scale
            error = f"predicted {there:.3g} {unit}, {there / here - 1:+.0%}"
            rows.append((name, f"{here:.3g} {unit}", error))
    return rows
