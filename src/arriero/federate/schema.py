"""The federation file: sites, rounds, the outer optimizer and the rules by which a round closes."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from arriero.config.fields import AnySpan, Progress
from arriero.config.keys import ConfigError, Problem, section_of
from arriero.config.schema import Positive, Section
from arriero.errors import UserError, nearest

Codec = Literal["bf16", "int8", "fp32"]
OuterName = Literal["fedavg", "nesterov", "fedadam"]
# the momentum of DiLoCo, and the rounds with which half of it is used
_MOMENTUM, _ROUNDS_OF_HALF = 0.9, 30
Name = Annotated[str, Field(pattern=r"^[a-z][a-zA-Z0-9-]*$", max_length=40)]


class FederationSection(Section):
    name: Name = "federation"
    """Name of the federation; its directory is DIR/NAME."""
    dir: str = "federations"
    """Where the coordinator keeps the state of federations."""
    rounds: Positive = 10
    """Number of rounds. In asynchronous mode a round is as many updates as there are sites."""
    tokens: Progress = Field("500 steps", validate_default=True)
    """What each site trains in a round, on average: tokens, or steps of its own batch."""
    model: str | None = None
    """The first global model: a checkpoint, run or model in any format. Without it, the initial weights of
    the first site's run file."""
    tokenizer: str | None = None
    """A tokenizer.json that is copied beside the global model; sites whose data has another tokenizer are
    rejected."""
    mode: Literal["synchronous", "quorum", "asynchronous"] = "quorum"
    """'synchronous' waits for all sites. 'quorum' closes a round when enough sites have answered and the
    grace window has passed. 'asynchronous' updates the global model with each member."""
    quorum: Annotated[float, Field(gt=0, le=1)] | Positive = 0.5
    """Sites whose members suffice in mode 'quorum': a share below 1.0, or a number."""
    grace: Annotated[float, Field(ge=0)] = 0.25
    """Grace window of mode 'quorum', as a fraction of the time that the quorum took. It ends early
    if at least four sites and three quarters of those that train have answered, and the next is overdue."""
    deadline: AnySpan = Field("1d", validate_default=True)
    """Wall time after which a round that lacks members stops the federation with an error."""
    late: Literal["merge", "discard"] = "merge"
    """What happens to a member that arrives after its round has closed."""
    staleness: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the weight of a member per round that it is late."""
    max_staleness: Positive = 3
    """A member that is more rounds late is discarded."""
    balance: bool = True
    """Divide the tokens of a round by the measured speed and queue time of the sites."""
    weighting: Literal["tokens", "uniform", "given"] = "tokens"
    """Weight of a member: its trained tokens, one, or `weight` of its site."""
    outlier: Annotated[float, Field(gt=1)] | Literal[False] = 10.0
    """Refuse a delta whose norm per square root of its tokens exceeds the median of the others by this
    factor; false accepts any finite delta."""
    retries: Annotated[int, Field(ge=0)] = 3
    """How often the round of a site that failed is started again."""


class OuterSection(Section):
    optimizer: OuterName = "nesterov"
    """'nesterov' (DiLoCo), 'fedavg' (the plain mean with lr 1) or 'fedadam'."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Outer learning rate. Default: 1 - momentum / 3 for nesterov, which is 0.7 with momentum 0.9; 1 for
    fedavg, 0.01 for fedadam."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of nesterov, beta1 of fedadam. Default: 0.9 for fedadam; for nesterov 0.9 x rounds / (rounds +
    30), because momentum that outlives the rounds only delays them."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """beta2 of fedadam."""
    eps: Annotated[float, Field(gt=0)] = 1e-3
    """Epsilon of fedadam."""
    codec: Codec = "bf16"
    """What a site ships: its delta in 'bf16', its delta in 'int8' with a scale per 256 elements, or its
    weights in 'fp32'."""
    inner: Literal["continue", "reset"] = "continue"
    """Whether a site's optimizer state continues over rounds or is reset. Schedule and data position always
    continue. Neither is ever shipped."""


class SiteSection(Section):
    name: Name
    """Name of the site."""
    run_file: str
    """Run file of the site, with its own layout and data."""
    set: tuple[str, ...] = ()
    """Overrides of the run file, as for --set."""
    data: tuple[str, ...] = ()
    """Datasets at the site, in place of the run file's data.sources."""
    prompt: str | None = None
    """Text put before each document of `data`, excluded from the loss."""
    work: str | None = None
    """Work directory; required with host, else by default DIR/NAME/sites/SITE."""
    host: str | None = None
    """Login node, reached by ssh; this machine if not given."""
    port: Annotated[int, Field(gt=0, lt=2**16)] = 22
    """Port of ssh."""
    user: str | None = None
    """User name at the host."""
    key: str | None = None
    """Private key file for ssh."""
    known_hosts: str | None = None
    """File with the host's key, which is always checked; ~/.ssh/known_hosts if not given."""
    command: str = "arriero"
    """How `arriero` is called at the site."""
    profile: str | None = None
    """Site profile of `arriero launch`: rounds are Slurm jobs. Without it, a process."""
    nodes: Positive = 1
    """Nodes of a Slurm job."""
    nproc: Positive = 1
    """Ranks of a process without a profile."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight for weighting = 'given'."""
    bandwidth: str | None = None
    """Bandwidth to the coordinator for `fed plan`, such as '10 Gbit/s'."""


class FederationConfig(Section):
    federation: FederationSection = Field(default_factory=FederationSection)
    """Rounds, tokens and how a round closes."""
    outer: OuterSection = Field(default_factory=OuterSection)
    """The outer optimizer."""
    sites: Annotated[tuple[SiteSection, ...], Field(min_length=1)]
    """The sites."""

    def site(self, name: str) -> SiteSection | None:
        return next((site for site in self.sites if site.name == name), None)


