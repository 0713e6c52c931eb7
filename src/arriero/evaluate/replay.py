"""Repeat recorded steps of a run from one of its checkpoints, and compare what they compute with the record.

Steps of a run with run.deterministic must be bit-equal with the same layout, settings, device and torch. All
others must agree within the bounds of `bench parity`.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arriero.bench.cases import BF16, BF16_WEIGHTS, FLOAT8, FP32, STATES, Tolerance
from arriero.bench.parity import without_gradient
from arriero.checkpoint.directory import SavedCheckpoint, find_damage
from arriero.checkpoint.formats.dcp_directory import SafeDcpReader
from arriero.checkpoint.manager import verify_by_ranks
from arriero.checkpoint.state import MODEL, LocalPart, local_parts, named_tensors, read_parts
from arriero.config.load import load_run
from arriero.config.schema import RunConfig
from arriero.data.order.ledger import difference, read_ledger
from arriero.errors import UserError
from arriero.evaluate.replay_plan import FREE, RUN, SETTINGS, Plan, prepare, prepare_together
from arriero.events import METRICS, read_records
from arriero.model.presets import expand
from arriero.parallel.world import world_from
from arriero.plan.layout import AXES
from arriero.train.hooks import Hook
from arriero.train.resume import checkpoint_ranks
from arriero.train.run import run

if TYPE_CHECKING:
    from arriero.train.metrics import StepMetrics
    from arriero.train.saving import Outcome
    from arriero.train.session import Session

_FOUND = "replay.json"
_COMPARED = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "eval_loss": "validation loss",
}


class Comparison(Hook):
    """Compares the tensors with those of checkpoints on all ranks; rank 0 shows steps as they are taken."""

    on_all_ranks = True

    def __init__(self, plan: Plan, show: Callable[[int, float], None]) -> None:
        self._plan, self._show = plan, show
        self._found: dict[str, Any] = {"checkpoints": []}

    def on_start(self, session: "Session") -> None:
        ledger = read_ledger(self._plan.record.run)
        samples = min(ledger.samples, session.timeline.samples_after(self._plan.end))
        if problem := difference(ledger.order, ledger.names, session.data.stream, samples):
            raise UserError(problem, "restore the data of the run; data.sources may name another place")
        self._found |= session.describe() | {"compute": session.resolved.compute}
        self._found["settings"] = session.resolved.open_settings

    def on_step(self, session: "Session", step: int, tokens: int) -> None:
        for saved in self._plan.compared:
            if saved.step == step:
                self._found["checkpoints"].append({"step": step, **_compare(session, saved)})

    def on_metrics(self, session: "Session", metrics: "StepMetrics") -> None:
        if session.mesh.world.is_leader:
            self._show(metrics.step, metrics.loss)

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        if session.mesh.world.is_leader:
            (Path(self._plan.config.run.dir) / _FOUND).write_text(json.dumps(self._found))


def _compare(session: "Session", saved: SavedCheckpoint) -> dict[str, Any]:
    """Compare weights and optimizer state with a checkpoint, part by part. Called by all ranks."""
    ranks = checkpoint_ranks(session.mesh)
    problem = saved.problem or verify_by_ranks(saved, ranks)
    if problem or saved.manifest is None:
        return {"problem": problem}
    own = local_parts(named_tensors(session.model.stored(), session.optimizer.state()))
    reader = SafeDcpReader(saved.directory)
    sums: dict[str, list[float]] = {}
    for name in saved.manifest.tensors:
        parts = {}
        if name in own:
            mine = own[name]
            parts[name] = LocalPart(torch.empty_like(mine.local), mine.offset, mine.shape)
        read_parts(reader, parts, ranks)
        for there in parts.values():
            sums[name] = _difference(own[name].local.detach(), there.local)
    everyones = ranks.on_all_ranks(lambda: sums)
    return _summary(everyones, list(saved.manifest.tensors), without_gradient(session.spec))


def _difference(here: torch.Tensor, there: torch.Tensor) -> list[float]:
    """Return whether any bit differs, the squared difference, and the squared size."""
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (here, there))
    size = float(there.double().square().sum())
    if torch.equal(one, other):
        return [0.0, 0.0, size]
    return [1.0, float((here.double() - there.double()).square().sum()), size]


def _summary(
    everyones: Sequence[Mapping[str, list[float]]], names: Sequence[str], ignored: tuple[str, ...]
) -> dict[str, Any]:
    """Return which tensors differ, and by how much: by the largest of the kinds that `bench parity` has."""
    unequal = [name for name in names if any(each.get(name, [0])[0] for each in everyones)]
    kinds: dict[str, list[float]] = {}
    alone: dict[str, float] = {}
    for name in names:
        if name.startswith(MODEL) and not name.endswith(ignored):
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            totals = kinds.setdefault(kind, [0.0, 0.0])
            off, size = (sum(each[name][i] for each in everyones if name in each) for i in (1, 2))
            totals[0], totals[1] = totals[0] + off, totals[1] + size
            alone[name] = _ratio(off, size)
    worst = max((_ratio(*totals) for totals in kinds.values()), default=0.0)
    where = max(alone, key=lambda name: alone[name], default=None) if worst else None
    missing = [name for name in names if not any(name in each for each in everyones)]
    return {
        "problem": f"has {missing[0]}, which the model has not" if missing else None,
        "tensors": len(names),
        "unequal": unequal,
        "largest_difference": worst if math.isfinite(worst) else None,
        "largest_in": where,
    }


def _ratio(off: float, size: float) -> float:
    return (math.sqrt(off / size) if size and math.isfinite(off) else math.inf) if off else 0.0


@dataclass(frozen=True)
class Verdict:
    """`rows` has one entry per compared step; `first` names the first difference, None if there is none."""

    facts: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[Mapping[str, Any]]
    first: str | None

    @property
    def has_unequal_tensors(self) -> bool:
        return any(each.get("unequal") for each in self.checkpoints)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.facts,
            "holds": self.first is None,
            "first_difference": self.first,
            "steps": list(self.rows),
            "checkpoints": list(self.checkpoints),
        }


def damage_of(plan: Plan, progress: Callable[[int], None]) -> str | None:
    """Return what is wrong with the checkpoint that the replay begins with."""
    saved = plan.saved
    if saved is None:
        return None
    if saved.problem or saved.manifest is None:
        return f"the checkpoint of step {saved.step} {saved.problem}"
    bad = find_damage(saved.directory, saved.manifest, progress=progress)
    listed = "; ".join(f"{name} {problem}" for name, problem in sorted(bad.items()))
    return f"the checkpoint of step {saved.step} is damaged: {listed}" if bad else None


def replay(
    plan: Plan, folder: Path, show: Callable[[int, float], None], refusal: UserError | None = None
) -> Verdict | None:
    """Repeat the steps and compare; None on ranks of a launcher other than 0.

    `show` is called in the process of rank 0 after each step. `refusal` of rank 0 is raised on all ranks.
    """
    world, hooks = world_from(), [Comparison(plan, show)]
    if world.size > 1:
        prepare_together(plan, folder)
        run(plan.config, hooks, refusal=refusal)
        if not world.is_leader:
            return None
    else:
        prepare(plan, folder)
        run(plan.config, hooks, nproc=plan.ranks)
    found = json.loads((folder / _FOUND).read_bytes())
    lines = {line["step"]: line for line in read_records(folder / RUN / METRICS)}
    bounds = tolerance_of(plan.config, found["compute"])
    rows = [_row(plan, step, lines[step], bounds, found) for step in plan.recorded]
    checkpoints = [_judged(plan, each, bounds, found) for each in found["checkpoints"]]
    problems = sorted(
        (each["step"], each["problem"]) for each in (*rows, *checkpoints) if each.get("problem")
    )
    facts = {
        "run": str(plan.record.run),
        "from_step": plan.start,
        "to_step": plan.end,
        "layout": found["layout"],
        "device": found["device"],
        "bounds": asdict(bounds),
    }
    first = f"step {problems[0][0]}: {problems[0][1]}" if problems else None
    return Verdict(facts, rows, checkpoints, first)


def tolerance_of(config: RunConfig, compute: str) -> Tolerance:
    """Return the bounds of `bench parity` for the number formats of a run: the widest that apply."""
    precision, apply = config.precision, [FP32]
    apply += [BF16] if compute != "fp32" else []
    apply += [BF16_WEIGHTS] if precision.master == "bf16" else []
    apply += [FLOAT8] if precision.float8 != "off" else []
    apply += [STATES[config.optim.state]] if config.optim.state in STATES else []
    return Tolerance(*(max(getattr(each, key) for each in apply) for key in ("loss", "norm", "weights")))


def must_be_equal(plan: Plan, step: int, found: Mapping[str, Any]) -> bool:
    """Return whether a step must be bit-equal: deterministic, and computed in the same way."""
    start = plan.record.starts.get(step, {})
    same = all(start.get(key) == found[key] for key in ("layout", "device", "versions"))
    path = plan.record.run / SETTINGS
    kept = json.loads(path.read_bytes()) if path.is_file() else None
    there = load_run(plan.record.run_file(step), [], expand).config
    same = same and kept == found["settings"] and _computes(there) == _computes(plan.config)
    return plan.config.run.deterministic and same


def _computes(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide the order of sums and that a resumed run may change."""
    every = config.model_dump(mode="json", exclude={"parallel": set(AXES)})
    return {section: every[section] for section in FREE if section != "guard"} | {
        "micro_batch": config.train.micro_batch
    }


