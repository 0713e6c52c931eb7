"""`arriero plan`: rank layouts of a run on a cluster, explain them, and write the best into the run file."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arriero.config.load import load_run
from arriero.config.options import AsJson, RunFile, Sets, check_writable, read_size
from arriero.errors import UserError
from arriero.model.presets import expand
from arriero.plan.advice import Question, advice, write_run_file
from arriero.plan.candidates import Candidate, Plan
from arriero.plan.explain import candidate_facts, compared, plan_facts, whole_run
from arriero.plan.hardware import Cluster, cluster_names, cluster_of_device, load_cluster
from arriero.plan.measured import Measured, cached_measurements, read_measured
from arriero.report.plan_page import plan_page
from arriero.report.plan_text import show_comparison, show_nothing, show_plan, show_scaling
from arriero.ui import Console, Table, make_console, print_json
from arriero.units import counted, human_bytes

if TYPE_CHECKING:
    from arriero.parallel.simulate import Simulation

_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
_KINDS = ("none", "selective", "attention", "fraction", "full")
_SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "zero-bubble")
# candidates that are checked by `resolve`, far more than anybody reads
_KEPT = 200
_EXCLUDABLE = (*_DEGREES, *_KINDS, "sync each", *_SCHEDULES)


def plan(
    run_file: RunFile = None,
    sets: Sets = [],
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help=f"Cluster: a TOML file, or {', '.join(cluster_names())}."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of nodes; default: all of the cluster.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of devices, instead of --nodes.")] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Device type, like h100, instead of --cluster; needs --gpus."),
    ] = None,
    fix: Annotated[
        list[str],
        typer.Option(metavar="AXIS=N", help="Plan only this degree: tp=8 or tp=8,pp=2. Repeatable."),
    ] = [],
    most: Annotated[
        list[str], typer.Option("--max", metavar="AXIS=N", help="Largest degree to plan: pp=4. Repeatable.")
    ] = [],
    exclude: Annotated[
        list[str],
        typer.Option(
            metavar="WHAT",
            help=f"Do not plan an axis ({', '.join(_DEGREES)}), a kind of activation checkpointing "
            f"({', '.join(_KINDS)}: two modes mixed), a schedule ({', '.join(_SCHEDULES)}) or 'sync each'. "
            "Repeatable.",
        ),
    ] = [],
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of a device, like 70GiB; a run may fill 97 % of it."),
    ] = None,
    measured: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Files of `bench ops` and `bench comm`; default: those stored for the device.",
        ),
    ] = [],
    top: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = 10,
    explain: Annotated[
        str | None,
        typer.Option(metavar="AXIS=N,...", help="Compare the best layout with these degrees: tp=4,pp=2."),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(metavar="nodes=N,N,...", help="The best layout for each number of nodes or gpus."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the run file with the best layout.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with charts of time and memory.")
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Run a step of rank 0 of the best layout with fake tensors on this CPU, for its peak memory "
            "and collectives.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rank parallel layouts of a run on a cluster by predicted speed, without a GPU.

    Keys that the run file sets are kept. Degrees, micro-batch, activation checkpointing, resharding and
    gradient reduction that it does not set are planned. Times are predicted from data sheets, or from what
    `arriero bench ops` and `bench comm` measured. Exit code 1 if nothing fits.

    Example: arriero plan run.toml --cluster frontier --nodes 64
    """
    check_writable("--write", write)
    check_writable("--html", html)
    config = load_run(run_file, sets, expand).config
    where, devices = _target(cluster, nodes, gpus, device, what_if is None)
    question = Question(
        config,
        where,
        fix=_degrees("--fix", fix),
        most=_degrees("--max", most),
        exclude=_excluded(exclude),
        memory_limit=read_size("--memory-limit", memory_limit) if memory_limit else None,
        measured=_measurements(measured, where),
    )
    console = make_console(as_json)
    if what_if is not None:
        _what_if(console, question, what_if, as_json)
        return
    found, rates = question.plan(devices, keep=_KEPT)
    if not found.candidates:
        todo = ["--exclude leaves no candidate; remove a part of it."] if not found.rejections else []
        todo += advice(question, devices) if found.lacks_memory else []
        if as_json:
            print_json({**plan_facts(found, rates), "advice": todo})
        else:
            show_nothing(console, found, todo)
        raise typer.Exit(1)
    output = plan_facts(found, rates, top)
    other = None if explain is None else _explained(question, found, explain)
    if other is not None:
        output["compared"] = {"with": candidate_facts(other), "seconds": compared(found.best, other)}
    if write is not None:
        write_run_file(write, run_file, sets, found)
        output["written"] = str(write)
    if html is not None:
        html.write_text(plan_page(plan_facts(found, rates)), encoding="utf-8")
        output["html"] = str(html)
    simulated = _simulated(console, found, as_json) if simulate else None
    if simulated is not None:
        output["simulation"] = asdict(simulated)
    if as_json:
        print_json(output)
        return
    show_plan(console, found, rates, top)
    if other is not None:
        show_comparison(console, found.best, other)
    if write is not None:
        console.plain(f"written: {write}")
    if html is not None:
        console.plain(f"written: {html}")
    if simulated is not None:
        _show_simulation(console, simulated)


