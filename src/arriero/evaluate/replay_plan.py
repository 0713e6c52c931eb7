"""Which recorded steps of a run are repeated, and the temporary run directory in which they are.

The checkpoint there is a link to that of the run: nothing is written into the run.
"""

import hashlib
import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from arriero.checkpoint.directory import CHECKPOINTS, SavedCheckpoint, directory_name, find_checkpoints
from arriero.config.fields import to_toml, toml_value
from arriero.config.load import load_run
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline
from arriero.data.order.ledger import LEDGER, Ledger, read_ledger
from arriero.errors import UserError
from arriero.events import EVENTS, METRICS, START_OVER, read_records
from arriero.model.presets import expand
from arriero.parallel.world import world_from
from arriero.plan.layout import AXES
from arriero.train.schedule import make_shape

STEPS = 5
RUN, RUN_FILE, SETTINGS = "run", "run.toml", "settings.json"
# ranks that a replay starts by itself if the run had as many
_MOST_RANKS = 8
# sections that a resumed run may change
FREE = ("parallel", "memory", "precision", "guard")


@dataclass
class Record:
    """What a run directory says about the steps that count: not those that a restart or rollback repeated."""

    run: Path
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    starts: dict[int, dict[str, Any]] = field(default_factory=dict)
    origin: int = 0
    rejected: set[int] = field(default_factory=set)

    @staticmethod
    def read(run_dir: Path) -> "Record":
        record, start = Record(run_dir), {}
        for each in _by_time(run_dir):
            kind = each.get("event")
            if kind == START_OVER:
                record, start = Record(run_dir), {}
            elif kind == "start":
                record.origin = each.get("step", 0) if not start else record.origin
                record._drop_after(each.get("step", 0))
                start = each
            elif kind == "rollback":
                record._drop_after(each["to_step"])
            elif kind == "bad step":
                record.rejected.add(each["step"])
            elif kind is None:
                record._drop_lines(each["step"] - 1)
                record.lines[each["step"]], record.starts[each["step"]] = each, start
        return record

    def _drop_lines(self, step: int) -> None:
        while self.lines and (last := next(reversed(self.lines))) > step:
            del self.lines[last]

    def _drop_after(self, step: int) -> None:
        self._drop_lines(step)
        self.rejected = {each for each in self.rejected if each <= step}

    @cached_property
    def checkpoints(self) -> dict[int, SavedCheckpoint]:
        return {each.step: each for each in find_checkpoints(self.run, report_unreadable=True)}

    def run_file(self, step: int) -> Path:
        """Return the run file by which a step was trained: that of the next checkpoint, else the run's."""
        later = [each for at, each in sorted(self.checkpoints.items()) if at >= step and not each.problem]
        return (later[0].directory if later else self.run) / RUN_FILE


def _by_time(run_dir: Path) -> list[dict[str, Any]]:
    """Return events and metrics in the order in which they were written."""
    lines, now = [], 0.0
    for each in read_records(run_dir / METRICS):
        if isinstance(each.get("step"), int) and "event" not in each:
            now = each.get("time", now)
            lines.append((now, each))
    events = [(each.get("time", 0.0), each) for each in read_records(run_dir / EVENTS) if "event" in each]
    return [each for _, each in sorted([*events, *lines], key=lambda pair: pair[0])]


@dataclass(frozen=True)
class Plan:
    """The steps (start, end] to repeat, on `ranks` ranks; `config` is that of the temporary run."""

    record: Record
    start: int
    end: int
    ranks: int
    config: RunConfig
    saved: SavedCheckpoint | None

    @property
    def recorded(self) -> list[int]:
        return [step for step in self.record.lines if self.start < step <= self.end]

    @property
    def compared(self) -> list[SavedCheckpoint]:
        """The checkpoints in reach, whose weights are compared."""
        return [each for at, each in sorted(self.record.checkpoints.items()) if self.start < at <= self.end]


