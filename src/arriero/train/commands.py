"""`arriero train`."""

import sys
from typing import IO, Annotated, cast

import typer

from arriero.config.options import RunFile, Sets
from arriero.events import Output
from arriero.ui import make_console

Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, max=1024, help="Number of ranks to start on this machine.", show_default=False
    ),
]


def train(run_file: RunFile = None, sets: Sets = [], nproc: Nproc = None) -> None:
    """Train the model that the run file describes.

    Without a run file it trains a small Llama on the source of Python's standard library, which needs no
    download, account or GPU.
    A run that was stopped or killed resumes from its newest checkpoint, on any number of ranks.
    Several ranks are started by --nproc, torchrun or srun; \\[parallel] sets the parallel layout.

    Example: arriero train run.toml --set train.horizon='500 steps' --nproc 4
    """
    # handlers must exist before the slow imports
    from arriero.interrupt import Interrupted, Requests

    try:
        with Requests(final=True):
            _train(run_file, sets, nproc)
    except Interrupted as stop:
        raise typer.Exit(128 + stop.number) from None
    finally:
        Output(sys.stdout).finish()


def _train(run_file: RunFile, sets: Sets, nproc: Nproc) -> None:
    from arriero.config.load import load_run
    from arriero.model.presets import expand

    # before torch is imported, so that mistakes are reported at once
    config = load_run(run_file, sets, expand).config
    from arriero.parallel.world import world_from
    from arriero.train.console import ConsoleProgress, show_finished
    from arriero.train.run import run

    console = make_console()
    console.file = cast("IO[str]", Output(sys.stdout))
    result = run(config, [ConsoleProgress(console)], nproc=None if nproc == 1 else nproc)
    if world_from().is_leader and not result.has_trained:
        show_finished(console, result)
