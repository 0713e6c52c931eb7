"""`arriero launch render`, `submit`, `status`, `chain` and `sites`."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from arriero import slurm
from arriero.config.fields import flat
from arriero.config.load import config_from_toml, load_run
from arriero.config.options import Account, AsJson, Partition, SbatchOptions, Sets, SiteName, TimeLimit
from arriero.config.schema import RunConfig
from arriero.config.site import Site, chosen_site, load_site, site_names
from arriero.errors import UserError
from arriero.launch.jobs import Job, JobRequest, render, submit_chain
from arriero.model.presets import expand
from arriero.ui import Console, Table, facts, make_console, print_json

RunFileToStart = Annotated[Path, typer.Argument(help="The run file.", show_default=False)]
Nodes = Annotated[int, typer.Option(min=1, help="Nodes to train on.")]
TasksPerNode = Annotated[
    int | None, typer.Option(min=1, help="Ranks per node.", show_default="GPUs per node of the site")
]
Spares = Annotated[int, typer.Option(min=0, help="Spare nodes to allocate; they replace failing ones.")]
Restarts = Annotated[int, typer.Option(min=0, help="Restarts after a failure, per job.")]
SaveSeconds = Annotated[
    int | None, typer.Option(min=0, help="Seconds that a save takes.", show_default="measured, or estimated")
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="DIR", help="Folder to write.", show_default="RUN.launch"),
]
Plans = Annotated[bool, typer.Option(help="Plan the layout if the run file sets no degree.")]
Preflight = Annotated[bool, typer.Option(help="Check every node before training (arriero doctor).")]


def render_job(
    run_file: RunFileToStart,
    site: SiteName = None,
    nodes: Nodes = 1,
    tasks_per_node: TasksPerNode = None,
    spares: Spares = 0,
    restarts: Restarts = 3,
    account: Account = None,
    partition: Partition = None,
    time: TimeLimit = None,
    sbatch: SbatchOptions = [],
    save_seconds: SaveSeconds = None,
    plan: Plans = True,
    preflight: Preflight = True,
    output: Out = None,
    sets: Sets = [],
    as_json: AsJson = False,
) -> None:
    """Write the Slurm job of a run for a site: script, environment with reasons, planned layout.

    The folder RUN.launch gets job.sbatch, environment.sh, resolved.toml (the run file with all values) and,
    if no degree is set, plan.json. Nothing is submitted. A layout that does not fit is rejected.

    Example: arriero launch render run.toml --site leonardo --nodes 4 --account my_project
    """
    given = dict(locals())
    del given["as_json"]
    job, where = _rendered(**given)
    _show(job, where, [], as_json)


def _like_render(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb all options of `render`, after those it has."""
    shared = inspect.signature(render_job).parameters
    own = [each for each in inspect.signature(verb).parameters.values() if each.kind != each.VAR_KEYWORD]
    signature = inspect.Signature([shared["run_file"], *own, *list(shared.values())[1:]])

    def called(**given: Any) -> None:
        verb(**given)

    called.__name__, called.__doc__ = verb.__name__, verb.__doc__
    called.__signature__ = signature  # pyrefly: ignore
    called.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    return called


@_like_render
def submit_job(**given: Any) -> None:
    """Render the job of a run and submit it. At each time limit it saves, is requeued and resumes.

    Example: arriero launch submit run.toml --site leonardo --nodes 4 --account my_project
    """
    as_json = given.pop("as_json")
    job, site = _rendered(**given)
    _show(job, site, [slurm.submit(job.script)], as_json)


@_like_render
def chain(
    hours: Annotated[float, typer.Option(min=0.01, help="Hours of training, over as many jobs as needed.")],
    **given: Any,
) -> None:
    """Submit a chain of jobs for one run: each starts when the one before it has ended, and resumes.

    Each job saves and ends before its time limit. Jobs that start after the end of the run exit at once. For
    clusters that do not requeue jobs; elsewhere `launch submit` is enough.

    Example: arriero launch chain run.toml --hours 96 --site leonardo --nodes 4 --account my_project
    """
    as_json = given.pop("as_json")
    job, site = _rendered(**given, is_chained=True)
    slots = math.ceil(hours * 3600 / (site.time_limit_s - job.signal_s))
    _show(job, site, submit_chain(job, slots), as_json)


