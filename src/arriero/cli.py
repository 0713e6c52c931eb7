"""The verb table. Each verb lives in the room that does its work."""

import sys

import typer
from rich.console import Console
from rich.markup import escape

import arriero.bench.costs_commands as costs_verbs
import arriero.bench.matrix_commands as matrix_verbs
import arriero.bench.parity_commands as parity_verbs
import arriero.bench.result_commands as result_verbs
import arriero.bench.step_commands as step_verbs
import arriero.checkpoint.commands as checkpoint_verbs
import arriero.checkpoint.convert_commands as convert_verbs
import arriero.config.commands as config_verbs
import arriero.data.commands.bench as data_bench_verbs
import arriero.data.commands.exchange as exchange_verbs
import arriero.data.commands.look as look_verbs
import arriero.data.commands.prepare as prepare_verbs
import arriero.model.commands as model_verbs
import arriero.train.commands as train_verbs
from arriero.errors import UserError

app = typer.Typer(
    help="Pre-train Llama-class models, from raw text to a finished model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
ckpt = typer.Typer(help="Models and checkpoints at rest.", no_args_is_help=True)
config = typer.Typer(help="Look at run files, keys and model presets.", no_args_is_help=True)
data = typer.Typer(help="Text to tokens, and what is in them.", no_args_is_help=True)
bench = typer.Typer(help="Measure steps, honestly, and prove that layouts agree.", no_args_is_help=True)

app.command()(train_verbs.train)
app.add_typer(data, name="data")
data.command()(prepare_verbs.prepare)
data.command()(prepare_verbs.train_tokenizer)
data.command()(look_verbs.show)
data.command()(look_verbs.audit)
data.command("import")(exchange_verbs.import_tokens)
data.command("export")(exchange_verbs.export_tokens)
data.command()(exchange_verbs.inspect)
data.command()(exchange_verbs.verify)
data.command()(data_bench_verbs.bench)
app.add_typer(bench, name="bench")
bench.command()(parity_verbs.parity)
bench.command()(step_verbs.step)
bench.command()(matrix_verbs.matrix)
bench.command()(costs_verbs.costs)
bench.command()(result_verbs.compare)
bench.command()(result_verbs.page)
app.add_typer(ckpt, name="ckpt")
ckpt.command()(convert_verbs.convert)
ckpt.command(cls=convert_verbs.ManyNumbers)(convert_verbs.average)
ckpt.command("list")(checkpoint_verbs.list_checkpoints)
ckpt.command()(checkpoint_verbs.inspect)
ckpt.command()(checkpoint_verbs.verify)
ckpt.command()(checkpoint_verbs.prune)
app.add_typer(config, name="config")
config.command()(model_verbs.show)
config.command()(config_verbs.schema)
config.command()(config_verbs.explain)
config.command()(config_verbs.reference)
config.command()(model_verbs.models)


@app.callback()
def options(debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error.")) -> None: ...


def main() -> None:
    """A user's mistake ends with one sentence and exit code 2; anything else is a bug and crashes loudly."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(arguments)
    except UserError as error:
        if debug:
            raise
        Console(stderr=True, highlight=False).print(
            f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True
        )
        sys.exit(2)
