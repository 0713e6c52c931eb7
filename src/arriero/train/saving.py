"""When a run saves, what it saves, and the results that outlive a restart."""

import json
import math
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from arriero.checkpoint.directory import File, Manifest
from arriero.checkpoint.manager import Checkpoints, SaveReport, SaveRequest
from arriero.checkpoint.state import TensorInfo, local_parts, named_tensors
from arriero.config.fields import to_toml
from arriero.data.order.ledger import LEDGER
from arriero.data.tokens.tokenizer import chat_template_beside, read_definition
from arriero.errors import UserError
from arriero.interrupt import Interrupted, Requests
from arriero.model.speculator.settings import BASE_FILE
from arriero.parallel.mesh import Mesh
from arriero.train.metrics import LedgerFile
from arriero.train.schedule import Cadence

if TYPE_CHECKING:
    from arriero.train.session import Session

SAVE_NOW = "save-now"
STATE = "state.json"
TOKENIZER = "tokenizer.json"


@dataclass
class Outcome:
    """What a run has reached. `seconds` include earlier processes whose training was saved; `joules` also
    steps that were lost or rolled back. `joules` is None if a device has no meter."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    joules: float | None = None
    model: Path | None = None
    rates: list[float] = field(default_factory=list)

    def add(self, loss: float, tokens_per_s: float) -> None:
        """Record a logged step; the loss of a skipped update may not be finite and is ignored."""
        self.rates.append(tokens_per_s)
        if math.isfinite(loss):
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss = loss

    @property
    def has_trained(self) -> bool:
        return bool(self.rates)

    @property
    def tokens_per_s(self) -> float:
        """Return the median of the logged rates, without the first step, which compiles."""
        return statistics.median(self.rates[1:] or self.rates)

    def describe(self) -> dict[str, Any]:
        model = self.model and str(self.model)
        return self.to_state() | {"tokens_per_s": self.tokens_per_s, "model": model}

    def to_state(self) -> dict[str, Any]:
        """Return what a checkpoint stores of it."""
        return {name: value for name, value in vars(self).items() if name not in ("model", "rates")}

    @staticmethod
    def from_state(state: dict[str, Any]) -> "Outcome":
        """Read what a checkpoint stores; older ones have no joules."""
        state = {"joules": None, **state}
        return Outcome(**{name: state[name] for name in Outcome().to_state()})


def read_state(directory: Path) -> dict[str, Any]:
    return json.loads((directory / STATE).read_bytes())


class Saver:
    """Decides after each step whether to save. `tensors` describes those of all pipeline stages."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        cadence: Cadence,
        at_end: bool,
        ledger: LedgerFile,
        tensors: TensorInfo,
        saved_step: int,
        usr1_stops: bool = False,
    ) -> None:
        self.requests = Requests(usr1_stops=usr1_stops)
        self._checkpoints, self._cadence, self._at_end = checkpoints, cadence, at_end
        self._ledger, self._tensors = ledger, tensors
        self._saved_step = saved_step
        self._stop = 0
        self._asked: tuple[torch.Tensor, dist.Work] | None = None
        self._failed: list[SaveReport] = []

    def begin(self, now: float) -> None:
        self._cadence.restart(now)

    def is_due(self, session: "Session", outcome: Outcome, now: float, done: bool) -> bool:
        """Return whether to save after this step; the same on all ranks."""
        self._report_saves(session)
        asked, self._stop = self._agree(session, done)
        wanted = asked or self._stop or session.is_due(self._cadence, outcome, now) or (done and self._at_end)
        return bool(wanted) and outcome.steps != self._saved_step

    def save(self, session: "Session", outcome: Outcome, now: float) -> float:
        """Save a checkpoint, in the background if so configured; return the seconds training waited."""
        start = time.perf_counter()
        outcome.seconds = now
        ledger = self._ledger.write(session)
        unit = SaveRequest(
            outcome.steps,
            local_parts(named_tensors(session.model.stored(), session.optimizer.state())),
            _files(session, outcome, ledger) if session.mesh.world.is_leader else {},
            partial(_manifest, session, outcome.steps, outcome.tokens, self._tensors),
        )
        self._checkpoints.save(unit)
        self._saved_step = outcome.steps
        self._cadence.restart(session.seconds_since(time.monotonic() - now))
        return time.perf_counter() - start

    def roll_back(self, session: "Session", step: int, sample: int) -> None:
        """Continue at the sample of an earlier checkpoint; the ledger keeps what was read since."""
        self._ledger.end_stretch(session)
        session.data.loader.seek(sample)
        self._ledger.publish(session)
        self._saved_step = step

    def raise_if_interrupted(self, session: "Session") -> None:
        """End the run if a rank was asked to stop; the checkpoint is on the disk by then."""
        if self._stop:
            self.wait(session)
            lost = any(report.step == self._saved_step for report in self._failed)
            raise Interrupted(self._stop, saved=not lost)

    def wait(self, session: "Session") -> None:
        """Wait until the last save is on the disk or has failed."""
        self._checkpoints.wait()
        self._report_saves(session)

    def raise_if_save_failed(self) -> None:
        if self._failed:
            steps = ", ".join(str(report.step) for report in self._failed)
            raise UserError(
                f"training continued, but the checkpoint of step {steps} could not be saved "
                f"({self._failed[-1].error})",
                "fix the cause; the run resumes from the newest one listed by `arriero ckpt list`",
            )

    def _report_saves(self, session: "Session") -> None:
        for report in self._checkpoints.reports():
            if report.error is not None:
                self._failed.append(report)
            session.record.hooks.on_save(session, report)

    def _agree(self, session: "Session", done: bool) -> tuple[bool, int]:
        """Return whether any rank was asked to save, and the signal by which any was asked to stop.

        With several ranks the answer is one step old, so that no rank waits for the others.
        """
        mine = [int(self._asked_to_save(session)), self.requests.stop]
        if session.mesh.world.size == 1:
            return bool(mine[0]), mine[1]
        found = [0, 0]
        if self._asked is not None:
            self._asked[1].wait()
            found = self._asked[0].tolist()
            self._asked = None
        found[1] = found[1] or self.requests.agreed
        if not done and not found[1]:
            asked = torch.tensor(mine)
            work = dist.all_reduce(asked, dist.ReduceOp.MAX, async_op=True)
            assert work is not None
            self._asked = asked, work
        return bool(found[0]), found[1]

    def _asked_to_save(self, session: "Session") -> bool:
        asked, self.requests.save = self.requests.save, False
        # Path.exists would raise a transient error of the file system
        if session.mesh.world.is_leader and os.path.lexists(session.run_dir / SAVE_NOW):
            (session.run_dir / SAVE_NOW).unlink(missing_ok=True)
            asked = True
        return asked