def plan_replay(
    run_dir: Path, start: int | None, steps: int | None, nproc: int | None, sets: Sequence[str], folder: Path
) -> Plan:
    """Choose the checkpoint and the steps, and make the config of the temporary run in `folder`."""
    world = world_from()
    if nproc is not None and world.size > 1:
        raise UserError("a launcher has started several ranks already", "omit --nproc")
    nproc = world.size if world.size > 1 else nproc
    record = Record.read(run_dir)
    if not record.lines:
        raise UserError(f"{run_dir} has no recorded step", "replay a run that has trained")
    last = max(record.lines)
    begins = sorted({record.origin, *record.checkpoints})
    if start is None:
        start = max(each for each in begins if each < last)
    if start not in begins:
        raise UserError(f"{run_dir} has no checkpoint of step {start}", f"give --from {_any_of(begins)}")
    later = [step for step in record.lines if step > start]
    if not later:
        raise UserError(f"{run_dir} recorded no step after {start}", f"give --from {_any_of(begins[:-1])}")
    end = min(start + steps if steps else max(start + STEPS, later[0]), last)
    if later[0] > end:
        raise UserError(
            f"no step from {start + 1} to {end} was recorded (observe.log_every)",
            f"give --steps {later[0] - start} or more",
        )
    first = record.starts[later[0]]
    ranks = nproc or (first.get("ranks", 1) if first.get("ranks", 1) <= _MOST_RANKS else 1)
    layout = _degrees(first.get("layout", "")) if ranks == first.get("ranks", 1) else {}
    if not layout or any(each.startswith("parallel.") for each in sets):
        # the ranks that the other degrees leave
        layout = dict.fromkeys(AXES, 1) | layout | {"dp_shard": -1}
    own = {"run.dir": str(folder), "run.name": RUN, **_settings(record, start, end, layout)}
    written = [f"{key}={toml_value(value)}" for key, value in own.items()]
    if ranks != first.get("ranks", 1):
        written.append("train.micro_batch=default")
    config = load_run(run_dir / RUN_FILE, [*written, *sets], expand).config
    return Plan(record, start, end, ranks, config, record.checkpoints.get(start))


def _any_of(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:-1]))
    return f"{shown} or {steps[-1]}" if shown else str(steps[-1])


def _degrees(layout: str) -> dict[str, int]:
    """Return the degrees of a layout that an event names, like 'dp_shard 2 x tp 2'."""
    words = [part.split() for part in layout.split(" x ")]
    named = {name: int(degree) for name, degree in (each for each in words if len(each) == 2) if name in AXES}
    return dict.fromkeys(AXES, 1) | named


def _settings(record: Record, start: int, end: int, layout: Mapping[str, int]) -> dict[str, Any]:
    """Return the keys that differ from the run file: the run ends after `end` steps and saves nothing.

    A resumed run may change keys that do not change what is trained; those of the first step are taken.
    """
    config = load_run(record.run / RUN_FILE, [], expand).config
    then = load_run(record.run_file(start + 1), [], expand).config.model_dump(mode="json")
    keys = {f"{section}.{key}": then[section][key] for section in FREE for key in then[section]}
    keys = {key: value for key, value in keys.items() if value is not None}
    keys |= {f"parallel.{axis}": degree for axis, degree in layout.items()}
    timeline = Timeline.of(config)
    if config.data.phases:
        raw = tomllib.loads((record.run / RUN_FILE).read_text(encoding="utf-8"))
        begun = sum(phase.step < end for phase in timeline.phases[1:])
        keys["data.phases"] = raw["data"]["phases"][:begun]
    # in tokens, because later phases, which are left out, may change the tokens of a step
    shape = make_shape(config.schedule, config.train, timeline)
    spans = {"horizon": shape.horizon, "warmup": shape.warmup}
    if shape.kind == "wsd":
        spans["decay"] = shape.decay
    keys |= {f"schedule.{key}": f"{tokens} tok" for key, tokens in spans.items() if tokens}
    keys |= {"train.horizon": f"{end} steps"}
    keys |= {f"checkpoint.{key}": False for key in ("every", "at_end", "export", "start_over")}
    keys |= {"eval.every": False, "observe.tensorboard": False, "observe.sample": False}
    keys |= {"observe.trackers": []}
    keys |= {"observe.log_every": 1, "guard.nonfinite": "skip"}
    return keys | ({"guard.spike": "skip"} if config.guard.spike == "rollback" else {})


