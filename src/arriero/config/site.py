"""Site files: what differs between clusters. launch/sites has shipped ones; site.toml overrides them."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from arriero.errors import UserError, first_problem, nearest

SITE_FILE = "site.toml"
_COMMON = "_common"
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(?:(\d+):)?(\d+)")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _read_time(value: Any) -> Any:
    text = str(value)
    if not _TIME.fullmatch(text) or text.strip("0:-") == "":
        raise ValueError("write a time limit as Slurm does: 24:00:00, 2-00:00:00, or minutes")
    return text


class SlurmPart(_Part):
    """What a job requests."""

    partition: str | None = None
    account: str | None = None
    account_suffix: str = ""
    qos: str | None = None
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    cpus_per_task: Annotated[int, Field(gt=0)] | None = None
    time: Annotated[str, BeforeValidator(_read_time)] = "24:00:00"
    options: tuple[str, ...] = ()


class SoftwarePart(_Part):
    """Modules to load, and shell lines to run before the job starts."""

    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


class ContainerPart(_Part):
    """The container that the ranks run in; without an image they run on the host."""

    runtime: Literal["apptainer", "singularity"] = "apptainer"
    image: str | None = None
    flags: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the words before the command of a rank; none without an image."""
        binds = ["--bind", ",".join(self.binds)] if self.binds else []
        return [self.runtime, "exec", *self.flags, *binds, self.image] if self.image else []


class PathsPart(_Part):
    scratch: str | None = None


class LimitsPart(_Part):
    """Limits of the shell (ulimit)."""

    nofile: Annotated[int, Field(gt=0)] | None = None
    memlock: Literal["unlimited"] | None = None


class Variable(_Part):
    """An environment variable: its value, which may contain $NAME, why it is set, and who says so."""

    value: str | int | Literal[False]
    reason: str = "set in site.toml"
    source: str | None = None


def _read_variables(value: Any) -> Any:
    """A value alone in place of a table."""
    if not isinstance(value, Mapping):
        return value
    return {name: each if isinstance(each, Mapping) else {"value": each} for name, each in value.items()}


class Site(_Part):
    """A cluster as a user sees it. `from_memory` lists keys that no document was found for.

    `checks` are shell commands that every node must pass (exit code 0) before training.
    """

    name: str
    about: str = ""
    cluster: str | None = None
    account_required: bool = True
    from_memory: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    slurm: SlurmPart = SlurmPart()
    software: SoftwarePart = SoftwarePart()
    container: ContainerPart = ContainerPart()
    paths: PathsPart = PathsPart()
    limits: LimitsPart = LimitsPart()
    environment: Annotated[dict[str, Variable], BeforeValidator(_read_variables)] = {}

    @property
    def time_limit_s(self) -> int:
        return seconds_of(self.slurm.time)

    @property
    def account(self) -> str | None:
        """The account of a job; some sites have another one for GPUs."""
        name, suffix = self.slurm.account, self.slurm.account_suffix
        return f"{name.removesuffix(suffix)}{suffix}" if name else None

    def require_account(self) -> None:
        """Raise UserError if a job would be rejected because its account or partition is missing."""
        needed = ("account", "partition") if self.account_required else ()
        missing = [name for name in needed if not getattr(self.slurm, name)]
        if missing:
            lines = ", ".join(f"{name} = 'NAME'" for name in missing)
            options = " ".join(f"--{name} NAME" for name in missing)
            raise UserError(
                f"the site '{self.name}' needs {' and '.join(f'slurm.{name}' for name in missing)}",
                f"write {lines} under [slurm] in {SITE_FILE}, or give {options}",
            )

    def variables(self) -> dict[str, Variable]:
        """Return the variables to set; `value = false` in site.toml removes one."""
        return {name: each for name, each in self.environment.items() if each.value is not False}


def seconds_of(limit: str) -> int:
    """Return the seconds of a time limit as Slurm writes it: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM:SS."""
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, parts[0], parts[1] if len(parts) == 2 else 0
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@cache
def site_names() -> tuple[str, ...]:
    folder = files("arriero.launch").joinpath("sites")
    names = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return tuple(sorted(name for name in names if not name.startswith("_")))


def load_site(name: str | None = None, overrides: Mapping[str, Any] | None = None) -> Site:
    """Return a shipped site, or one from a file, with the values of site.toml and of the command line.

    Lowest first: common values, the shipped site, ~/.config/arriero/site.toml, ./site.toml, `overrides`. A
    site.toml applies to the site that its key `site` names, or to every site without that key. Without `name`
    the first such key decides.
    """
    user_files = [Path.home() / ".config" / "arriero" / SITE_FILE, Path(SITE_FILE)]
    tables = {path: _read(path) for path in user_files if path.is_file()}
    if name is not None and name not in site_names():
        path = Path(name)
        if not path.is_file():
            near = nearest(name, site_names())
            hint = f"did you mean '{near}'? " if near else ""
            raise UserError(
                f"there is no site '{name}'", f"{hint}give a TOML file, or one of {', '.join(site_names())}"
            )
        tables = {path: _read(path)}
        name = None
    base = name or next((table["site"] for table in reversed(tables.values()) if "site" in table), None)
    if base is None and not tables:
        raise UserError(
            "no site is given",
            f"add --site NAME, with one of {', '.join(site_names())}, or write {SITE_FILE}",
        )
    base = base or "generic"
    if base not in site_names():
        raise UserError(
            f"{SITE_FILE} names the unknown site '{base}'", f"use one of {', '.join(site_names())}"
        )
    merged = _merge(_shipped(_COMMON), _shipped(base))
    for path, table in tables.items():
        if table.get("site", base) == base:
            values = {key: value for key, value in table.items() if key != "site"}
            _validated(base, _merge(merged, values), str(path))
            merged = _merge(merged, values)
            own = set(_keys(values))
            merged["from_memory"] = [key for key in merged.get("from_memory", ()) if key not in own]
    return _validated(base, _merge(merged, overrides or {}), "the command line")


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a table and of the tables in it, with dots."""
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def chosen_site(
    name: str | None,
    account: str | None = None,
    partition: str | None = None,
    time: str | None = None,
    options: Sequence[str] = (),
) -> Site:
    """Return the site with the values of the command line."""
    given = {"account": account, "partition": partition, "time": time}
    site = load_site(name, {"slurm": {key: value for key, value in given.items() if value is not None}})
    if not options:
        return site
    words = [option if option.startswith("-") else f"--{option}" for option in options]
    own = site.slurm.model_copy(update={"options": (*site.slurm.options, *words)})
    return site.model_copy(update={"slurm": own})


def _shipped(name: str) -> dict[str, Any]:
    text = files("arriero.launch").joinpath("sites", f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a TOML file: {error}", "correct it, or make it readable") from None


def _validated(name: str, table: Mapping[str, Any], where: str) -> Site:
    try:
        return Site.model_validate({"name": name, **table})
    except ValidationError as error:
        raise UserError(
            f"{where}: {first_problem(error.errors())}", "see `arriero launch sites NAME` for the keys"
        ) from None


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
