"""The run directory: whose it is, and what is written at its start."""

from pathlib import Path

from arriero.config.load import config_from_toml
from arriero.config.schema import RunConfig
from arriero.config.toml import to_toml
from arriero.errors import UserError


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
    if changed := _differences(config_from_toml(directory / "run.toml"), config):
        raise UserError(
            f"{directory} already holds a different run ({'; '.join(changed)})",
            "choose another name with --set run.name=NAME, or remove that directory",
        )


def open_run_directory(config: RunConfig) -> Path:
    directory = run_directory(config)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "run.toml").write_text(to_toml(config))
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written ({error})", "set run.dir to a directory you may write"
        ) from None
    return directory


def _differences(there: RunConfig, here: RunConfig) -> list[str]:
    changed = []
    for section in RunConfig.model_fields:
        old, new = getattr(there, section), getattr(here, section)
        for name in type(new).model_fields:
            if getattr(old, name) != getattr(new, name):
                changed.append(f"{section}.{name} was {getattr(old, name)}, is {getattr(new, name)}")
    return changed
