"""The run directory: its lock, its run file, and whether a run may use it."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from arriero.config.fields import ActivationCheckpointing, to_toml, toml_value
from arriero.config.load import config_from_toml
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline
from arriero.data.order.ledger import LEDGER, read_ledger
from arriero.errors import UserError
from arriero.events import EVENTS
from arriero.files import locked, publish_file
from arriero.model.speculator.settings import KEPT
from arriero.plan.arithmetic import open_keys, value_of
from arriero.train.schedule import LearningRates

_RUN_FILE = "run.toml"
# derived settings that decide the order of sums, which a resumed run keeps
_SETTINGS = "settings.json"
# keys that a new run may change when it starts from a checkpoint of another run
_FORKABLE = (
    "optim.lr",
    "optim.betas",
    "optim.eps",
    "optim.weight_decay",
    "optim.groups",
    "optim.clip",
    "train.z_loss",
)
_FREE_SECTIONS = ("parallel", "memory", "checkpoint", "observe", "schedule", "guard")
_FREE = (
    "run.name",
    "run.dir",
    "run.device",
    "data.cache",
    "data.open_shards",
    "data.reader_threads",
    "data.phases",
    "train.micro_batch",
    "train.gc_every",
    "train.horizon",
    "optim.max_skips",
    "precision.compile",
    "precision.kernels",
    "eval.every",
)


# a killed run may need a moment to disappear
LOCK_WAIT_S = 3.0
# an NFSv4 server keeps the lock of a node that died for the length of a lease, 90 s by default
LOCK_LEASE_S = 95.0


def run_directory(config: RunConfig) -> Path:
    return Path(config.run.dir) / config.run.name


def lock_of(directory: Path) -> Path:
    """Return the lock file of a run directory, which a running run holds."""
    return directory.with_name(f".{directory.name}.lock")


def lock_run(config: RunConfig) -> AbstractContextManager[bool]:
    """Lock the run directory, which need not exist yet: two runs would delete each other's checkpoints."""
    directory = run_directory(config)
    return locked(
        lock_of(directory),
        directory,
        busy="wait for it or stop it, or choose another run with --set run.name=NAME",
        unwritable="set run.dir to a directory you may write",
        wait_s=LOCK_WAIT_S,
        lease_s=LOCK_LEASE_S,
    )


def check_run_directory(config: RunConfig) -> None:
    """Raise UserError unless the directory is new, empty, or holds this run with compatible settings."""
    directory = run_directory(config)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a directory", "choose another run with --set run.name=NAME")
    # a kill may have left the run file under its temporary name; a supervisor writes before the run starts
    early = (f"{_RUN_FILE}.tmp", EVENTS, "preflight", "logs", KEPT)
    if not directory.exists() or all(path.name in early for path in directory.iterdir()):
        return
    if not (directory / _RUN_FILE).exists():
        raise UserError(f"{directory} holds files but no run", "choose another run with --set run.name=NAME")
    try:
        there = config_from_toml(directory / _RUN_FILE)
    except UserError as error:
        raise UserError(
            f"{directory} holds a run this version cannot read ({error})",
            "choose another run with --set run.name=NAME",
        ) from None
    if changed := _differences(there, config):
        what = "; ".join(f"{key} was {old}, is {new}" for key, (old, new) in changed.items())
        todo = "choose another name with --set run.name=NAME"
        if all(key in _FORKABLE for key in changed):
            todo = (
                "to continue from its newest checkpoint with the new values, make a new run: "
                f"--set run.name=NAME --set checkpoint.resume_from={directory}"
            )
        raise UserError(f"{directory} already holds a different run ({what})", todo)
    if (directory / LEDGER).exists():
        steps = Timeline.of(there).steps_before(read_ledger(directory).samples)
        check_phases(there, config, steps)
        check_learning_rates(there, config, steps)


def starts_over(config: RunConfig) -> bool:
    """Whether checkpoint.start_over is still to be applied.

    It is applied once: a job that is restarted with the same run file must keep its progress.
    """
    path = run_directory(config) / _RUN_FILE
    return config.checkpoint.start_over and path.exists() and not config_from_toml(path).checkpoint.start_over


def open_run_directory(config: RunConfig) -> Path:
    """Create the directory and write the run file atomically, unless it is there already."""
    directory = run_directory(config)
    path, content = directory / _RUN_FILE, to_toml(config).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            publish_file(path, content)
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written ({error})", "set run.dir to a directory you may write"
        ) from None
    return directory


def write_settings(config: RunConfig, settings: Mapping[str, Any]) -> None:
    """Store the derived settings of a run, for `started_with`."""
    publish_file(run_directory(config) / _SETTINGS, (json.dumps(settings, indent=1) + "\n").encode())


def started_with(config: RunConfig) -> dict[str, Any]:
    """Return the derived settings that a run was started with; none for a new run."""
    path, written = run_directory(config) / _SETTINGS, run_directory(config) / _RUN_FILE
    chosen = {}
    if written.exists() and (keys := open_keys(config)):
        there = config_from_toml(written)
        chosen = {key: value for key in keys if (value := value_of(there, key)) != "auto"}
    if not path.exists():
        return chosen
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        ActivationCheckpointing.parse(stored["memory.activation_checkpointing"])
        counts = [*stored["train.micro_batch"], int(stored["memory.loss_chunk"] or 1)]
        if stored["parallel.sync"] not in ("last", "each") or not all(count > 0 for count in counts):
            raise ValueError("a value is out of range")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"{path} is damaged ({type(error).__name__}: {error})"
        raise UserError(what, "delete it: the settings are derived again") from None
    return stored | chosen


def _differences(there: RunConfig, here: RunConfig) -> dict[str, tuple[str, str]]:
    """Return old and new values of the keys that decide what is trained.

    Phases and schedules are not among them: `check_phases` and `check_learning_rates` compare them.
    """
    changed, chosen_before = {}, open_keys(here)
    for section in RunConfig.model_fields:
        old, new = (getattr(config, section).model_dump(mode="json") for config in (there, here))
        for name in new:
            key = f"{section}.{name}"
            # an open key keeps the value that the run file has
            same = new[name] == old[name] or key in chosen_before
            if section not in _FREE_SECTIONS and key not in _FREE and not same:
                changed[key] = toml_value(old[name]), toml_value(new[name])
    return changed


def check_phases(there: RunConfig, here: RunConfig, steps: int) -> None:
    """Raise UserError if batch, sequence length or learning rate of steps already taken would change."""
    old, new = (Timeline.of(config).until(steps) for config in (there, here))
    if old != new:
        raise UserError(
            f"{run_directory(here)} has taken {steps} steps, and data.phases changes the batch, "
            "sequence length or learning rate of some of them",
            f"let new phases begin at '{steps} steps' or later, or choose another run.name",
        )


def check_learning_rates(there: RunConfig, here: RunConfig, steps: int) -> None:
    """Raise UserError if a new horizon or schedule changes the learning rate of a step already taken."""
    old, new = LearningRates(there), LearningRates(here)
    for step in range(0 if old.has_same_shape(new) else steps):
        if (was := old.fraction(step)) != (now := new.fraction(step)):
            keep = there.schedule.horizon or there.train.horizon
            digits = next(n for n in range(4, 18) if f"{was:.{n}g}" != f"{now:.{n}g}")
            raise UserError(
                f"step {step + 1} of {run_directory(here)} had {was:.{digits}g} of the peak learning rate, "
                f"and would have {now:.{digits}g} with this train.horizon and [schedule]",
                f"keep the shape with --set schedule.horizon='{keep}', or choose another run.name",
            )
