"""`arriero train`."""

import sys
from contextlib import ExitStack
from importlib import import_module
from typing import IO, TYPE_CHECKING, Annotated, cast

import typer

from arriero.config.options import RunFile, Sets
from arriero.errors import UserError
from arriero.events import Output
from arriero.ui import make_console

if TYPE_CHECKING:
    from arriero.config.schema import RunConfig
    from arriero.parallel.world import World

Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, max=1024, help="Number of ranks to start on this machine.", show_default=False
    ),
]


def train(run_file: RunFile = None, sets: Sets = [], nproc: Nproc = None) -> None:
    """Train the model that the run file describes.

    Without a file it needs no download, no account and no GPU: it trains a small Llama on Python's source.
    A run that was stopped or killed resumes from its newest checkpoint, on any number of ranks.
    Several ranks are started by --nproc, torchrun or srun; \\[parallel] says how they share the work.

    Example: arriero train run.toml --set train.horizon='500 steps' --nproc 4
    """
    # before anything slow is imported: a signal must find a handler
    from arriero.interrupt import Interrupted, Requests

    try:
        with Requests(final=True):
            _train(run_file, sets, nproc)
    except Interrupted as stop:
        raise typer.Exit(128 + stop.number) from None
    finally:
        Output(sys.stdout).give_up()


def _train(run_file: RunFile, sets: Sets, nproc: Nproc) -> None:
    """The directory is locked before torch is imported, so that a second run is refused quickly."""
    from arriero.config.load import load_run
    from arriero.model.presets import expand

    # before torch is imported, so that a mistake is answered at once
    config = load_run(run_file, sets, expand).config
    from arriero.parallel.spawn import run_ranks
    from arriero.parallel.world import world_from
    from arriero.train.lock import held
    from arriero.train.rundir import run_directory

    if nproc is not None and world_from().size > 1:
        raise UserError("a launcher has started several ranks already", "leave --nproc out")
    if nproc is None or nproc == 1:
        train_as_rank(config)
        return
    with held(run_directory(config)):
        # once, for all ranks to inherit
        import_module("arriero.train.build")
        run_ranks(lambda: train_as_rank(config, locked=True), nproc)


def train_as_rank(config: "RunConfig", locked: bool = False) -> None:
    """One process of a run; rank 0 prints. `locked`: the launcher holds the run directory."""
    from arriero.interrupt import Requests
    from arriero.parallel.world import world_from

    world = world_from()
    with Requests(speaks=world.leads, final=True), ExitStack() as stack:
        refusal = None
        if world.leads and not locked:
            from arriero.train.lock import held
            from arriero.train.rundir import run_directory

            try:
                stack.enter_context(held(run_directory(config)))
            except UserError as error:
                refusal = error
                if world.size == 1:
                    raise
        _train_as_rank(config, world, refusal)


def _train_as_rank(config: "RunConfig", world: "World", refusal: UserError | None) -> None:
    from arriero.parallel.world import joined
    from arriero.train.arrange import arrange
    from arriero.train.build import build
    from arriero.train.console import ConsoleProgress, PreparationBar, show_ended, show_outcome
    from arriero.train.finish import ended_already, sample
    from arriero.train.loop import train as run

    console = make_console()
    console.file = cast("IO[str]", Output(sys.stdout))
    plan = arrange(config, world)
    if (ended := ended_already(config)) is not None:
        # the other ranks end here too, and rank 0 must not wait for them in `joined`
        if refusal is not None:
            raise refusal
        if world.leads:
            show_ended(console, config, ended)
        return
    with joined(world, plan.device.torch_device, refusal=refusal):
        with PreparationBar(console) as preparation:
            session = build(plan, preparation, [ConsoleProgress(console)])
        outcome = run(session)
        if world.leads and not outcome.trained:
            show_ended(console, config, outcome)
        elif world.leads:
            show_outcome(console, session, outcome, sample(session, outcome.model))
