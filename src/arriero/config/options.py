"""Command-line arguments and options that several verbs share."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from arriero.errors import UserError
from arriero.units import Span, parse_bytes, parse_span

RunFile = Annotated[
    Path | None, typer.Argument(help="A run file; without one, the embedded default.", show_default=False)
]
Sets = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the run file; KEY=default restores its default. Repeatable.",
        autocompletion=lambda incomplete: _completed(incomplete, "="),
    ),
]
Key = Annotated[
    str,
    typer.Argument(
        help="A section or key, like train.batch, or another trainer's name.",
        autocompletion=lambda incomplete: _completed(incomplete, ""),
    ),
]
SiteName = Annotated[
    str | None,
    typer.Option(
        "--site",
        help="A site of `arriero launch sites`, or a TOML file. site.toml overrides its values.",
        show_default="the one that site.toml names",
        autocompletion=lambda: _sites(),
    ),
]
Account = Annotated[str | None, typer.Option(help="Account (project) of the job.", show_default="site")]
Partition = Annotated[str | None, typer.Option(help="Partition of the job.", show_default="site")]
TimeLimit = Annotated[
    str | None, typer.Option(help="Time limit: 24:00:00 or 2-00:00:00.", show_default="site")
]
SbatchOptions = Annotated[
    list[str],
    typer.Option("--sbatch", metavar="NAME=VALUE", help="Another option of sbatch: qos=debug. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


_VALUES = {"bool": "", "int": "N", "float": "N", "str": "TEXT", "path": "PATH", "Path": "PATH"}
_LONG = 20  # choices that leave no room for the help on 80 columns


def _named(parameter: Any, ctx: Any) -> Any:
    """Return a parameter whose help shows a short name of its value instead of a Python type."""
    if not hasattr(parameter, "display_type"):  # typer before 0.29, in an environment that others maintain
        return parameter
    kind = parameter.display_type(ctx).strip("<>").removeprefix("list[").rstrip("]").removesuffix(" range")
    if kind in _VALUES and parameter.param_type_name == "argument":
        parameter.metavar = parameter.metavar or parameter.name.upper()
        parameter.display_type_rich = lambda ctx: None  # noqa: ARG005
    elif kind in _VALUES and parameter.metavar is None:
        parameter.metavar = _VALUES[kind]
    elif len(kind) > _LONG and parameter.metavar is None and parameter.param_type_name == "option":
        parameter.metavar, parameter.help = "NAME", f"{parameter.help} One of {kind.replace('|', ', ')}."
    return parameter


class Verb(TyperCommand):
    """A command whose help fills the terminal: paragraphs are reflowed, and flags have no type."""

    def get_params(self, ctx) -> list[Any]:
        return [_named(each, ctx) for each in super().get_params(ctx)]

    def format_help(self, ctx, formatter) -> None:
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(each.split("\n")) for each in paragraphs)
        super().format_help(ctx, formatter)


class VerbGroup(TyperGroup):
    """A group of verbs with the same kind of help."""

    def get_params(self, ctx) -> list[Any]:
        return [_named(each, ctx) for each in super().get_params(ctx)]


class Verbs(typer.Typer):
    """A table of verbs: its commands are `Verb` unless a line says otherwise."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=VerbGroup, **settings)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Any:
        return super().command(name, cls=cls or Verb, **settings)


class WithRunFile(Verb):
    """A command with --set: an option that is a key of the run file is answered with the --set to write."""

    def parse_args(self, ctx, args):
        own = {option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in args[: args.index("--") if "--" in args else None]:
            option, _, value = word.partition("=")
            if option.startswith("--") and option not in own and (todo := _as_set(option, value)):
                raise UserError(f"there is no option {option}", todo)
        return super().parse_args(ctx, args)


def _as_set(option: str, value: str) -> str | None:
    from arriero.config.keys import advice_for, facts_of, key_for

    name = option.removeprefix("--")
    key = name if facts_of(name) else key_for(name)
    return advice_for(name) or (f"write --set {key}={value or 'VALUE'}" if key else None)


def read_size(option: str, text: str) -> int:
    """Return the bytes of an option like --shard-size."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}", f"write it like {option} 5GB") from None


def run_path(path: Path) -> Path:
    """Return a path unchanged, or the run directory of this name under runs/."""
    named = Path("runs") / path
    return named if not path.exists() and not path.is_absolute() and named.is_dir() else path


def read_progress(option: str, text: str) -> Span:
    """Return the tokens or steps of an option like --keep-every; zero and wall time are rejected."""
    example = f"write it like {option} '10B tok' or {option} '5000 steps'"
    try:
        span = parse_span(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}", example) from None
    if span.unit == "s" or span.amount < 1:
        raise UserError(f"{option}: '{text}' is not a positive number of tokens or steps", example)
    return span


def check_writable(option: str, path: Path | None) -> None:
    """Raise if an output file cannot be written, before minutes of work instead of after."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = (
            "is a directory" if path.is_dir() else f"cannot be written: there is no directory {path.parent}"
        )
        raise UserError(f"{option} {path} {what}", "give a file in a directory that exists")


def _completed(incomplete: str, after: str) -> list[str]:
    """Return the keys of the run file that complete a word in the shell."""
    from arriero.config.keys import all_keys
    from arriero.config.schema import RunConfig

    keys = [key for key in all_keys(RunConfig) if not key.startswith(("data.phases.", "optim.groups."))]
    return [f"{key}{after}" for key in keys if key.startswith(incomplete)]


def _sites() -> list[str]:
    from arriero.config.site import site_names

    return list(site_names())
