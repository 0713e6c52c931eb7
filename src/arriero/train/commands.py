"""`arriero train`."""

from rich.console import Console

from arriero.config.options import RunFile, Sets


def train(run_file: RunFile = None, sets: Sets = []) -> None:
    """Train a model as the run file says.

    Without a file it needs no download, no account and no GPU: it trains a small Llama on Python's source.

    Example: arriero train run.toml --set train.horizon='500 steps'
    """
    from arriero.config.load import load_run
    from arriero.model.presets import expand
    from arriero.train.build import build
    from arriero.train.console import ConsoleProgress, PreparationBar, show_outcome
    from arriero.train.finish import finish
    from arriero.train.loop import train as run

    console = Console(highlight=False)
    config = load_run(run_file, sets, expand).config
    with PreparationBar(console) as preparation:
        session = build(config, preparation, [ConsoleProgress(console)])
    outcome = run(session)
    show_outcome(console, session, outcome, finish(session))