def _row(
    plan: Plan, step: int, here: Mapping[str, Any], bounds: Tolerance, found: Mapping[str, Any]
) -> dict[str, Any]:
    there, exact = plan.record.lines[step], must_be_equal(plan, step, found)
    limits = {"loss": bounds.loss, "eval_loss": bounds.loss, "lr": 0.0}
    # the bound of parity is for the first norm; later ones are of weights that differ
    limits["grad_norm"] = bounds.norm if step == plan.start + 1 else max(bounds.norm, bounds.weights)
    problems, values = [], {}
    for key, name in _COMPARED.items():
        if key not in there or key not in here:
            continue
        off = relative(here[key], there[key])
        values[key] = {"recorded": there[key], "replayed": here[key], "difference": off}
        if off is None or off > (0.0 if exact else limits[key]):
            problems.append(f"{name} {_shown(there[key])} recorded, {_shown(here[key])} replayed")
    equal = all(each["difference"] == 0.0 for each in values.values())
    return {
        "step": step,
        **values,
        "expected": "bit-equal" if exact else "within bounds",
        "bit_equal": equal,
        "problem": "; ".join(problems) or None,
    }


def relative(here: float | None, there: float | None) -> float | None:
    """Return the relative difference; two numbers that are not finite are equal, one alone has none."""
    if here is None or there is None:
        return 0.0 if here is there else None
    return 0.0 if here == there else abs(here - there) / (abs(there) or 1.0)


