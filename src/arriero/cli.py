"""The verb table: one line per verb; each verb is implemented in the package that does its work."""

import errno
import io
import os
import platform
import sys
from importlib.metadata import version

import typer

import arriero.bench.commands as bench_verbs
import arriero.bench.hardware_commands as hardware_verbs
import arriero.checkpoint.commands as checkpoint_verbs
import arriero.data.commands.datasets as dataset_verbs
import arriero.data.commands.prepare as prepare_verbs
import arriero.data.commands.runs as run_data_verbs
import arriero.data.commands.trace as trace_verbs
import arriero.evaluate.commands as evaluate_verbs
import arriero.evaluate.push as push_verbs
import arriero.evaluate.replay_commands as replay_verbs
import arriero.evaluate.speculator_commands as speculator_verbs
import arriero.federate.commands as federation_verbs
import arriero.launch.commands as launch_verbs
import arriero.launch.doctor.commands as doctor_verbs
import arriero.launch.supervisor as supervise_verbs
import arriero.plan.commands as config_verbs
import arriero.plan.new_run as new_run_verbs
import arriero.report.commands as plan_verbs
import arriero.report.run_commands as report_verbs
import arriero.train.commands as train_verbs
from arriero import __version__
from arriero.config.options import Verbs, WithRunFile
from arriero.errors import UserError
from arriero.interrupt import Interrupted
from arriero.ui import print_error, set_quiet

