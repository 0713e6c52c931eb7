"""`arriero fed init | plan | run | status | aggregate`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from arriero.config.options import AsJson
from arriero.errors import UserError
from arriero.federate.schema import EXAMPLE, LOCAL_SITE, REMOTE_SITE
from arriero.files import publish_file
from arriero.ui import Console, Table, byte_progress, escape, make_console, print_json, styled
from arriero.units import counted, human_bytes, human_count, human_time

if TYPE_CHECKING:
    from arriero.federate.coordinator import Coordinator
    from arriero.federate.members import GlobalManifest

FederationFile = Annotated[Path, typer.Argument(help="A federation file, such as fed.toml.")]
_DEMO = Path("federations/demo")
_NUMBERS = {"tokens", "train_loss", "bytes", "seconds"}


def init(
    path: Annotated[Path, typer.Argument(help="The federation file to write.")] = Path("fed.toml"),
    sites: Annotated[
        list[str] | None,
        typer.Option("--site", metavar="NAME=RUN.toml", help="A site and its run file. Repeatable."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the StreamFlow and CWL files of an existing file instead.")
    ] = False,
) -> None:
    """Write a commented federation file, or show the workflow that a file becomes.

    Example: arriero fed init fed.toml --site here=run.toml --site there=other.toml
    """
    if show:
        from arriero.federate.schema import load_federation
        from arriero.federate.streamflow import all_workflow_files

        print_json(all_workflow_files(load_federation(path), path.absolute()))
        return
    if path.exists():
        raise UserError(f"{path} exists already", "choose another name, or remove it first")
    named = [site.partition("=") for site in sites or ["site-a=site-a.toml", "site-b=site-b.toml"]]
    text = EXAMPLE + "".join(
        LOCAL_SITE.format(name=name, run_file=file or f"{name}.toml") for name, _, file in named
    )
    publish_file(path, (text + REMOTE_SITE).encode())
    console = make_console()
    console.print(f"wrote {escape(str(path))}; `arriero fed run {escape(str(path))}` trains it")


def run(
    path: Annotated[
        Path | None, typer.Argument(help="A federation file; without one, a demo with two local sites.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run all sites as processes of this machine.")
    ] = False,
) -> None:
    """Train one model at several sites, which keep their data. A federation that was stopped continues.

    Without a file two local sites train on disjoint halves of the source of Python's standard library, and
    the result is compared with one run that has all data. That needs no download, account, server or GPU.

    Example: arriero fed run fed.toml --local
    """
    from arriero.interrupt import Interrupted, Requests

    try:
        with Requests(final=True):
            _run(path, local)
    except Interrupted as stop:
        raise typer.Exit(128 + stop.number) from None


def _run(path: Path | None, local: bool) -> None:
    from arriero.federate.coordinator import Coordinator

    console = make_console()
    if path is None:
        _run_demo(console)
        return
    _drive(Coordinator.of(path), console, local)


def run_site(
    turn: Annotated[Path, typer.Option(help="The directory with model, order and run file.")],
    site: Annotated[str, typer.Option(help="The name of this site.")],
    out: Annotated[Path, typer.Option(help="The answer to write.")],
    work: Annotated[Path, typer.Option(help="The site's work directory.")] = Path("federation"),
    profile: Annotated[str | None, typer.Option(help="Site profile of `arriero launch`.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of a Slurm job.")] = 1,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks without a profile.")] = 1,
) -> None:
    """Train this site's round and publish its member. The coordinator's workflow runs this at the site.

    Example: arriero fed round --turn turn --site leonardo --work /scratch/me/federation --out answer
    """
    from arriero.federate.site import Launcher, run_turn

    run_turn(turn, site, work.absolute(), out.absolute(), Launcher(nproc, profile, nodes))


def take_turn(
    path: FederationFile,
    site: Annotated[str, typer.Option(help="The name of the site.")],
    answer: Annotated[Path, typer.Option(help="What the site has sent.")],
    out: Annotated[Path, typer.Option(help="Where to write the next turn.")] = Path(),
) -> None:
    """Deliver a site's answer and wait for its next turn. The workflow runs this at the coordinator.

    Example: arriero fed turn fed.toml --site leonardo --answer answer --out .
    """
    from arriero.federate.coordinator import Coordinator
    from arriero.federate.streamflow import take_turn as take

    take(Coordinator.of(path), site, answer.absolute(), out.absolute())


def _drive(coordinator: "Coordinator", console: Console, local: bool) -> None:
    """Run the rounds that are left and print the result."""
    from arriero.federate.driver import Driver
    from arriero.federate.streamflow import streamflow_program

    if any(site.host for site in coordinator.config.sites) and not local:
        streamflow_program()
    section = coordinator.config.federation
    with coordinator.lock():
        coordinator.prepare()
        done = coordinator.rounds.number
        console.print(
            f"{escape(str(coordinator.folder))}: {counted(len(coordinator.names), 'site')}, "
            f"{section.mode}, {done} of {counted(coordinator.last_round, 'round')} done"
        )
        console.print(_outer_line(coordinator))
        if coordinator.is_finished:
            console.print("the federation is finished; raise federation.rounds to continue it")
        Driver(coordinator, local).run(lambda made: _show_round(coordinator, console, made))
    final = coordinator.rounds.model(coordinator.rounds.number)
    console.print(_loss_table(coordinator))
    console.print(f"[bold]model[/]  {escape(str(final))}")


def _outer_line(coordinator: "Coordinator") -> str:
    """Return the outer optimizer with the reason for its numbers."""
    outer, given = coordinator.outer, coordinator.config.outer
    if outer.optimizer == "fedavg":
        return f"outer optimizer: fedavg, lr {outer.lr:g}"
    why = ""
    if outer.optimizer == "nesterov" and given.momentum is None:
        why = " = 0.9 x rounds / (rounds + 30), as of the first start (set outer.momentum to choose it)"
    return f"outer optimizer: {outer.optimizer}, lr {outer.lr:g}, momentum {outer.momentum:g}{why}"


def _show_round(coordinator: "Coordinator", console: Console, made: "GlobalManifest") -> None:
    closed = coordinator.rounds.closed(made.round - 1)
    assert closed is not None
    sites = ", ".join(
        each.site + (f" (round {each.round})" if each.round < closed.round else "")
        for each in closed.accepted
    )
    tokens = human_count(sum(each.tokens for each in closed.accepted))
    missing = f"; absent: {', '.join(closed.absent)}" if closed.absent else ""
    console.plain(
        f"round {closed.round + 1}/{coordinator.last_round}  {tokens} tokens of {sites}{missing}; "
        f"{human_count(made.tokens)} in all"
    )
    for each in coordinator.rounds.refusals(closed.round):
        console.plain(f"  refused: {each.reason}", "yellow")


def _run_demo(console: Console) -> None:
    from arriero.federate.coordinator import Coordinator
    from arriero.federate.demo import make_demo, train_centralised
    from arriero.ui import StageProgress

    with StageProgress(console, "preparing the dataset (once)") as progress:
        demo = make_demo(_DEMO, progress=progress)
    console.print("two sites train on disjoint halves of the embedded corpus")
    coordinator = Coordinator(None, demo.config)
    _drive(coordinator, console, local=True)
    console.print("one run trains on both halves, with as many tokens, for comparison")
    centralised = train_centralised(demo, _DEMO)
    federated = coordinator.mean_final_loss()
    table = Table("held-out loss", ">nats", ">against centralised")
    table.row("centralised", f"{centralised:.4f}", "")
    if federated is not None and centralised:
        table.row("federated", f"{federated:.4f}", f"{federated / centralised - 1:+.2%}")
    console.print(table)


def _loss_table(coordinator: "Coordinator") -> Table:
    """Return the losses per round and site: training, held-out of the site's model and of the aggregate."""
    table = Table(">round", "site", ">tokens", ">train loss", ">held-out, global", ">held-out, site")
    for number in range(coordinator.rounds.number):
        for site, member in coordinator.rounds.members(number).items():
            about = member.manifest
            losses = (about.train_loss, about.eval_before, about.eval_after)
            table.row(number + 1, site, human_count(about.tokens), *map(_loss, losses))
    for site, loss in coordinator.final_losses().items():
        table.row("final", site, "", "", _loss(loss), "")
    return table