def prepare(plan: Plan, folder: Path) -> None:
    """Make the temporary run directory: run file, derived settings, ledger, and a link to the checkpoint."""
    record, target = plan.record, folder / RUN
    target.mkdir(parents=True)
    (target / RUN_FILE).write_text(to_toml(plan.config), encoding="utf-8")
    if (record.run / SETTINGS).is_file():
        shutil.copy(record.run / SETTINGS, target / SETTINGS)
    if not (record.run / LEDGER).is_file():
        raise UserError(f"{record.run} has no {LEDGER}", "replay a run that has trained")
    whole = read_ledger(record.run)
    begun = replace(whole, stretches=[])
    if plan.saved is not None:
        (target / CHECKPOINTS).mkdir()
        (target / CHECKPOINTS / directory_name(plan.start)).symlink_to(plan.saved.directory.resolve())
        begun = read_ledger(plan.saved.directory)
    timeline = Timeline.of(plan.config)
    # the update of these steps was rejected when they were trained; their losses are recorded and compared
    trained = {(timeline.samples_after(step - 1), timeline.samples_after(step)) for step in record.rejected}
    skipped = sorted({*begun.skipped, *whole.skipped} - trained)
    (target / LEDGER).write_bytes(_ledger_file(begun, skipped))


def _ledger_file(ledger: Ledger, skipped: Sequence[tuple[int, int]]) -> bytes:
    content = {
        "samples": ledger.samples,
        "batch_sequences": ledger.batch_sequences,
        "order": ledger.order,
        "sources": [{"name": name} for name in ledger.names],
        "stretches": [{**asdict(each), "checksum": f"{each.checksum:016x}"} for each in ledger.stretches],
        "skipped": skipped,
    }
    return json.dumps(content).encode()


@contextmanager
def temporary_folder(workdir: Path | None) -> Iterator[Path]:
    """Yield a folder for the temporary run. Ranks that a launcher started have the same path on all nodes."""
    world = world_from()
    if workdir is not None and not workdir.is_dir():
        raise UserError(f"--workdir {workdir} is not a directory", "create it, on all nodes")
    if world.size == 1:
        with tempfile.TemporaryDirectory(prefix="arriero-replay-", dir=workdir) as folder:
            yield Path(folder)
        return
    job = f"{world.meeting} {os.environ.get('SLURM_STEP_ID')} {os.environ.get('TORCHELASTIC_RUN_ID')}"
    name = f"arriero-replay-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:12]}"
    folder = (workdir or Path(tempfile.gettempdir())) / name
    try:
        yield folder
    finally:
        # on a shared file system the folder is the leader's, which still reads the metrics
        if world.is_leader or (world.local_rank == 0 and not (folder / RUN / METRICS).exists()):
            shutil.rmtree(folder, ignore_errors=True)


def prepare_together(plan: Plan, folder: Path) -> None:
    """Make the temporary run directory from each rank of a launcher; the first of a node publishes it."""
    making = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        prepare(plan, making)
        with suppress(OSError):
            making.rename(folder)
        # before all ranks have met, nothing is trained
        same = (folder / RUN / RUN_FILE).read_bytes() == to_toml(plan.config).encode()
        if not same or (folder / RUN / METRICS).exists():
            raise UserError(f"{folder} is left from another replay", "remove it on all nodes")
    finally:
        shutil.rmtree(making, ignore_errors=True)