app = Verbs(
    help="Pre-train Llama-class models, from raw text to a finished model.\n\n"
    "`arriero train` alone trains a small Llama on this machine. `arriero VERB -h` explains a verb.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
ckpt = Verbs(help="Inspect, verify, convert and prune models and checkpoints.", no_args_is_help=True)
config = Verbs(help="Check and show run files, explain keys, list model presets.", no_args_is_help=True)
data = Verbs(help="Turn text into tokens; inspect and verify datasets.", no_args_is_help=True)
evaluation = Verbs(help="Evaluate models: perplexity, tasks, new checkpoints.", no_args_is_help=True)
fed = Verbs(help="Train one model at several sites, which keep their data.", no_args_is_help=True)
runs = Verbs(invoke_without_command=True)
launch = Verbs(help="Run training jobs on a Slurm cluster.", no_args_is_help=True)
bench = Verbs(help="Benchmark training steps and verify parallel layouts.", no_args_is_help=True)

app.command(rich_help_panel="Prepare")(new_run_verbs.init)
app.command(cls=WithRunFile, rich_help_panel="Prepare")(plan_verbs.plan)
app.command(rich_help_panel="Prepare")(doctor_verbs.doctor)
app.command(cls=WithRunFile, rich_help_panel="Train")(train_verbs.train)
app.command(rich_help_panel="Results")(report_verbs.status)
app.command(rich_help_panel="Results")(report_verbs.report)
app.command(rich_help_panel="Results")(evaluate_verbs.generate)
app.command(rich_help_panel="Results")(replay_verbs.replay)
app.add_typer(evaluation, name="eval", rich_help_panel="Results")
evaluation.command()(evaluate_verbs.perplexity)
evaluation.command()(evaluate_verbs.tasks)
evaluation.command()(evaluate_verbs.watch)
evaluation.command()(speculator_verbs.speculator)
app.add_typer(data, name="data", rich_help_panel="Prepare")
data.command()(prepare_verbs.prepare)
data.command()(prepare_verbs.train_tokenizer)
data.command()(dataset_verbs.pack)
data.command()(speculator_verbs.generate)
data.command()(run_data_verbs.show)
data.command()(run_data_verbs.audit)
data.command()(trace_verbs.trace)
data.command("import")(dataset_verbs.import_tokens)
data.command("export")(dataset_verbs.export_tokens)
data.command()(dataset_verbs.inspect)
data.command()(dataset_verbs.verify)
app.add_typer(bench, name="bench", rich_help_panel="Measure")
bench.command(cls=WithRunFile)(bench_verbs.step)
bench.command()(bench_verbs.matrix)
bench.command()(bench_verbs.parity)
bench.command()(bench_verbs.compare)
bench.command(cls=WithRunFile)(hardware_verbs.ops)
bench.command()(hardware_verbs.comm)
app.add_typer(launch, name="launch", rich_help_panel="Train")
launch.command("render", cls=WithRunFile)(launch_verbs.render_job)
launch.command("submit", cls=WithRunFile)(launch_verbs.submit_job)
launch.command(cls=WithRunFile)(launch_verbs.chain)
launch.command()(launch_verbs.status)
launch.command()(launch_verbs.sites)
launch.command(cls=WithRunFile)(supervise_verbs.supervise)
app.add_typer(ckpt, name="ckpt", rich_help_panel="Results")
ckpt.command()(checkpoint_verbs.convert)
ckpt.command(cls=checkpoint_verbs.SpreadWeights)(checkpoint_verbs.average)
ckpt.command()(checkpoint_verbs.mini)
ckpt.command("list")(checkpoint_verbs.list_checkpoints)
ckpt.command()(checkpoint_verbs.inspect)
ckpt.command()(checkpoint_verbs.verify)
ckpt.command()(checkpoint_verbs.prune)
ckpt.command()(push_verbs.push)
app.add_typer(fed, name="fed", rich_help_panel="Train")
fed.command()(federation_verbs.init)
fed.command()(federation_verbs.plan)
fed.command()(federation_verbs.run)
fed.command()(federation_verbs.status)
fed.command("round", hidden=True)(federation_verbs.run_site)
fed.command("turn", hidden=True)(federation_verbs.take_turn)
fed.command(cls=checkpoint_verbs.SpreadWeights)(federation_verbs.aggregate)
app.add_typer(runs, name="runs", rich_help_panel="Results")
runs.callback()(report_verbs.list_runs)
runs.command()(report_verbs.compare)
app.add_typer(config, name="config", rich_help_panel="Prepare")
config.command(cls=WithRunFile)(config_verbs.show)
config.command(cls=WithRunFile)(config_verbs.check)
config.command()(config_verbs.schema)
config.command()(config_verbs.explain)
config.command()(config_verbs.reference)
config.command()(config_verbs.models)

_MOVED = {
    "bench costs": (bench, "`make bench-costs` in a clone of the repository"),
    "bench page": (bench, "`arriero bench compare RESULTS... --write PAGE`"),
    "data bench": (data, "`make bench-data` in a clone of the repository"),
}


def _register_moved(verb: str, group: typer.Typer, now: str) -> None:
    """Add a hidden verb that takes any arguments and names what replaced it."""

    def moved() -> None:
        raise UserError(f"`arriero {verb}` is now {now}")

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    group.command(verb.split()[-1], hidden=True, context_settings=settings)(moved)


for _verb, (_group, _now) in _MOVED.items():
    _register_moved(_verb, _group, _now)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"arriero {__version__} (torch {version('torch')}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),  # noqa: ARG001
    quiet: bool = typer.Option(False, "--quiet", help="Print nothing but errors and the output of --json."),
    version: bool = typer.Option(  # noqa: ARG001
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """--debug and --quiet may also be given after the verb."""
    set_quiet(quiet)


def main() -> None:
    """Run a verb. A user error prints one sentence and exits with code 2; a bug shows its traceback."""
    arguments = _global_options_first(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        # names or terminals that are not UTF-8 must not end in a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _check_utf8(arguments)
        app(arguments, prog_name="arriero")
    except Interrupted as stop:
        sys.exit(stop.exit_code)
    except (UserError, OSError) as error:
        if "--debug" in arguments[:2] or not _is_user_error(error):
            raise
        print_error(error)
        sys.exit(error.exit_code if isinstance(error, UserError) else 2)


def _check_utf8(arguments: list[str]) -> None:
    """Reject arguments that are not UTF-8: they contain surrogates, which JSON and TOML cannot store."""
    for argument in arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            shown = os.fsencode(argument)[:100]
            raise UserError(f"the argument {shown!r} is not valid UTF-8", "rename the file, or use UTF-8")


def _is_user_error(error: UserError | OSError) -> bool:
    """Return whether this is no bug: a mistake, a file that cannot be used, or an exhausted resource."""
    return isinstance(error, UserError) or error.filename is not None or error.errno in _EXHAUSTED


_EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE}


def _global_options_first(arguments: list[str]) -> list[str]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    front = [option for option in ("--debug", "--quiet") if option in arguments[:end]]
    return front + [word for word in arguments[:end] if word not in front] + arguments[end:]
