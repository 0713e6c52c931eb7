"""Experiment trackers: Weights & Biases, MLflow and Aim receive what TensorBoard files hold.

A resumed run continues its tracked run, whose id is stored in the run directory. Where the data goes is
decided by the settings and environment variables of each tracker.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Protocol

from arriero.config.fields import flat
from arriero.errors import UserError
from arriero.events import warn
from arriero.files import publish_file
from arriero.interrupt import Interrupted
from arriero.train.hooks import Hook
from arriero.train.metrics import evaluation_scalars

if TYPE_CHECKING:
    from arriero.train.metrics import StepMetrics
    from arriero.train.saving import Outcome
    from arriero.train.session import Session

IDS = "trackers.json"
_PROJECT = "arriero"
WAITING, PATIENCE_S = 10_000, 30
_storing = Lock()


class Service(Protocol):
    """A tracked run of one service. `id` continues it."""

    id: str

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self, status: str) -> None:
        """`status` is 'finished', 'stopped' or 'failed'."""


class _Wandb:
    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any], known: str | None) -> None:
        import wandb

        self.id = known or secrets.token_hex(8)
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        self._run = wandb.init(
            project=project,
            name=name,
            id=self.id,
            resume="allow",
            dir=run_dir,
            config=dict(settings),
            # the terminal and the log of a rank are Arriero's
            settings=wandb.Settings(console="off", quiet=True),
        )
        # steps that a restart repeats are appended; by wandb's own steps they would be dropped
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))


class _MLflow:
    _STATUS: Mapping[str, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any], known: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        local = f"sqlite:///{run_dir.parent.resolve() / 'mlflow.db'}"
        where = os.environ.get("MLFLOW_TRACKING_URI") or local
        self._client = MlflowClient(tracking_uri=where)
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self.id = known
            return
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        self.id = self._client.create_run(experiment, run_name=name).info.run_id
        every = [Param(key, str(value)[:500]) for key, value in flat(settings).items()]
        for first in range(0, len(every), 100):
            self._client.log_batch(self.id, params=every[first : first + 100])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        named = [self._metric(key, float(value), now, step) for key, value in scalars.items()]
        self._client.log_batch(self.id, metrics=named)

    def close(self, status: str) -> None:
        self._client.set_terminated(self.id, self._STATUS[status])


class _Aim:
    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any], known: str | None) -> None:
        import aim

        repo = os.environ.get("AIM_REPO", str(run_dir.parent.resolve()))
        quiet = {"system_tracking_interval": None, "log_system_params": False}
        self._run = aim.Run(run_hash=known, repo=repo, experiment=_PROJECT, **quiet)
        self.id = self._run.hash
        if known is None:
            self._run.name = name
            self._run["settings"] = dict(settings)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for key, value in scalars.items():
            self._run.track(value, name=key, step=step)

    def close(self, status: str) -> None:
        self._run["status"] = status
        self._run.close()


_SERVICES: Mapping[str, Callable[[str, Path, Mapping[str, Any], str | None], Service]] = {
    "wandb": _Wandb,
    "mlflow": _MLflow,
    "aim": _Aim,
}


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise UserError if the package of a tracker is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        todo = f"pip install 'arriero[{','.join(missing)}]', or remove it from observe.trackers"
        raise UserError(f"observe.trackers needs the package {' and '.join(missing)}", todo)


class Tracker(Hook):
    """Sends metrics and validation losses to one service from a thread of its own.

    If the service fails or does not answer, training continues without it.
    """

    def __init__(self, name: str, run_dir: Path) -> None:
        self._name, self._run_dir = name, run_dir
        self._waiting: Queue[tuple[int, Mapping[str, float]] | str] = Queue(WAITING)
        self._thread: Thread | None = None

    def on_start(self, session: "Session") -> None:
        settings = session.config.model_dump(mode="json", exclude_none=True)
        about = session.describe()
        settings |= {key: about[key] for key in ("device", "ranks", "layout", "parameters", "versions")}
        # plain types: the version of torch is a subclass of str
        settings = json.loads(json.dumps(settings))
        path = self._run_dir / IDS

        def ids() -> dict[str, str]:
            return json.loads(path.read_bytes()) if path.is_file() else {}

        def serve() -> None:
            known = ids().get(self._name)
            service = _SERVICES[self._name](session.config.run.name, self._run_dir, settings, known)
            with _storing:
                publish_file(path, json.dumps(ids() | {self._name: service.id}).encode())
            while not isinstance(item := self._waiting.get(), str):
                service.log(*item)
            service.close(item)

        def start() -> None:
            # not in the thread: two threads that import the same packages can break each other's imports
            import_module(self._name)
            self._thread = Thread(target=self._attempt, args=(serve,), name=self._name, daemon=True)
            self._thread.start()

        self._attempt(start)

    def on_metrics(self, session: "Session", metrics: "StepMetrics") -> None:
        self._send((metrics.step, metrics.scalars()))

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        self._send((step, evaluation_scalars(session, loss)))

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self._close("finished")

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        self._close("stopped" if isinstance(error, Interrupted) else "failed")

    def _send(self, item: tuple[int, Mapping[str, float]] | str) -> None:
        if self._thread is not None and self._thread.is_alive():
            try:
                self._waiting.put_nowait(item)
            except Full:
                self._give_up()

    def _close(self, status: str) -> None:
        self._send(status)
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
            if self._thread.is_alive():
                self._give_up()
        self._thread = None

    def _give_up(self) -> None:
        warn(f"{self._name} does not answer; it does not receive the last metrics")
        self._thread = None

    def _attempt(self, work: Callable[[], object]) -> None:
        """Report any error of a service, whose kinds are not known here."""
        try:
            work()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warn(f"{self._name} cannot be used ({why}); training continues without it")
