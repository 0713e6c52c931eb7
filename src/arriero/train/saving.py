"""When a run saves, and what: the one place where training meets its checkpoints."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from arriero.checkpoint.manager import Checkpoints, Report, Unit
from arriero.checkpoint.manifest import File, Manifest
from arriero.checkpoint.pieces import pieces_of
from arriero.checkpoint.state import Described, flat
from arriero.config.toml import to_toml
from arriero.data.order.ledger import LEDGER
from arriero.data.tokens.tokenizer import read_definition
from arriero.errors import UserError
from arriero.interrupt import Interrupted, Requests
from arriero.parallel.mesh import Mesh
from arriero.train.cadence import Cadence
from arriero.train.metrics import LedgerFile
from arriero.train.outcome import Outcome

if TYPE_CHECKING:
    from arriero.train.session import Session

SAVE_NOW = "save-now"
STATE = "state.json"
TOKENIZER = "tokenizer.json"


class Saver:
    """Asked after each step. `tensors` describes those of the whole run, over all stages of a pipeline."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        cadence: Cadence,
        at_end: bool,
        ledger: LedgerFile,
        tensors: Described,
        saved_step: int,
    ) -> None:
        self.requests = Requests()
        self._checkpoints, self._cadence, self._at_end = checkpoints, cadence, at_end
        self._ledger, self._tensors = ledger, tensors
        self._saved_step = saved_step
        self._stop = 0
        self._asked: tuple[torch.Tensor, dist.Work] | None = None
        self._failed: list[Report] = []

    def begin(self, now: float) -> None:
        self._cadence.restart(now)

    def due(self, session: "Session", outcome: Outcome, now: float, done: bool) -> bool:
        """All ranks come to the same answer."""
        self._tell(session)
        asked, self._stop = self._agreed(session, done)
        wanted = asked or self._stop or session.is_due(self._cadence, outcome, now) or (done and self._at_end)
        return bool(wanted) and outcome.steps != self._saved_step

    def save(self, session: "Session", outcome: Outcome, now: float) -> float:
        """Returns the seconds training waited."""
        start = time.perf_counter()
        outcome.seconds = now
        ledger = self._ledger.write(session)
        unit = Unit(
            outcome.steps,
            pieces_of(flat(session.optimizer.weights(), session.optimizer.state())),
            _files(session, outcome, ledger) if session.mesh.world.leads else {},
            partial(_manifest, session, outcome.steps, outcome.tokens, self._tensors),
        )
        self._checkpoints.save(unit)
        self._saved_step = outcome.steps
        self._cadence.restart(session.seconds_since(time.monotonic() - now))
        return time.perf_counter() - start

    def stop_if_told(self, session: "Session") -> None:
        if self._stop:
            self.wait(session)
            raise Interrupted(self._stop)

    def wait(self, session: "Session") -> None:
        """Until the last save is on the disk, or is known not to be."""
        self._checkpoints.wait()
        self._tell(session)

    def refuse_silence(self) -> None:
        """A run in which a save failed does not end as if none had."""
        if self._failed:
            steps = ", ".join(str(report.step) for report in self._failed)
            raise UserError(
                f"training continued, but the checkpoint of step {steps} could not be saved "
                f"({self._failed[-1].error})",
                "fix the cause; the run resumes from the newest one listed by `arriero ckpt list`",
            )

    def _tell(self, session: "Session") -> None:
        for report in self._checkpoints.reports():
            if report.error is not None:
                self._failed.append(report)
            session.hooks.on_save(session, report)

    def _agreed(self, session: "Session", done: bool) -> tuple[bool, int]:
        """What any rank was asked for; with several ranks a step ago, so that none waits for the others."""
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
            self._asked = asked, _required(dist.all_reduce(asked, dist.ReduceOp.MAX, async_op=True))
        return bool(found[0]), found[1]

    def _asked_to_save(self, session: "Session") -> bool:
        asked, self.requests.save = self.requests.save, False
        # not Path.exists, which raises what the file system reports at this moment
        if session.mesh.world.leads and os.path.lexists(session.run_dir / SAVE_NOW):
            (session.run_dir / SAVE_NOW).unlink(missing_ok=True)
            asked = True
        return asked


def _required(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def _files(session: "Session", outcome: Outcome, ledger: bytes) -> dict[str, bytes]:
    """Nothing random is among them: weights, data order and rounding are functions of seed and step."""
    state = outcome.remembered() | {
        "data": session.loader.state(),
        "token_ids": session.separators.token_ids(),
    }
    return {
        STATE: (json.dumps(state, indent=1) + "\n").encode(),
        "run.toml": to_toml(session.config).encode(),
        LEDGER: ledger,
        TOKENIZER: read_definition(session.tokenizer.path).encode(),
    }


def _manifest(
    session: "Session", step: int, tokens: int, tensors: Described, files: Mapping[str, File]
) -> Manifest:
    return Manifest(
        step=step,
        tokens=tokens,
        time=time.time(),
        layout=asdict(session.mesh.layout),
        versions=session.describe()["versions"],
        tokenizer=session.tokenizer.sha256,
        tensors=tensors,
        files=files,
    )


def everywhere(mesh: Mesh, held: dict[str, Any]) -> dict[str, Any]:
    """What the stages of a pipeline hold, together; each rank asks along its own pipeline."""
    if (pipeline := mesh.group("pp")) is None:
        return held
    told: list[Any] = [None] * mesh.layout.pp
    dist.all_gather_object(told, held, group=pipeline)
    return {name: value for each in told for name, value in each.items()}


def read_state(directory: Path) -> dict[str, Any]:
    return json.loads((directory / STATE).read_bytes())