def status(
    run: Annotated[Path, typer.Argument(help="A run file or a run directory.", show_default=False)],
    is_finished: Annotated[
        bool, typer.Option("--is-finished", help="Exit with 0 if the run is finished, else with 1.")
    ] = False,
    sets: Sets = [],
    as_json: AsJson = False,
) -> None:
    """Show the jobs of a run, its last step, speed, predicted end, checkpoints, restarts and goodput.

    Example: arriero launch status run.toml
    """
    from arriero.launch.status import read_status, show_status

    config = _config_of(run, sets)
    found = read_status(config)
    if as_json:
        print_json(found.describe())
    else:
        show_status(make_console(), found)
    if is_finished:
        raise typer.Exit(0 if found.finished else 1)


def sites(
    name: Annotated[
        str | None, typer.Argument(help="The site to show; without it, all are listed.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped sites, or show all values of one with their reasons; unverified ones are marked.

    Example: arriero launch sites frontier
    """
    console = make_console(as_json)
    if name is not None:
        site = load_site(name)
        print_json(site.model_dump()) if as_json else _show_site(console, site)
        return
    found = [load_site(each) for each in site_names()]
    if as_json:
        print_json({each.name: each.model_dump() for each in found})
        return
    table = Table("site", "about", "partition", ">GPUs", "time limit", "container", "cluster file")
    for each in found:
        runs = " ".join((each.container.runtime, *each.container.flags)) if each.container.flags else ""
        part = each.slurm
        table.row(
            each.name,
            each.about,
            part.partition or "",
            part.gpus_per_node,
            part.time,
            runs,
            each.cluster or "",
        )
    console.print(table)
    console.plain("`arriero launch sites NAME` shows all values; site.toml overrides them (docs/slurm.md).")


def _config_of(run: Path, sets: list[str]) -> RunConfig:
    """Read a run file, or the stored one of a run directory."""
    if not run.is_dir():
        return load_run(run, sets, expand).config
    if not (run / "run.toml").is_file():
        raise UserError(
            f"{run} is no run directory: it has no run.toml", "give a run file or a run directory"
        )
    config = config_from_toml(run / "run.toml")
    where = config.run.model_copy(update={"dir": str(run.absolute().parent), "name": run.absolute().name})
    return config.model_copy(update={"run": where})


def _rendered(
    run_file: Path,
    sets: list[str],
    output: Path | None,
    site: str | None,
    account: str | None,
    partition: str | None,
    time: str | None,
    sbatch: list[str],
    plan: bool,
    save_seconds: int | None,
    is_chained: bool = False,
    **given: Any,
) -> tuple[Job, Site]:
    """Render the job that the options of `render` describe."""
    where = chosen_site(site, account, partition, time, sbatch)
    request = JobRequest(plans=plan, save_s=save_seconds, is_chained=is_chained, **given)
    config = load_run(run_file, sets, expand).config
    return render(config, where, request, output.absolute() if output else None), where


def _show(job: Job, site: Site, jobs: list[str], as_json: bool) -> None:
    console = make_console(as_json)
    if as_json:
        reasons = {name: {"value": value, "reason": reason} for name, value, reason in job.reasons}
        print_json({"site": site.name, "script": str(job.script), "jobs": jobs, **reasons})
        return
    console.print(facts(job.reasons))
    written = ", ".join(sorted(path.name for path in job.folder.iterdir() if path.suffix != ".log"))
    console.plain(f"written to {job.folder}: {written}")
    if not jobs:
        console.plain(f"submit it: sbatch {job.script}, or `arriero launch submit` with the same arguments")
        return
    console.plain(f"submitted: {'job' if len(jobs) == 1 else 'jobs'} {', '.join(jobs)}")
    console.plain(f"follow it: arriero launch status {job.folder / 'resolved.toml'}")


def _show_site(console: Console, site: Site) -> None:
    rows: list[tuple[str, ...]] = []
    for key, value in flat(site.model_dump(exclude={"environment", "from_memory"})).items():
        if value not in (None, "", (), []):
            shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            memory = any(key == each or key.startswith(f"{each}.") for each in site.from_memory)
            rows.append((key, shown, "unverified: no document found" if memory else ""))
    console.print(facts(rows))
    table = Table("variable", "value", "reason", "source", no_wrap=("variable",))
    for name, each in site.variables().items():
        table.row(name, each.value, each.reason, each.source or "")
    console.print(table)
