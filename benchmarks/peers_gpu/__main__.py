"""`make peers-gpu`: torchtitan and Arriero on one GPU in one call, in turns, dense and with document masks.

Two GPUs of one model differ by some percent, and so does one GPU by its temperature. So the systems take
turns in one call, and a page shows only pairs from such a call.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from arriero.bench.result import StepResult, replace_section
from arriero.errors import UserError
from benchmarks.script import run_script

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "peers" / "h200.json"
PAGE = ROOT / "docs" / "performance.md"
TOKENS, LENGTH = 8192, 8192
MODEL = ("model.preset=llama3.1-8b", f"data.seq_len={LENGTH}", f"train.batch={TOKENS} tok")
PRECISION = ("precision.master=bf16", "optim.state=bf16", "memory.activation_checkpointing=none")


@dataclass(frozen=True)
class Work:
    """A training step that both systems run; `documents` is the mean length of packed documents."""

    name: str
    documents: int | None = None
    float8: bool = False


@dataclass(frozen=True)
class Measurement:
    """One process of one system; memory in GiB, energy per step."""

    work: str
    system: str
    step_ms: list[float]
    allocated_gib: float
    reserved_gib: float | None
    joules_per_step: float | None
    loss_checked: bool | None = None

    @property
    def tokens_per_s(self) -> float:
        return TOKENS / statistics.median(self.step_ms) * 1e3


WORKS = (
    Work("bf16, one document"),
    Work("bf16, packed documents of 1,000", documents=1000),
    Work("float8, one document", float8=True),
    Work("float8, packed documents of 1,000", documents=1000, float8=True),
)


def main(
    out: Annotated[Path, typer.Option(help="Result as JSON.")] = RESULT,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each system per work.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Timed steps of each process.")] = 20,
    warmup: Annotated[int, typer.Option(min=1)] = 6,
    only: Annotated[str, typer.Option(help="Works whose name contains this.")] = "",
    attention: Annotated[
        str, typer.Option(help="torchtitan's kernel for documents: flex or varlen.")
    ] = "varlen",
    limit: Annotated[float, typer.Option(help="Start no process after this many seconds.")] = 1e9,
    gate: Annotated[bool, typer.Option(help="Check Arriero's loss in the first round.")] = True,
    page: Annotated[bool, typer.Option(help="Write the table into docs/performance.md.")] = True,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Write the table of an earlier result.")
    ] = False,
) -> None:
    """Measure both systems in turns; the result is written after each process."""
    if page_only:
        write_page(out)
        return
    import torch

    if subprocess.run([sys.executable, "-c", "import torchtitan"], capture_output=True).returncode:
        raise UserError("torchtitan cannot be imported", "run `make peers-gpu`, which installs it")
    began, done = time.monotonic(), []
    about = {"time": time.strftime("%Y-%m-%dT%H:%M"), "torch": torch.__version__, "tokens": TOKENS}
    for number in range(rounds):
        for work in (each for each in WORKS if only in each.name):
            for system in ("torchtitan", "arriero"):
                if time.monotonic() - began > limit:
                    continue
                if system == "arriero":
                    found, facts = _arriero(work, steps, warmup, gate and number == 0)
                else:
                    found, facts = _titan(work, steps, warmup, attention)
                about |= facts
                done.append(found)
                print(
                    f"{work.name:34} {system:11} {found.tokens_per_s:>9,.0f} tok/s "
                    f"{found.allocated_gib:6.1f} GiB {time.monotonic() - began:5.0f} s",
                    flush=True,
                )
                out.parent.mkdir(parents=True, exist_ok=True)
                content = about | {"measurements": [asdict(each) for each in done]}
                out.write_text(json.dumps(content, indent=1) + "\n")
    if page:
        write_page(out)


def _arriero(work: Work, steps: int, warmup: int, gate: bool) -> tuple[Measurement, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        options = ["--steps", str(steps), "--warmup", str(warmup), "--no-profile", "--json", str(out)]
        options += [] if gate else ["--no-gate"]
        options += ["--documents", str(work.documents)] if work.documents else []
        float8 = ("precision.float8=tensorwise",) if work.float8 else ()
        options += [word for each in (*MODEL, *PRECISION, *float8) for word in ("--set", each)]
        _run("-m", "arriero", "bench", "step", *options)
        found = StepResult.read(out)
    energy = found.energy.joules_per_step if found.energy else None
    measured = Measurement(
        work.name, "arriero", list(found.timing.step_ms), found.memory.allocated_gib,
        found.memory.reserved_gib, energy, found.gate.holds,
    )  # fmt: skip
    commit = found.code.commit and f"{found.code.commit}{'+' if found.code.dirty else ''}"
    return measured, {"arriero": commit, "device": found.device.name, "power": found.device.power_limit}


def _titan(work: Work, steps: int, warmup: int, attention: str) -> tuple[Measurement, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        options = ["--steps", str(steps), "--warmup", str(warmup), "--attention", attention]
        options += ["--documents", str(work.documents)] if work.documents else []
        options += ["--float8"] if work.float8 else []
        _run("-m", "benchmarks.peers_gpu.titan", str(out), *options)
        found = json.loads(out.read_text())
    measured = Measurement(
        work.name, "torchtitan", found["step_ms"], found["allocated_gib"], found["reserved_gib"],
        found["joules_per_step"],
    )  # fmt: skip
    return measured, {"torchtitan": found["version"], "attention": attention}


def _run(*arguments: str) -> None:
    """Run a Python process in the repository; raise UserError with the end of its output if it fails."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(arguments[:4])} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def write_page(result: Path) -> None:
    """Replace the table of peers in docs/performance.md."""
    table = "\n".join(_table(json.loads(result.read_text()))) + "\n"
    text = replace_section(PAGE.read_text(encoding="utf-8"), "peers", table, str(PAGE))
    PAGE.write_text(text, encoding="utf-8")