def _files(session: "Session", outcome: Outcome, ledger: bytes) -> dict[str, bytes]:
    """Return the small files of a checkpoint.

    No random state is needed: weights, data order and rounding are functions of seed and step.
    """
    state = outcome.to_state() | {
        "data": session.data.loader.state(),
        "token_ids": session.data.separators.token_ids(),
        "guard": session.guard.state(),
    }
    return {
        STATE: (json.dumps(state, indent=1) + "\n").encode(),
        "run.toml": to_toml(session.config).encode(),
        LEDGER: ledger,
        TOKENIZER: read_definition(session.data.tokenizer.path).encode(),
        **({BASE_FILE: json.dumps(session.model.base).encode()} if session.model.base else {}),
        **{each.name: each.read_bytes() for each in chat_template_beside(session.data.tokenizer.path)},
    }


def _manifest(
    session: "Session", step: int, tokens: int, tensors: TensorInfo, files: Mapping[str, File]
) -> Manifest:
    return Manifest(
        step=step,
        tokens=tokens,
        time=time.time(),
        layout=asdict(session.mesh.layout),
        versions=session.describe()["versions"],
        tokenizer=session.data.tokenizer.sha256,
        tensors=tensors,
        files=files,
    )


def merge_over_stages(mesh: Mesh, own: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of all pipeline stages; each rank gathers along its own pipeline."""
    if (pipeline := mesh.group("pp")) is None:
        return own
    gathered: list[Any] = [None] * mesh.layout.pp
    dist.all_gather_object(gathered, own, group=pipeline)
    return {name: value for each in gathered for name, value in each.items()}