def _simulated(console: Console, found: Plan, as_json: bool) -> "Simulation":
    """Run a step of rank 0 of the best candidate with fake tensors."""
    from arriero.train.build import simulate

    resolved = found.resolved()
    if not as_json:
        console.plain(f"simulating a step of rank 0 of {counted(found.devices, 'rank')} ({resolved.layout})")
    return simulate(resolved)


def _show_simulation(console: Console, simulated: "Simulation") -> None:
    table = Table("collective", ">ranks", ">per step", ">result bytes", no_wrap=("collective",))
    for each in simulated.collectives:
        table.row(each.kind, f"{each.group:,}", f"{each.count:,}", human_bytes(each.bytes))
    console.print(table)
    beside = ""
    if simulated.predicted is not None:
        beside = f", predicted {human_bytes(simulated.predicted)}"
    console.plain(f"simulated peak of an uncompiled step: {human_bytes(simulated.peak)}{beside}")


def _target(
    cluster: str | None, nodes: int | None, gpus: int | None, device: str | None, needs_number: bool
) -> tuple[Cluster, int]:
    """Return the cluster and the number of devices that the options name."""
    example = "for example --cluster frontier --nodes 64, or --device h100-80g --gpus 16"
    if cluster is None and device is None:
        raise UserError("a plan needs a cluster: give --cluster or --device", example)
    if cluster is not None and device is not None:
        raise UserError("--cluster and --device exclude each other", example)
    if nodes is not None and gpus is not None:
        raise UserError("--nodes and --gpus exclude each other", "give one of them")
    if needs_number and device is not None and nodes is None and gpus is None:
        raise UserError("--device needs the number of devices", "add --gpus 16")
    found = load_cluster(cluster) if cluster is not None else cluster_of_device(device or "", gpus or 1)
    per_node = found.devices_per_node
    count = gpus or (nodes or found.nodes) * per_node
    if cluster is not None and count > found.size:
        size = counted(found.size, "device")
        raise UserError(f"{found.name} has {size}, not {count:,}", "use fewer, or another cluster file")
    _check_full_nodes(count, per_node)
    return found, count


def _check_full_nodes(count: int, per_node: int) -> None:
    if count > per_node and count % per_node:
        raise UserError(f"{count} devices do not fill nodes of {per_node}", f"use a multiple of {per_node}")


def _measurements(files: Sequence[Path], cluster: Cluster) -> Measured | None:
    return read_measured(files) if files else cached_measurements(cluster.device.name)


def _degrees(option: str, texts: Sequence[str]) -> dict[str, int]:
    """Read degrees like tp=8,pp=2."""
    found: dict[str, int] = {}
    for part in (part for text in texts for part in text.split(",")):
        axis, equals, value = (piece.strip() for piece in part.partition("="))
        if axis not in _DEGREES or not equals or not value.isdecimal() or int(value) < 1:
            axes = ", ".join(_DEGREES)
            raise UserError(f"{option} {part} is not a degree", f"write it like {option} tp=8; axes: {axes}")
        if found.get(axis, int(value)) != int(value):
            what = f"{option} {axis}={found[axis]} and {option} {part} contradict each other"
            raise UserError(what, "give one of them")
        found[axis] = int(value)
    return found


def _excluded(texts: Sequence[str]) -> tuple[str, ...]:
    names = [name.strip() for text in texts for name in text.split(",")]
    for name in names:
        if name not in _EXCLUDABLE:
            raise UserError(f"--exclude {name} is unknown", f"use {', '.join(_EXCLUDABLE)}")
    return tuple(names)


def _explained(question: Question, found: Plan, text: str) -> Candidate:
    """Return the best candidate of the degrees that --explain names, or raise with why there is none."""
    degrees = _degrees("--explain", [text])
    fix = {axis: degree for axis, degree in question.fix.items() if axis not in degrees}
    other, _ = replace(question, fix=fix, explain=degrees).plan(found.devices, keep=1)
    if other.candidates:
        return other.best
    reasons = "; ".join(f"{each.reason} (for example {each.example})" for each in other.rejections[:3])
    raise UserError(f"no candidate has {text}: {reasons}", f"the best is {found.best.choice}")


def _what_if(console: Console, question: Question, text: str, as_json: bool) -> None:
    """Show how the best candidate changes with the number of devices."""
    unit, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if unit not in ("nodes", "gpus") or not all(value.isdecimal() and int(value) for value in values):
        raise UserError(f"--what-if {text} is not a list", "write it like --what-if nodes=64,128,256")
    rows: list[tuple[int, Plan, dict[str, Any] | None]] = []
    for value in map(int, values):
        per_node = question.cluster.devices_per_node
        each = per_node if unit == "nodes" else 1
        _check_full_nodes(value * each, per_node)
        found, rates = question.plan(value * each, keep=1)
        rows.append((value, found, whole_run(found, found.best, rates) if found.candidates else None))
    if not as_json:
        show_scaling(console, unit, rows)
        return
    facts = [
        {
            unit: value,
            "devices": found.devices,
            "best": candidate_facts(found.best) if found.candidates else None,
            "whole_run": run,
        }
        for value, found, run in rows
    ]
    print_json({"what_if": facts})