def _table(found: dict[str, Any]) -> Iterator[str]:
    runs = [Measurement(**each) for each in found["measurements"]]
    checked = any(run.loss_checked for run in runs)
    yield (
        f"{found['device']}, {found['power']}, torch {found['torch']}, torchtitan {found['torchtitan']} "
        f"({found['attention']} attention for documents), Arriero {(found['arriero'] or 'no commit')[:7]}, "
        f"{found['time']}. llama3.1-8b, 1 x {LENGTH:,}, bf16 weights and AdamW state, compiled, no "
        "activation checkpointing; median step of each process, in the order in which they ran."
        + ("" if checked else " The loss was not checked in this call (`--no-gate`).")
        + "\n"
    )
    yield "| work | system | tok/s | ms per step | GiB allocated | GiB reserved | mJ per token | Arriero is |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for name in dict.fromkeys(run.work for run in runs):
        systems = {
            s: [run for run in runs if (run.work, run.system) == (name, s)] for s in ("torchtitan", "arriero")
        }
        # a call that ran out of time may have measured one system only
        if all(systems.values()):
            for system, turns in systems.items():
                yield _row(name, system, turns, systems)


def _row(name: str, system: str, turns: Sequence[Measurement], systems: dict[str, list[Measurement]]) -> str:
    joules = [run.joules_per_step / TOKENS * 1e3 for run in turns if run.joules_per_step]
    titan, ours = (statistics.mean(run.tokens_per_s for run in each) for each in systems.values())
    ratio = f"{ours / titan:.3f} x" if system == "arriero" else ""
    cells = (
        name,
        system,
        ", ".join(f"{run.tokens_per_s:,.0f}" for run in turns),
        ", ".join(f"{statistics.median(run.step_ms):,.1f}" for run in turns),
        f"{max(run.allocated_gib for run in turns):.1f}",
        f"{max(run.reserved_gib or 0 for run in turns):.1f}",
        ", ".join(f"{each:.1f}" for each in joules) or "not reported",
        ratio,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    run_script(main)