def _loss(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def status(
    path: FederationFile,
    replay: Annotated[
        bool, typer.Option("--replay", help="Recompute every global model from its members and compare.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show every round and site: state, tokens, losses, bytes, weight, norm and cosine with the other sites.

    Exits with code 1 if --replay finds a global model that differs.

    Example: arriero fed status fed.toml
    """
    from arriero.federate.coordinator import Coordinator

    coordinator = Coordinator.of(path)
    if not coordinator.rounds.model(0).is_dir():
        raise UserError(f"{coordinator.folder} has not started", f"`arriero fed run {path}` starts it")
    rows = [row for number in range(coordinator.rounds.number + 1) for row in _rows(coordinator, number)]
    replayed = _replay(coordinator) if replay else []
    if as_json:
        facts = {"federation": str(coordinator.folder), "round": coordinator.rounds.number, "rows": rows}
        print_json(facts | {"accounts": coordinator.accounts(), "replay": dict(replayed)})
    else:
        _print_status(coordinator, rows, replayed)
    raise typer.Exit(0 if all(same for _, same in replayed) else 1)


def _rows(coordinator: "Coordinator", number: int) -> list[dict[str, Any]]:
    """Return one row per site of a round: what it was asked, sent, and what became of it."""
    from arriero.federate.members import open_global

    rounds = coordinator.rounds
    closed, later = rounds.closed(number), rounds.model(number + 1)
    made = open_global(later, verify=False) if later.is_dir() else None
    parts = {(each.site, each.round): each for each in closed.accepted} if closed else {}
    earlier = {site: rounds.members(base).get(site) for site, base in parts if base < number}
    late = {site: member for site, member in earlier.items() if member}
    rows = []
    for site, member in {**rounds.members(number), **late}.items():
        about, part = member.manifest, parts.get((site, member.manifest.round))
        state = "accepted" if part else "late" if closed else "arrived"
        if part and about.round < number:
            state = f"accepted, {counted(number - about.round, 'round')} late"
        row = _row(number, site, state) | about.model_dump(include=_NUMBERS) | {"norm": member.norm}
        row |= {"eval_global": about.eval_before, "eval_site": about.eval_after}
        if part and closed:
            row["weight"] = part.weight / closed.total
            row["cosine"] = _mean_cosine(made, site, about.round) if made else None
        rows.append(row)
    rows += [_row(number, each.site, "refused") | {"reason": each.reason} for each in rounds.refusals(number)]
    shown = {row["site"] for row in rows}
    for site, order in rounds.assignments(number).items():
        if site not in shown:
            rows.append(_row(number, site, "absent" if closed else "training"))
            rows[-1]["tokens"] = None if closed else order.tokens
    return rows


def _row(number: int, site: str, state: str) -> dict[str, Any]:
    names = (*_NUMBERS, "eval_global", "eval_site", "weight", "norm", "cosine", "reason")
    return {"round": number, "site": site, "state": state, **dict.fromkeys(names)}


def _mean_cosine(made: "GlobalManifest", site: str, base: int) -> float | None:
    """Return the mean cosine between a member's delta and the others of its round."""
    index = next(i for i, each in enumerate(made.members) if (each.site, each.round) == (site, base))
    others = [value for i, value in enumerate(made.cosines[index]) if i != index]
    return sum(others) / len(others) if others else None


def _print_status(
    coordinator: "Coordinator", rows: list[dict[str, Any]], replayed: list[tuple[int, bool]]
) -> None:
    console = make_console()
    headings = (">round", "site", "state", ">tokens", ">train loss", ">held-out, global", ">held-out, site")
    table = Table(*headings, ">shipped", ">time", ">weight", ">norm", ">cosine")
    colours = {"accepted": "green", "refused": "red", "absent": "yellow", "discarded": "yellow"}
    for row in rows:
        table.row(
            row["round"] + 1,
            row["site"],
            styled(row["state"], colours.get(row["state"], "")),
            "" if row["tokens"] is None else human_count(row["tokens"]),
            *(_loss(row[name]) for name in ("train_loss", "eval_global", "eval_site")),
            "" if row["bytes"] is None else human_bytes(row["bytes"]),
            "" if row["seconds"] is None else human_time(row["seconds"]),
            "" if row["weight"] is None else f"{row['weight']:.1%}",
            "" if row["norm"] is None else f"{row['norm']:.3g}",
            "" if row["cosine"] is None else f"{row['cosine']:.2f}",
        )
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.plain(f"round {row['round'] + 1}: {row['reason']}", "yellow")
    held = ", ".join(f"{human_count(value)} {name}" for name, value in coordinator.accounts().items())
    console.print(f"tokens: {held}")
    for number, same in replayed:
        text = f"global model {number}: " + ("the same bits" if same else "DIFFERENT from its members")
        console.print(styled(text, "green" if same else "red"))


def _replay(coordinator: "Coordinator") -> list[tuple[int, bool]]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="replay-", dir=coordinator.folder) as scratch:
        return coordinator.replay(Path(scratch))


def plan(
    path: FederationFile,
    bandwidth: Annotated[
        str, typer.Option(help="Bandwidth of the coordinator, which all sites share; sites may have less.")
    ] = "1 Gbit/s",
    tokens_per_s: Annotated[
        float | None,
        typer.Option(min=1e-9, help="Speed of the slowest site; by default measured in earlier rounds."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the bytes and seconds of a round's transfers, and the fewest steps that keep them under 5 % of it.

    Example: arriero fed plan fed.toml --bandwidth '10 Gbit/s' --tokens-per-s 500000
    """
    from arriero.federate.cost import RoundCost, parse_rate, planned_round

    round_ = planned_round(path, tokens_per_s)
    rate = min(parse_rate(bandwidth), round_.sites_bits_per_s or math.inf)
    found = {}
    for name, codec, overlaps in (
        ("fp32", "fp32", False),
        ("bf16", "bf16", False),
        ("int8", "int8", False),
        ("int8, streamed", "int8", True),
    ):
        found[name] = RoundCost(
            round_.parameters, round_.sites, rate, codec, round_.step_s, round_.steps, overlaps
        )
    if as_json:
        rows = {
            name: {
                "bytes": c.bytes,
                "transfer_s": c.transfer_s,
                "share": c.share,
                "least_steps": c.least_steps,
            }
            for name, c in found.items()
        }
        print_json({**vars(round_), "bits_per_s": rate, "codec": round_.codec, "costs": rows})
        return
    console = make_console()
    console.print(
        f"{counted(round_.sites, 'site')}, {human_count(round_.parameters)} parameters, H = "
        f"{round_.steps} steps of {round_.step_s:.3g} s ({round_.source})"
    )
    table = Table("codec", ">per round", ">transfer", ">share of the round", ">smallest H under 5 %")
    for name, cost in found.items():
        chosen = styled(name, "bold") if name == round_.codec else name
        table.row(
            chosen,
            human_bytes(cost.bytes),
            human_time(cost.transfer_s),
            f"{cost.share:.1%}",
            f"{cost.least_steps:,}",
        )
    console.print(table)
    console.print("`int8, streamed` would send the model in parts during training; it is not implemented")


def aggregate(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="A B ...", help="Models in any format, or members that sites published."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="The directory to create.")],
    base: Annotated[
        Path | None,
        typer.Option(help="The global model they started from, of an earlier `fed aggregate` or any model."),
    ] = None,
    weights: Annotated[
        list[float] | None, typer.Option(help="One weight per model. Default: tokens of members, else equal.")
    ] = None,
    optimizer: Annotated[
        Literal["fedavg", "nesterov", "fedadam"], typer.Option(help="The outer optimizer.")
    ] = "fedavg",
    lr: Annotated[
        float | None, typer.Option(help="Outer learning rate; by default that of the optimizer.")
    ] = None,
    momentum: Annotated[float, typer.Option(help="Outer momentum.")] = 0.9,
    as_json: AsJson = False,
) -> None:
    """Aggregate models or members into the next global model, with the outer optimizer's state beside it.

    Models are read and written in parts, so memory does not grow with them. OUT is a Hugging Face directory
    in fp32 and may be the --base of the next aggregation.

    Example: arriero fed aggregate site-a site-b -o merged --weights 3 1
    """
    from arriero.federate.aggregation import aggregate_models
    from arriero.federate.schema import OuterSection, with_numbers

    outer = with_numbers(OuterSection(optimizer=optimizer, lr=lr, momentum=momentum), 1)
    values = {"name": optimizer, "lr": outer.lr, "momentum": outer.momentum}
    console = make_console(as_json)
    with byte_progress(console, "aggregating", 0) as advance:
        made = aggregate_models(models, out, base, weights, values, advance)
    if as_json:
        print_json(
            {"model": str(out), "sha256": made.model, **made.model_dump(include={"members", "cosines"})}
        )
        return
    table = Table("member", ">weight", ">norm", ">mean cosine")
    total = sum(each.weight for each in made.members)
    for each in made.members:
        cosine = _mean_cosine(made, each.site, each.round)
        shown = "" if cosine is None else f"{cosine:.3f}"
        table.row(each.site, f"{each.weight / total:.1%}", f"{each.norm:.3g}", shown)
    console.print(table)
    console.print(f"[bold]model[/]  {escape(str(out))} ({made.model[:12]})")
