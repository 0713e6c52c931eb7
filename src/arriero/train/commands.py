"""`arriero train` and its terminal output: derived settings, progress, the result."""

import math
import statistics
import sys
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer

from arriero.config.options import RunFile, Sets
from arriero.events import Output
from arriero.interrupt import Interrupted
from arriero.model.presets import expand
from arriero.train.hooks import Hook
from arriero.train.plan_file import predicted_and_measured
from arriero.ui import Console, LiveBar, StageProgress, Table, Text, escape, facts, make_console, panel
from arriero.units import JOULES_PER_KWH, human_count, human_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arriero.checkpoint.manager import SaveReport
    from arriero.data.order.streams import SourceForecast
    from arriero.train.guard import BadStep
    from arriero.train.metrics import StepMetrics
    from arriero.train.run import RunResult
    from arriero.train.saving import Outcome
    from arriero.train.session import Session
    from arriero.train.stragglers import SlowRank

Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, max=1024, help="Number of ranks to start on this machine.", show_default="1"
    ),
]


def train(run_file: RunFile = None, sets: Sets = [], nproc: Nproc = None) -> None:
    """Train the model that the run file describes.

    Without a run file it trains a small Llama on the source of Python's standard library, which needs no
    download, account or GPU.
    A run that was stopped or killed resumes from its newest valid checkpoint, on any number of ranks.
    Several ranks are started by --nproc, torchrun or srun; \\[parallel] sets the layout, FSDP by default.

    Example: arriero train run.toml --set train.horizon='500 steps' --nproc 4
    """
    # handlers must exist before the slow imports
    from arriero.interrupt import Interrupted, Requests

    try:
        with Requests(final=True):
            _train(run_file, sets, nproc)
    except Interrupted as stop:
        raise typer.Exit(stop.exit_code) from None
    finally:
        Output(sys.stdout).finish()


def _train(run_file: RunFile, sets: Sets, nproc: Nproc) -> None:
    from arriero.config.load import load_run

    # before torch is imported, so that mistakes are reported at once
    config = load_run(run_file, sets, expand).config
    from arriero.parallel.world import world_from
    from arriero.train.run import run

    console = make_console()
    console.file = cast("IO[str]", Output(sys.stdout))
    result = run(config, [ConsoleProgress(console)], nproc=None if nproc == 1 else nproc)
    if world_from().is_leader and not result.has_trained:
        show_finished(console, result)


