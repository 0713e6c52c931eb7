"""`arriero replay`: repeat steps of a run and compare them with what it recorded."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arriero.checkpoint.commands import Run, run_directory_at
from arriero.config.options import AsJson, Sets
from arriero.errors import UserError
from arriero.ui import Console, Table, byte_progress, make_console, print_json, styled
from arriero.units import counted

if TYPE_CHECKING:
    from arriero.evaluate.replay import Verdict
    from arriero.evaluate.replay_plan import Plan


def replay(
    run: Run,
    start: Annotated[
        int | None,
        typer.Option(
            "--from",
            min=0,
            help="Step of the checkpoint to start from; default: the last one with later steps.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to repeat; default: 5, or up to the first logged one.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Number of ranks on this machine; default: as the run."),
    ] = None,
    sets: Sets = [],
    workdir: Annotated[
        Path | None, typer.Option(help="Folder for temporary files; default: the system's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Repeat recorded steps of a run from a checkpoint and compare losses, gradient norms and weights.

    If the run has run.deterministic, all numbers must be bit-identical on the same layout and device.
    Otherwise, and on another layout (--nproc, srun, torchrun, --set parallel.tp=2), they must agree within
    the bounds of `bench parity`. Names the first step that differs and exits with code 1. The run directory
    is not changed.

    Example: arriero replay runs/demo --nproc 2
    """
    from arriero.evaluate.replay import damage_of, remarks
    from arriero.evaluate.replay import replay as repeat
    from arriero.evaluate.replay_plan import plan_replay, temporary_folder
    from arriero.parallel.world import world_from

    console, world = make_console(as_json), world_from()
    with temporary_folder(workdir) as folder:
        plan = plan_replay(run_directory_at(run), start, steps, nproc, sets, folder)
        if not world.is_leader:
            try:
                repeat(plan, folder, lambda *_: None)
            except UserError:
                # rank 0 reports it
                raise typer.Exit(1) from None
            return
        size = plan.saved.manifest.size if plan.saved and plan.saved.manifest else 0
        with byte_progress(console, "reading the checkpoint", size) as advance:
            damage = damage_of(plan, advance)
        if damage:
            if world.size > 1:
                with suppress(UserError):
                    repeat(plan, folder, lambda *_: None, UserError(damage, "see rank 0"))
            if as_json:
                print_json({"run": str(plan.record.run), "holds": False, "first_difference": damage})
            else:
                console.plain(f"differs: {damage}", "bold red")
            raise typer.Exit(1)
        ranks = counted(plan.ranks, "rank")
        console.print(f"repeating steps {plan.start + 1} to {plan.end} of {plan.record.run} on {ranks}")

        def show(step: int, loss: float) -> None:
            console.print(f"  step {step}  loss {loss:.6f}")

        verdict = repeat(plan, folder, show)
        assert verdict is not None
    if as_json:
        print_json(verdict.to_dict() | {"remarks": list(remarks(plan, verdict))})
    else:
        _print(console, plan, verdict)
        for remark in remarks(plan, verdict):
            console.plain(remark, "dim")
    raise typer.Exit(0 if verdict.first is None else 1)


def _print(console: Console, plan: "Plan", verdict: "Verdict") -> None:
    table = Table(">step", ">recorded loss", ">replayed", ">recorded norm", ">replayed", "")
    for row in verdict.rows:
        pairs = [row.get(key) for key in ("loss", "grad_norm")]
        shown = [_shown(pair, side) for pair in pairs for side in ("recorded", "replayed")]
        state = "equal" if row["bit_equal"] else "within bounds"
        table.row(row["step"], *shown, styled("differs", "bold red") if row["problem"] else state)
    console.print(table)
    for each in verdict.checkpoints:
        if not each["problem"]:
            off = f"relative difference {each['largest_difference']:.1e}" if each["unequal"] else "equal"
            console.print(f"checkpoint of step {each['step']}: {each['tensors']} tensors, {off}")
    if verdict.first is not None:
        console.plain(f"differs at {verdict.first}", "bold red")
        return
    equal = all(row["bit_equal"] for row in verdict.rows) and not verdict.has_unequal_tensors
    how = "bit by bit" if equal else "within the bounds"
    console.print(f"[green]holds:[/] steps {plan.start + 1} to {plan.end} were repeated {how}")


def _shown(pair: Mapping[str, float | None] | None, side: str) -> str:
    if pair is None:
        return ""
    value = pair[side]
    return "not finite" if value is None else f"{value:.7g}"
