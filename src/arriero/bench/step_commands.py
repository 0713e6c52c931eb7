"""`arriero bench step`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arriero.config.options import RunFile, Sets, refuse_unwritable
from arriero.errors import UserError
from arriero.train.commands import Nproc
from arriero.ui import Console, facts, make_console

if TYPE_CHECKING:
    from arriero.bench.result import Energy, Gate, Rate, Result, Timing

PROFILED_STEPS = 3
_SYNTHETIC = "data.sources=[{path='builtin:synthetic'}]"

Steps = Annotated[int, typer.Option(min=1, help="Timed steps.")]
Warmup = Annotated[int, typer.Option(min=0, help="Steps before them, in which blocks are compiled.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result there, too.", show_default=False)]
Profile = Annotated[bool, typer.Option(help="Some steps more, to show where the time goes.")]
NoGate = Annotated[
    bool, typer.Option("--no-gate", help="Do not check the loss first; the result says that nobody did.")
]
GateFrom = Annotated[
    Path | None,
    typer.Option(
        "--gate-from",
        metavar="FILE",
        help="A result whose gate serves here too, if it is of the same mode, device and code.",
        show_default=False,
    ),
]
Documents = Annotated[
    str | None,
    typer.Option(
        metavar="MEAN[:SIGMA]",
        help="Train on packed random documents with a document mask; their lengths in tokens are log-normal "
        "(sigma 1 unless given; 0 makes all equally long).",
        show_default=False,
    ),
]
Name = Annotated[
    str | None, typer.Option(help="What to call it; the run's name unless given.", show_default=False)
]


def step(
    run_file: RunFile = None,
    sets: Sets = [],
    nproc: Nproc = None,
    steps: Steps = 20,
    warmup: Warmup = 5,
    json: Json = None,
    profile: Profile = True,
    no_gate: NoGate = False,
    gate_from: GateFrom = None,
    documents: Documents = None,
    name: Name = None,
) -> None:
    """Measure the training step of a run: speed, memory, energy, and where the time goes.

    It is trained as `arriero train` would train it, on synthetic text if no run file names another; data,
    clipping, optimizer and logging are timed, evaluation, checkpoints and the export are not done.
    A mode other than plain fp32 first trains a small model beside fp32; if that differs, no speed is shown.

    Example: arriero bench step --set model.preset=llama3.2-1b --set data.seq_len=8192
    --set train.batch='32768 tok' --json result.json
    """
    from arriero.bench.result import Result
    from arriero.config.load import load_run
    from arriero.model.presets import expand

    config = load_run(run_file, [*([] if run_file else [_SYNTHETIC]), *sets], expand).config
    if config.data.packing == "none":
        raise UserError(
            "with data.packing 'none' every step is other work", "set it to 'concat' or 'bestfit'"
        )
    refuse_unwritable("--json", json)
    earlier = Result.read(gate_from) if gate_from else None
    # read when torch is loaded: its profiler tells standard error when it begins
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from arriero.bench.machine import process_started
    from arriero.bench.measure import Plan
    from arriero.bench.step import DocumentLengths, benchmark
    from arriero.interrupt import Interrupted

    lengths = DocumentLengths.parse(documents) if documents is not None else None
    plan = Plan(warmup, steps, PROFILED_STEPS if profile else 0, process_started())
    console = make_console()
    known_as = name or (config.run.name if run_file else str(config.model.preset or config.model.family))
    try:
        with console.status("") as status:
            found = benchmark(
                config, known_as, plan, nproc or 1, not no_gate, earlier, status.update, lengths
            )
    except Interrupted as stop:
        raise typer.Exit(128 + stop.number) from None
    if found is None:
        return
    if not isinstance(found, Result):
        show_failed_gate(console, found)
        raise typer.Exit(1)
    show(console, found)
    if json is not None:
        found.write(json)
        console.plain(f"written to {json}")


def show_failed_gate(console: Console, gate: "Gate") -> None:
    console.print("[bold red]the gate does not hold: no speed[/]")
    if gate.error:
        console.plain(gate.error)
    for what, found, bound in (
        ("loss", gate.loss, gate.loss_bound),
        ("first gradient norm", gate.norm, gate.norm_bound),
    ):
        apart = "is not a number" if found is None else f"is {found:.2e} off"
        console.print(
            f"  {what} {apart}, of {bound:.1e} allowed ({gate.model}, {gate.steps} steps beside fp32)"
        )


def show(console: Console, result: "Result") -> None:
    console.print(facts(_rows(result)))


def _rows(result: "Result") -> list[tuple[str, str, str]]:
    timing, work, losses = result.timing, result.work, result.losses
    memory, energy = result.memory, result.energy
    reserved = "of this process" if memory.reserved_gib is None else f"{memory.reserved_gib:.2f} GiB reserved"
    norms = (losses.first_grad_norm, losses.last_grad_norm)
    sequences = work.tokens_per_step // work.seq_len
    rows = [
        ("work", f"{result.name}, {sequences} x {work.seq_len}", f"{work.parameters:,} parameters"),
        (
            "mode",
            result.mode,
            f"{result.layout or 'one process'}; {result.device.name} x {result.device.count}",
        ),
        ("gate", *gate_words(result.gate)),
        ("speed", f"{timing.tokens_per_s:,.0f} tok/s", "of all ranks, at the median"),
        ("step", f"{timing.median_ms:,.1f} ms", _steps_words(timing)),
        ("start", f"{timing.start_up_s:.1f} s", "from the start of the process to the first step done"),
        ("memory", f"{memory.allocated_gib:.2f} GiB", f"at most, {reserved}"),
        ("energy", *_energy_words(energy)),
        (
            "loss",
            f"{losses.first:.4f} -> {losses.last:.4f}",
            f"steps {losses.first_step} and {losses.last_step}",
        ),
        ("gradient", " -> ".join(map(_number, norms)), "norm before clipping"),
    ]
    rows += map(_rate_words, result.rates)
    if result.breakdown is not None:
        for category, time in result.breakdown.parts.items():
            share = time / result.breakdown.step_ms
            rows.append((category, f"{time:,.2f} ms", f"{share:.1%} of a profiled step"))
    rows.append(("left out", ", ".join(result.left_out), ""))
    return rows


def _steps_words(timing: "Timing") -> str:
    if len(timing.step_ms) == 1:
        return timing.spread
    return (
        f"{timing.min_ms:,.1f} to {timing.max_ms:,.1f}, half of them {timing.lower_quartile_ms:,.1f} to "
        f"{timing.upper_quartile_ms:,.1f}; {len(timing.step_ms)} steps after {timing.warmup_steps}"
    )


def _rate_words(rate: "Rate") -> tuple[str, str, str]:
    if rate.tflops_per_device is None:
        return rate.convention, "not counted", rate.formula
    shares = f"  MFU {rate.mfu:.1%}" if rate.mfu is not None else ""
    if rate.mfu_of_float8_peak is not None:
        shares += f" (of the float8 peak {rate.mfu_of_float8_peak:.1%})"
    return rate.convention, f"{rate.tflops_per_device:,.4g} TFLOP/s{shares}", rate.formula


def gate_words(gate: "Gate") -> tuple[str, str]:
    if not gate.needed:
        return "not needed", "plain fp32 is the reference"
    if gate.holds is None:
        return "NOT JUDGED", "nobody has checked the loss of this mode"
    return (
        "holds" if gate.holds else "does not hold",
        f"loss {gate.loss:.1e} of {gate.loss_bound:.1e} allowed, gradient norm {gate.norm:.1e} of "
        f"{gate.norm_bound:.1e}; {gate.model}, {gate.steps} steps",
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _energy_words(energy: "Energy | None") -> tuple[str, str]:
    if energy is None:
        return "not reported", "the device has no meter"
    return f"{energy.joules_per_step:,.1f} J a step", f"{energy.tokens_per_joule:,.1f} tokens per J"
