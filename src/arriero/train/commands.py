"""`arriero train`."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from arriero.config.options import RunFile, Sets
from arriero.errors import UserError
from arriero.ui import make_console

if TYPE_CHECKING:
    from arriero.config.schema import RunConfig

Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, max=1024, help="Number of ranks to start on this machine.", show_default=False
    ),
]


def train(run_file: RunFile = None, sets: Sets = [], nproc: Nproc = None) -> None:
    """Train a model as the run file says.

    Without a file it needs no download, no account and no GPU: it trains a small Llama on Python's source.
    A run that was stopped or killed goes on from its newest checkpoint, on any number of ranks.
    Several ranks are started by --nproc, torchrun or srun; \\[parallel] says how they share the work.

    Example: arriero train run.toml --set train.horizon='500 steps' --nproc 4
    """
    from arriero.config.load import load_run
    from arriero.model.presets import expand

    # before torch is imported, so that a mistake is answered at once
    config = load_run(run_file, sets, expand).config
    from arriero.parallel.spawn import run_ranks
    from arriero.parallel.world import world_from
    from arriero.train.interrupt import Interrupted

    if nproc is not None and world_from().size > 1:
        raise UserError("a launcher has started several ranks already", "leave --nproc out")
    try:
        if nproc is None or nproc == 1:
            train_as_rank(config)
        else:
            run_ranks(lambda: train_as_rank(config), nproc)
    except Interrupted as stop:
        raise typer.Exit(128 + stop.number) from None


def train_as_rank(config: "RunConfig") -> None:
    """One process of a run, alone or among others; the first one speaks."""
    from arriero.parallel.world import joined, world_from
    from arriero.train.arrange import arrange
    from arriero.train.build import build
    from arriero.train.console import ConsoleProgress, PreparationBar, show_ended, show_outcome
    from arriero.train.finish import ended_already, sample
    from arriero.train.interrupt import interruptible
    from arriero.train.lock import held
    from arriero.train.loop import train as run
    from arriero.train.rundir import run_directory

    console = make_console()
    world = world_from()
    with interruptible():
        plan = arrange(config, world)
        if (ended := ended_already(config)) is not None:
            if world.leads:
                show_ended(console, config, ended)
            return
        alone = held(run_directory(config)) if world.leads else nullcontext()
        with alone, joined(world, plan.device.torch_device):
            with PreparationBar(console) as preparation:
                session = build(plan, preparation, [ConsoleProgress(console)])
            outcome = run(session)
            if world.leads and not outcome.trained:
                show_ended(console, config, outcome)
            elif world.leads:
                show_outcome(console, session, outcome, sample(session, outcome.model))