def _shown(value: float | None) -> str:
    return "not finite" if value is None else repr(value)


def _judged(plan: Plan, each: dict[str, Any], bounds: Tolerance, found: Mapping[str, Any]) -> dict[str, Any]:
    if each["problem"]:
        return each | {"problem": f"its checkpoint is damaged: {each['problem']}"}
    exact = must_be_equal(plan, each["step"], found)
    worst = each["largest_difference"]
    wrong = bool(each["unequal"]) if exact else worst is None or worst > bounds.weights
    name = each["largest_in"] or next(iter(each["unequal"]), None)
    problem = None
    if wrong:
        size = "not finite" if worst is None else f"relative difference {worst:.2g}"
        of = f"{len(each['unequal'])} of {each['tensors']} tensors of its checkpoint differ"
        problem = f"{of}, most of all {name} ({size})"
    return each | {"expected": "bit-equal" if exact else "within bounds", "problem": problem}


def remarks(plan: Plan, verdict: Verdict) -> Iterator[str]:
    """Yield what was not compared, and why."""
    if not plan.compared:
        later = [step for step in sorted(plan.record.checkpoints) if step > plan.end]
        reach = f"; --steps {later[0] - plan.start} reaches that of step {later[0]}" if later else ""
        yield f"no weights were compared: no checkpoint is in reach{reach}"
    if not plan.config.run.deterministic:
        yield "run.deterministic was off, so equal bits are not required"
    elif any(row["expected"] != "bit-equal" for row in verdict.rows):
        yield "the layout, settings, device or versions differ, so equal bits are not required"