def load_federation(path: Path) -> FederationConfig:
    """Read a federation file; raise a ConfigError with all its problems."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no federation file {path}", "`arriero fed init` writes one") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path} is not a readable TOML file ({error})", "correct it") from None
    return parse_federation(table, str(path), path.parent)


def parse_federation(table: Mapping[str, Any], where: str, folder: Path) -> FederationConfig:
    """Validate a table; paths on this machine are relative to `folder`."""
    try:
        config = FederationConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_problem(each, table, where) for each in error.errors()) from None
    names = [site.name for site in config.sites]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{where}: two sites are named '{min(twice)}'", "give each site its own name")
    if config.federation.deadline.unit != "s":
        raise UserError(f"{where}: federation.deadline is not a time", "write it like deadline = '6h'")
    for site in config.sites:
        if site.host and not site.work:
            todo = "set it to a directory at the site that stays between rounds"
            raise UserError(f"{where}: sites[{site.name}].work is missing", todo)
    sites = tuple(_resolved(site, folder) for site in config.sites)
    section = config.federation
    place = section.model_copy(
        update={
            "dir": _from(folder, section.dir),
            "model": section.model and _model_path(folder, section.model),
            "tokenizer": section.tokenizer and _from(folder, section.tokenizer),
        }
    )
    return config.model_copy(update={"sites": sites, "federation": place})


def _resolved(site: SiteSection, folder: Path) -> SiteSection:
    local = {"run_file": site.run_file, "key": site.key, "known_hosts": site.known_hosts}
    if site.host is None:
        local["work"] = site.work
    return site.model_copy(update={name: path and _from(folder, path) for name, path in local.items()})


def _from(folder: Path, path: str) -> str:
    return os.path.normpath(folder.absolute() / Path(path).expanduser())


def _model_path(folder: Path, path: str) -> str:
    return path if path.startswith("hf://") else _from(folder, path)


def _problem(error: Mapping[str, Any], table: Mapping[str, Any], where: str) -> Problem:
    """Return one of pydantic's errors as a sentence with the nearest key."""
    key = _key(error["loc"], table)
    if error["type"] == "extra_forbidden":
        section = _section_at(error["loc"][:-1])
        near = nearest(str(error["loc"][-1]), section.model_fields) if section else None
        keys = ", ".join(section.model_fields) if section else ""
        return Problem(key, "unknown key", f"did you mean '{near}'?" if near else f"known: {keys}", where)
    if error["type"] == "missing":
        return Problem(key, "is missing", "add it", where)
    what, _, todo = error["msg"].removeprefix("Value error, ").partition("; ")
    return Problem(key, f"{error['input']!r}: {what}", todo or "correct it; see docs/federation.md", where)


def _key(place: tuple[Any, ...], table: Mapping[str, Any]) -> str:
    """Return a dotted key; the name of a site stands for its number."""
    if place[:1] == ("sites",) and len(place) > 1 and isinstance(place[1], int):
        listed = table.get("sites")
        site = listed[place[1]] if isinstance(listed, list) else {}
        name = site.get("name", place[1]) if isinstance(site, dict) else place[1]
        place = (f"sites[{name}]", *place[2:])
    words = [str(part) for part in place if not re.search(r"[\[(]", str(part)) or str(part)[:6] == "sites["]
    return ".".join(words)


def _section_at(place: tuple[Any, ...]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = FederationConfig
    for part in place:
        if isinstance(part, str) and section is not None and part in section.model_fields:
            section = section_of(section.model_fields[part].annotation)
    return section


EXAMPLE = """\
# A federation: `arriero fed run FILE` trains one model at all sites, which keep their data.

[federation]
name = "first"
rounds = 10
tokens = "200 steps"           # per site and round, on average; or tokens: "4M tok"
mode = "quorum"                # synchronous | quorum | asynchronous
quorum = 0.5                   # share or number of sites whose members close a round
late = "merge"                 # merge | discard a member that comes after its round has closed
# model = "runs/base/model"    # the first global model; without it, initial weights

[outer]
optimizer = "nesterov"         # nesterov (DiLoCo) | fedavg | fedadam
# momentum = 0.9               # of nesterov; by default from the number of rounds, and lr from it
codec = "bf16"                 # bf16 | int8 | fp32
inner = "continue"             # optimizer state of a site over rounds: continue | reset
"""

LOCAL_SITE = """
[[sites]]
name = "{name}"
run_file = "{run_file}"        # its own layout and data; see `arriero init`
"""

REMOTE_SITE = """
# A site behind ssh and Slurm:
# [[sites]]
# name = "leonardo"
# run_file = "leonardo.toml"
# host = "login.example.org"
# user = "me"
# key = "~/.ssh/id_ed25519"
# profile = "leonardo"         # site profile of `arriero launch`
# nodes = 4
# work = "/scratch/me/federation"
# data = ["/scratch/me/data/it"]
# prompt = "Scrivi un documento: "
"""


def with_numbers(outer: OuterSection, rounds: int) -> OuterSection:
    """Return the outer optimizer with every number: a default depends on its kind and on the rounds."""
    momentum, lr = outer.momentum, outer.lr
    if outer.optimizer == "fedavg":
        momentum, lr = 0.0, 1.0 if lr is None else lr
    elif momentum is None:
        few = round(_MOMENTUM * rounds / (rounds + _ROUNDS_OF_HALF), 3)
        momentum = few if outer.optimizer == "nesterov" else _MOMENTUM
    if lr is None:
        lr = 0.01 if outer.optimizer == "fedadam" else round(1 - momentum / 3, 3)
    return outer.model_copy(update={"momentum": momentum, "lr": lr})
