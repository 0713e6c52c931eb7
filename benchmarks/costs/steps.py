"""Measure the trainer's overhead, the wait for checkpoints, and how step time grows with length and depth."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from arriero.checkpoint.manager import SaveReport
from arriero.data.order.loader import IGNORED
from arriero.model.spec import ModelSpec, flops_per_token
from arriero.train.commands import ConsoleProgress
from arriero.train.hooks import Hook
from arriero.train.metrics import StepMetrics
from arriero.train.run import open_session, run
from arriero.train.session import Session
from arriero.ui import Console
from arriero.units import Span
from benchmarks.costs.result import Cost, Row
from benchmarks.costs.sizes import Place, Sets, recorded

BLOCK = 10


class StepEnds(Hook):
    """Record the time after every `every` steps, with the device synchronized."""

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._marks: list[float] = []

    def on_step(self, session: Session, step: int, tokens: int) -> None:
        if step % self._every == 0:
            session.device.synchronize()
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the mean seconds per step between two marks; steps before the first mark are warm-up."""
        return [(b - a) / self._every for a, b in pairwise(self._marks)]


def overhead(place: Place) -> Cost:
    sizes = place.sizes
    found: dict[str, list[float]] = {"bare": [], "1": [], "10": []}
    for _ in range(sizes.repeats):
        found["bare"] += _bare_blocks(place)
        for log_every in (1, 10):
            found[str(log_every)] += _trained_blocks(place, log_every)
    micros = {name: [1e6 * second for second in seconds] for name, seconds in found.items()}
    rows = [
        _difference(f"observe.log_every = {log_every}", micros[str(log_every)], micros["bare"])
        for log_every in (1, 10)
    ]
    return Cost(
        name="overhead",
        explanation="A step of the smallest model in the training loop with loader, schedule, metrics.jsonl, "
        "ledger, TensorBoard and progress line, minus the bare calls: model(tokens, labels), backward() "
        "of its mean, optimizer.step() with clipping, on one batch in memory. The fastest block of "
        f"{BLOCK} steps of each, and the difference of their medians.",
        settings=recorded(sizes.least),
        rows=tuple(rows),
    )


def _difference(what: str, whole: Sequence[float], bare: Sequence[float]) -> Row:
    """Compare the fastest blocks: on a shared machine, medians vary by more than the overhead."""
    return Row(
        what=what,
        values={
            "µs per step": min(whole),
            "µs bare": min(bare),
            "µs of overhead": min(whole) - min(bare),
            "by medians": statistics.median(whole) - statistics.median(bare),
        },
        samples={"µs per step": tuple(whole), "µs bare": tuple(bare)},
    )


def _trained_blocks(place: Place, log_every: int) -> list[float]:
    ends = StepEnds(BLOCK)
    config = place.run(BLOCK * (place.sizes.blocks + 1), place.sizes.least | {"observe.log_every": log_every})
    with (place.folder / "console.txt").open("w", encoding="utf-8") as printed:
        run(config, [ConsoleProgress(Console(file=printed)), ends])
    return ends.seconds()


def _bare_blocks(place: Place) -> list[float]:
    config = place.run(1, place.sizes.least | {"observe.tensorboard": False})
    with open_session(config) as session:
        step = _bare_step(session)
        marks = []
        for number in range(BLOCK * (place.sizes.blocks + 1)):
            step()
            if (number + 1) % BLOCK == 0:
                session.device.synchronize()
                marks.append(time.perf_counter())
    return [(b - a) / BLOCK for a, b in pairwise(marks)]


def _bare_step(session: Session) -> Callable[[], None]:
    (model,) = session.model.parts
    batch = next(session.data.loader).to(session.device.torch_device)
    labels = (batch.labels_BT != IGNORED).sum()

    def step() -> None:
        (model(batch.tokens_BT, None, None, batch.labels_BT) / labels).backward()
        session.optimizer.step(session.config.optim.lr)

    return step


class _Waits(Hook):
    """Record the waits for saves; each save finishes before the next begins."""

    def __init__(self) -> None:
        self.waits_ms: list[float] = []
        self.reports: list[SaveReport] = []

    def on_step(self, session: Session, step: int, tokens: int) -> None:
        session.record.saver.wait(session)

    def on_metrics(self, session: Session, metrics: StepMetrics) -> None:
        if metrics.save_s is not None:
            self.waits_ms.append(1e3 * metrics.save_s)

    def on_save(self, session: Session, report: SaveReport) -> None:
        self.reports.append(report)


def saves(place: Place) -> Cost:
    rows = [
        _saved(
            place, f"{name}, {'in the background' if background else 'in the foreground'}", sets, background
        )
        for name, sets in place.sizes.saved
        for background in (True, False)
    ]
    return Cost(
        name="saves",
        explanation="How long the loop waits for a checkpoint (save_s of metrics.jsonl): weights and both "
        "moments in fp32, flushed to disk and read back. A background save only waits for a copy of the "
        "tensors; the first save allocates its memory. Medians of the later saves.",
        settings=recorded({}),
        rows=tuple(rows),
    )


def _saved(place: Place, what: str, sets: Sets, background: bool) -> Row:
    seen = _Waits()
    config = place.run(2 * place.sizes.saves, sets)
    changes = {"every": Span(2, "steps"), "keep": 1, "background": background}
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=changes)})
    run(config, [seen])
    first, *later = seen.waits_ms
    values = {
        "MB on disk": seen.reports[-1].size / 1e6,
        "ms waited": statistics.median(later),
        "ms waited at the first": first,
        "ms until written": 1e3 * statistics.median(report.written_s for report in seen.reports[1:]),
    }
    return Row(what=what, values=values, samples={"ms waited": tuple(seen.waits_ms)})


def growth(place: Place) -> Cost:
    sizes = place.sizes
    layers = int(sizes.grown["model.layers"])
    lengths = [(f"{sizes.seq_len * n} tokens", {"data.seq_len": sizes.seq_len * n}) for n in sizes.longer]
    depths = [(f"{layers * n} layers", {"model.layers": layers * n}) for n in sizes.deeper]
    return Cost(
        name="growth",
        explanation="A step of one sequence with more tokens or layers, beside its causal FLOPs; both are "
        f"multiples of the first row. The fastest of {sizes.steps * sizes.repeats} steps; not compiled.",
        settings=recorded(sizes.grown | {"data.seq_len": sizes.seq_len}),
        rows=(*_grown(place, lengths), *_grown(place, depths)),
    )


def _grown(place: Place, cases: Sequence[tuple[str, Sets]]) -> Iterator[Row]:
    """Measure in rounds, so that a temporary disturbance does not affect all steps of one row."""
    taken: dict[str, list[float]] = {what: [] for what, _ in cases}
    flops: dict[str, float] = {}
    for _ in range(place.sizes.repeats):
        for what, changed in cases:
            sets = place.sizes.grown | {"data.seq_len": place.sizes.seq_len} | changed
            tokens = int(sets["data.seq_len"])
            ends = StepEnds()
            config = place.run(place.sizes.steps + 2, sets | {"train.batch": f"{tokens} tok"})
            run(config, [ends])
            spec = ModelSpec.from_dict(config.model.model_dump(exclude={"preset"}))
            taken[what] += [1e3 * second for second in ends.seconds()[1:]]
            flops[what] = tokens * flops_per_token(spec, tokens)
    first = cases[0][0]
    for what, steps in taken.items():
        values = {
            "ms per step": min(steps),
            "times as long": min(steps) / min(taken[first]),
            "times the FLOPs": flops[what] / flops[first],
        }
        yield Row(what=what, values=values, samples={"ms per step": tuple(steps)})