class ConsoleProgress(Hook):
    """Print decisions, progress and the result of a run.

    Progress is a bar on a terminal; elsewhere one line per tenth of the run, and at least one per minute.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._metrics: StepMetrics | None = None
        self._step_s: deque[float] = deque(maxlen=100)
        self._tenth = 0
        self._printed = time.monotonic()
        self._saved = self._skipped = 0
        self._preparation = StageProgress(console, "preparing the dataset (once)")
        self._progress = LiveBar(console)

    def on_prepare(self, stage: str, done: int, total: int) -> None:
        self._preparation(stage, done, total)

    def on_start(self, session: "Session") -> None:
        self._preparation.stop()
        self._start = time.monotonic() - session.record.outcome.seconds
        self._saved = session.record.outcome.steps
        self._skipped = session.optimizer.skipped
        for remark in session.record.remarks:
            self._console.plain(remark, "yellow")
        self._console.print(_settings(session))
        self._console.print(sources_table(session.data.forecasts, session.config.data.packing))
        for forecast in session.data.forecasts:
            for remark in forecast.remarks:
                self._console.plain(f"{forecast.name}: {remark}")
        self._progress.start("step 0", 1.0, "evaluating the initial model")

    def on_step(self, session: "Session", step: int, tokens: int) -> None:
        if not self._console.is_terminal:
            return
        share = self._share(session, tokens)
        self._progress.update(share, self._numbers(session, step), f"step {_step_of_total(session, step)}")

    def on_metrics(self, session: "Session", metrics: "StepMetrics") -> None:
        self._metrics = metrics
        self._step_s.append(metrics.step_s)
        if (skipped := metrics.skipped - self._skipped) > 0:
            which = f"{skipped} update{'s' if skipped > 1 else ''} skipped up to step {metrics.step}"
            self._console.print(f"{which}: loss or gradient norm not finite", style="yellow")
        self._skipped = metrics.skipped
        self.on_step(session, metrics.step, metrics.tokens)
        tenth = int(10 * self._share(session, metrics.tokens))
        late = time.monotonic() - self._printed > 60
        if not self._console.is_terminal and (tenth > self._tenth or late or metrics.step == 1):
            self._tenth, self._printed = tenth, time.monotonic()
            numbers = self._numbers(session, metrics.step)
            self._console.print(f"step {_step_of_total(session, metrics.step)}  {numbers}")

    def on_slow_rank(self, session: "Session", slow: "SlowRank") -> None:
        where = session.record.nodes[slow.rank]
        self._console.print(f"rank {slow.rank} on {where} slows all ranks down: {slow.why}", style="yellow")

    def on_bad_step(self, session: "Session", bad: "BadStep", samples: tuple[int, int]) -> None:
        text = f"step {bad.step}: {bad.reason}; its {samples[1] - samples[0]} samples are not trained on"
        self._console.print(f"{text} (events.jsonl names the documents)", style="yellow")

    def on_rollback(self, session: "Session", to_step: int | None, about: dict[str, Any]) -> None:
        done = f"returned to step {to_step}" if to_step is not None else "no checkpoint to return to"
        self._console.print(f"{about['reason']} at step {about['bad_steps'][0]}: {done}", style="yellow")

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        for name, mean in (("", loss), *session.eval_losses.items()):
            text = f"validation loss {mean:.3f}  perplexity {math.exp(min(mean, 700)):.1f}"
            self._console.plain(f"step {_step_of_total(session, step)}  {text}{name and f'  {name}'}")

    def on_save(self, session: "Session", report: "SaveReport") -> None:
        if report.error is not None:
            text = f"the checkpoint of step {report.step} is NOT saved: {report.error}"
            self._console.print(f"[bold red]{escape(text)}[/]")
            return
        self._saved = report.step
        for warning in report.warnings:
            self._console.plain(warning, "yellow")
        if report.still_fit == 0:
            text = f"step {report.step} is saved; the next checkpoint will not fit on the disk"
            self._console.print(f"[bold red]{escape(text)}[/]")

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        from arriero.train.finish import sample

        self._progress.stop()
        show_outcome(self._console, session, outcome, sample(session, outcome.model))

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        self._progress.stop()
        if isinstance(error, Interrupted):
            # a finished run that is only exported has not started
            saved = self._saved if self._progress.started else step
            then = f"resumes from step {saved}" if saved else "starts from scratch: nothing is saved"
            text = f"stopped by {error.name} at step {step}; the same command {then}"
            self._console.print(text)

    def on_close(self) -> None:
        self._preparation.stop()
        self._progress.stop()

    def _share(self, session: "Session", tokens: int) -> float:
        if session.total_tokens:
            return tokens / session.total_tokens
        return min(1.0, (time.monotonic() - self._start) / session.config.train.horizon.amount)

    def _seconds_left(self, session: "Session", step: int) -> float:
        """Estimate the remaining time from the median time of the logged steps."""
        if not session.total_steps:
            return max(0.0, session.config.train.horizon.amount - (time.monotonic() - self._start))
        return (session.total_steps - step) * statistics.median(self._step_s)

    def _numbers(self, session: "Session", step: int) -> str:
        if self._metrics is None:
            return ""
        m = self._metrics
        parts = [
            f"loss {m.loss:.3f}",
            f"lr {m.lr:.1e}",
            f"norm {m.grad_norm:.2f}",
            f"{human_count(m.tokens_per_s)} tok/s",
            *([f"MFU {m.mfu:.0%}"] if m.mfu is not None else []),
            f"{m.peak_mem_gib:.3g} GiB",
            f"ETA {_long_time(self._seconds_left(session, step))}",
        ]
        return "  ".join(parts)


def _long_time(seconds: float) -> str:
    return human_time(seconds) if seconds < 4 * 86400 else f"{seconds / 86400:.1f} d"


def _step_of_total(session: "Session", step: int) -> str:
    """Format a step and the total, aligned over lines."""
    total = session.total_steps
    return f"{step:>{len(str(total))}}/{total}" if total else str(step)


def _settings(session: "Session"):
    config = session.config
    data = ", ".join(source.path for source in config.data.sources)
    rows = [
        ("run", str(session.run_dir), f"seed {config.run.seed}"),
        ("model", *_model(session)),
        ("data", data, f"sequences of {config.data.seq_len}"),
        ("train", f"{config.train.batch} per step", f"for {config.train.horizon}"),
        *((d.name, d.value, d.reason) for d in session.record.decisions),
    ]
    return facts(rows)


def _model(session: "Session") -> tuple[str, str]:
    """Return the preset with the fields that differ from it, and the number of parameters."""
    model, count = session.config.model, f"{human_count(session.spec.parameters)} parameters"
    if model.preset is None:
        return session.spec.family, count
    own = expand({"preset": model.preset})
    here = expand(model.model_dump(exclude_none=True))
    changes = [f"{name} {value}" for name, value in here.items() if value != own.get(name)]
    changes += [f"no {name}" for name in own.keys() - here.keys()]
    if not changes:
        return model.preset, count
    return f"{model.preset}, modified", f"{count}; {', '.join(changes)}"


def show_outcome(console: Console, session: "Session", outcome: "Outcome", continuation: str | None) -> None:
    if continuation is not None:
        text = Text.assemble((session.config.observe.sample or "", "bold"), (continuation, "green"))
        console.print(panel(text, "sample from the model"))
    uniform = math.log(session.spec.vocab_size)
    whole = f"{human_count(outcome.tokens)} tokens in {human_time(outcome.seconds)}, evaluation included"
    rows = []
    if outcome.last_loss is not None:
        change = f"{outcome.first_loss:.3f} -> {outcome.last_loss:.3f}"
        rows.append(("training loss", change, f"ln(vocabulary) = {uniform:.3f}"))
    if outcome.last_eval_loss is not None:
        change = f"{outcome.first_eval_loss:.3f} -> {outcome.last_eval_loss:.3f}"
        rows.append(("validation loss", change, f"{outcome.last_eval_loss / uniform:.0%} of ln(vocabulary)"))
    rows.append(("speed", f"{human_count(outcome.tokens_per_s)} tok/s", f"median; {whole}"))
    if outcome.joules is not None:
        each, kwh = outcome.joules / max(1, outcome.tokens), outcome.joules / JOULES_PER_KWH
        rows.append(("energy", f"{kwh:.3g} kWh", f"{each:.3g} J per token, by the meters of the devices"))
    rows += predicted_and_measured(session.run_dir)
    rows.append(("run directory", str(session.run_dir), "metrics, events, ledger, plan, run.toml"))
    if outcome.model is not None:
        adapter = outcome.model.name == "adapter"
        what = "PEFT adapter, tokenizer" if adapter else "Hugging Face config, safetensors, tokenizer"
        rows.append(("model", str(outcome.model), what))
    console.print(facts(rows))


def show_finished(console: Console, result: "RunResult") -> None:
    """Report a run that had nothing left to train."""
    loss = f", training loss {result.last_loss:.3f}" if result.last_loss is not None else ""
    console.print(
        f"{result.run_dir} is finished: step {result.steps}, {human_count(result.tokens)} tokens{loss}; "
        "raise train.horizon to train it further",
        markup=False,
    )


def sources_table(forecasts: "Sequence[SourceForecast]", packing: str) -> Table:
    """Return a table of when each source is exhausted or repeats."""
    table = Table("source", ">share", ">tokens", ">filled", ">epochs", ">first repeat")
    for each in forecasts:
        filled = f"{each.utilisation:.1%}" if packing != "none" else f"at least {each.utilisation:.1%}"
        table.row(
            each.name,
            f"{each.share:.1%}",
            human_count(each.tokens_per_epoch),
            filled,
            "unknown" if each.epochs is None else f"{each.epochs:.3g}",
            "never" if each.first_repeat is None else f"step {each.first_repeat:,}",
        )
    return table
