"""The run directory: whose it is, and what is written at its start."""

from pathlib import Path

from arriero.config.load import config_from_toml
from arriero.config.schema import RunConfig
from arriero.config.toml import to_toml, toml_value
from arriero.errors import UserError

_PLACES = ("run.dir", "run.device", "data.cache")


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
    """Keys that decide what is trained; where things lie and what is observed may change."""
    changed = []
    for section in RunConfig.model_fields:
        old, new = (getattr(config, section).model_dump(mode="json") for config in (there, here))
        for name in new:
            key = f"{section}.{name}"
            if section != "observe" and key not in _PLACES and old[name] != new[name]:
                changed.append(f"{key} was {toml_value(old[name])}, is {toml_value(new[name])}")
    return changed
