"""The run directory: whose it is, and what is written at its start."""

from pathlib import Path

from arriero.config.load import config_from_toml
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline
from arriero.config.toml import to_toml, toml_value
from arriero.data.order.ledger import LEDGER, read_ledger
from arriero.errors import UserError
from arriero.train.schedule import Rates

_FREE_SECTIONS = ("parallel", "memory", "checkpoint", "observe", "schedule")
_FREE = (
    "run.name",
    "run.dir",
    "run.device",
    "data.cache",
    "data.open_shards",
    "data.reader_threads",
    "data.phases",
    "train.micro_batch",
    "train.horizon",
    "precision.compile",
    "precision.kernels",
    "eval.every",
)


def run_directory(config: RunConfig) -> Path:
    return Path(config.run.dir) / config.run.name


def refuse_foreign(config: RunConfig) -> None:
    """A directory may be new, empty, or hold this very run; anything else is somebody's work."""
    directory = run_directory(config)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a directory", "choose another run with --set run.name=NAME")
    if not directory.exists() or not any(directory.iterdir()):
        return
    if not (directory / "run.toml").exists():
        raise UserError(f"{directory} holds files but no run", "choose another run with --set run.name=NAME")
    try:
        there = config_from_toml(directory / "run.toml")
    except UserError as error:
        raise UserError(
            f"{directory} holds a run this version cannot read ({error})",
            "choose another run with --set run.name=NAME",
        ) from None
    if changed := _differences(there, config):
        raise UserError(
            f"{directory} already holds a different run ({'; '.join(changed)})",
            "choose another name with --set run.name=NAME, or remove that directory",
        )
    if (directory / LEDGER).exists():
        steps = Timeline.of(there).steps_before(read_ledger(directory).samples)
        refuse_other_phases(there, config, steps)
        refuse_other_rates(there, config, steps)


def starts_over(config: RunConfig) -> bool:
    """Whether checkpoint.start_over is still to be applied.

    The stored run file tells: a job that is started again with the same one must not lose its progress.
    """
    path = run_directory(config) / "run.toml"
    return config.checkpoint.start_over and path.exists() and not config_from_toml(path).checkpoint.start_over


def open_run_directory(config: RunConfig) -> Path:
    directory = run_directory(config)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "run.toml").write_text(to_toml(config), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written ({error})", "set run.dir to a directory you may write"
        ) from None
    return directory


def _differences(there: RunConfig, here: RunConfig) -> list[str]:
    """Keys that decide what is trained. Later phases are judged by the ledger, schedules by what they did."""
    changed = []
    for section in RunConfig.model_fields:
        old, new = (getattr(config, section).model_dump(mode="json") for config in (there, here))
        for name in new:
            key = f"{section}.{name}"
            if section not in _FREE_SECTIONS and key not in _FREE and old[name] != new[name]:
                changed.append(f"{key} was {toml_value(old[name])}, is {toml_value(new[name])}")
    return changed


def refuse_other_phases(there: RunConfig, here: RunConfig, steps: int) -> None:
    """Batch, sequence length and learning rate of steps that were taken cannot change; later ones may."""
    old, new = (Timeline.of(config).until(steps) for config in (there, here))
    if old != new:
        raise UserError(
            f"{run_directory(here)} has taken {steps} steps, and data.phases changes the batch, "
            "sequence length or learning rate of some of them",
            f"let new phases begin at '{steps} steps' or later, or choose another run.name",
        )


def refuse_other_rates(there: RunConfig, here: RunConfig, steps: int) -> None:
    """A run may be lengthened, and its schedule change, where the steps it took had the same rates."""
    old, new = Rates(there), Rates(here)
    for step in range(0 if old.same_shape(new) else steps):
        if (was := old.share(step)) != (now := new.share(step)):
            keep = there.schedule.horizon or there.train.horizon
            raise UserError(
                f"step {step + 1} of {run_directory(here)} had {was:.4g} of the peak learning rate, and "
                f"would have {now:.4g} with this train.horizon and [schedule]",
                f"keep the shape with --set schedule.horizon='{keep}', or choose another run.name",
            )
