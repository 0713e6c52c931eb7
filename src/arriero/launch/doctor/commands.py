"""The verb `arriero doctor`."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from arriero.config.options import AsJson
from arriero.errors import UserError
from arriero.launch.doctor.check import Check, Finding, Status, run_checks, user_check, worst
from arriero.launch.doctor.interfaces import default_interface, fabric_devices, interfaces, propose
from arriero.ui import StageProgress, Table, make_console, print_json, styled

_COLOURS: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}
NODE_S = 60.0


def node_checks(directory: Path, devices: int | None, commands: list[str]) -> list[Check]:
    """Return the checks of one node, the quick ones first."""
    from arriero.launch.doctor import devices as device_checks
    from arriero.launch.doctor import host

    return [
        Check("limits", host.check_limits),
        Check("environment", host.check_environment),
        Check("container", host.check_container),
        Check("names", host.check_names, 15),
        Check("clock", host.check_clock),
        Check("memory", host.check_memory),
        Check("shared memory", host.check_shm),
        *(user_check(command) for command in commands),
        Check("disk", lambda: host.check_disk(directory), 30),
        Check("versions", host.check_versions, 45),
        Check("devices", lambda: device_checks.check_devices(devices), 45),
        Check("matmul", device_checks.check_matmul, 45),
        Check("bandwidth", device_checks.check_bandwidth, 30),
    ]


def doctor(
    directory: Annotated[Path, typer.Option("--dir", help="Folder of runs, whose disk is checked.")] = Path(
        "runs"
    ),
    devices: Annotated[int | None, typer.Option(min=0, help="GPUs per node; default: as Slurm says.")] = None,
    commands: Annotated[
        list[str],
        typer.Option("--check", metavar="COMMAND", help="A shell command that must exit with 0. Repeatable."),
    ] = [],
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for the checks of one node.")] = NODE_S,
    detect: Annotated[
        bool, typer.Option("--detect", help="Propose network interfaces for NCCL, RCCL and gloo.")
    ] = False,
    allocation: Annotated[
        bool,
        typer.Option("--allocation", help="Check all nodes of this Slurm job and the network between them."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With --allocation, required: folder of the results."),
    ] = None,
    exclude: Annotated[
        str, typer.Option(metavar="NODES", help="With --allocation: nodes to leave out.")
    ] = "",
    exclude_slow: Annotated[
        bool, typer.Option("--exclude-slow", help="Count nodes with a slow network as failing.")
    ] = False,
    wrap: Annotated[
        str, typer.Option(help="With --allocation: prefix of each command: 'apptainer exec --nv image.sif'.")
    ] = "",
    as_json: AsJson = False,
    node_answer: Annotated[Path | None, typer.Option(hidden=True)] = None,
    fabric_store: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check this node, or all nodes of a Slurm allocation, before a run starts.

    Each check passes, warns or fails and says what to do. A check that exceeds its time limit
    fails. Exit code 0 if nothing failed, 1 if a check failed, 2 if the checks could not run.

    Example: arriero doctor --dir runs
    """
    if detect:
        _detect(as_json)
        return
    if fabric_store is not None:
        from arriero.launch.doctor.fabric import take_part

        take_part(fabric_store, timeout)
        return
    if allocation:
        from arriero.launch.doctor.allocation import Examination, examine, print_report

        if out is None:
            raise UserError("--allocation needs --out FOLDER", "name a folder that all nodes can write")
        asked = Examination(directory, out, tuple(commands), devices, timeout, exclude, exclude_slow, wrap)
        report = examine(asked, make_console(as_json))
        print_json(report) if as_json else print_report(report)
        raise typer.Exit(bool(report["failing"]))
    if out is not None:
        raise UserError("--out is for --allocation", "use `arriero doctor --json > FILE` for one node")
    checks, results = node_checks(directory, devices, commands), []
    with StageProgress(make_console(as_json)) as progress:
        for result in run_checks(checks, time.monotonic() + timeout):
            results.append(result)
            progress("checks", len(results), len(checks))
    status = worst([each.status for each in results])
    if node_answer is not None:
        from arriero.launch.doctor.allocation import write_answer

        write_answer(node_answer, results)
    elif as_json:
        print_json({"status": status, "checks": [asdict(each) for each in results]})
    else:
        _print_results(results)
    raise typer.Exit(status == "fail")


def _print_results(results: list[Finding]) -> None:
    table = Table("check", "", "found", "what to do", no_wrap=("check", ""))
    for each in results:
        table.row(each.name, styled(each.status, _COLOURS[each.status]), each.found, each.todo)
    console = make_console()
    console.print(table)
    counts = {status: sum(each.status == status for each in results) for status in _COLOURS}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))


def _detect(as_json: bool) -> None:
    found, devices = interfaces(), fabric_devices()
    proposals = propose(found, devices, default_interface())
    if as_json:
        rows = [asdict(each) | {"leaves_node": each.leaves_node} for each in found]
        print_json({"interfaces": rows, "fabric": devices, "env": {p.variable: p.value for p in proposals}})
        return
    console = make_console()
    table = Table("interface", "kind", "state", "address", ">Gbit/s")
    for each in found:
        speed = f"{each.speed / 1000:g}" if each.speed else "?"
        table.row(each.name, each.kind, "up" if each.up else "down", each.address or "none", speed)
    console.print(table)
    console.print(f"fabric devices: {', '.join(devices) or 'none'}")
    if not proposals:
        raise UserError(
            "no interface with an address leads to other nodes",
            "run this on a compute node, not in a sandbox",
        )
    console.print("\nProposed for the environment of a run:")
    for each in proposals:
        console.plain(f'{each.variable} = "{each.value}"   # {each.reason}')
