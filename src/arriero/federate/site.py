"""A site's part of a round: train from the global model, with the site's own optimizer and data, and publish.

The site's run is one ordinary run directory, WORK/run, over all rounds. WORK/round.json records from which
checkpoint the current round started, so a site that was killed continues inside the round.
"""

import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from arriero.checkpoint.convert import open_model
from arriero.checkpoint.directory import CHECKPOINTS, directory_name, find_checkpoints, find_damage
from arriero.config.load import config_from_toml, load_run
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline
from arriero.errors import UserError
from arriero.events import EVENTS, START_OVER, events_since
from arriero.federate.launching import Launcher
from arriero.federate.members import (
    GlobalManifest,
    MemberManifest,
    Refused,
    open_global,
    read_manifest,
    verify_files,
    write_member,
)
from arriero.federate.rounds import Assignment, write_json
from arriero.files import locked, publish_file, staged_directory
from arriero.model.presets import expand
from arriero.train.hooks import Hook
from arriero.train.saving import read_state

RUN = "run"
_ROUND = "round.json"
LOCAL = Launcher()


@dataclass(frozen=True)
class Started:
    """Where the site's current round began. `seconds` is the training time of the run until then."""

    round: int
    base: str
    first_step: int
    resume_from: str | None
    seconds: float
    at: float


@dataclass(frozen=True)
class SitePaths:
    """`model` is the global model, `run_file` the site's resolved run file, `out` the member to publish."""

    model: Path
    run_file: Path
    work: Path
    out: Path


def run_round(
    order: Assignment,
    paths: SitePaths,
    launcher: Launcher = LOCAL,
    hooks: tuple[Hook, ...] = (),
) -> MemberManifest:
    """Train a site's round, or the rest of it, and publish the member; a second call changes nothing."""
    with locked(
        paths.work / ".lock",
        paths.work,
        unwritable="give the site a work directory that it may write",
        wait_s=None,
    ):
        known = open_global(paths.model)
        if (done := _published(paths.out, order, known)) is not None:
            return done
        started = _start(order, paths, known)
        config = round_config(order, paths, started)
        waited = 0.0
        if _checkpoint(paths.work, started.first_step + order.steps) is None:
            _check_resumable(order, paths, started)
            waited = launcher.train(config, paths.work, hooks)
        return _publish(order, paths, started, config, waited)


def run_turn(turn: Path, site: str, work: Path, out: Path, launcher: Launcher = LOCAL) -> None:
    """Run the order of a turn that a workflow brought; the model is kept, because a late round needs it."""
    path = turn / "orders" / f"{site}.json"
    if not path.is_file():
        # nothing to do in this turn; an empty directory is no member
        out.mkdir(parents=True, exist_ok=True)
        return
    order = Assignment(**json.loads(path.read_bytes()))
    model = work / "models" / f"{order.round:04d}"
    manifest = open_global(turn / "model")
    if manifest.round == order.round and not model.is_dir():
        with staged_directory(model) as making:
            shutil.copytree(turn / "model", making, dirs_exist_ok=True)
    run_file = work / f"{site}.toml"
    publish_file(run_file, (turn / "sites" / f"{site}.toml").read_bytes())
    member = work / "member"
    run_round(order, SitePaths(model, run_file, work, member), launcher)
    shutil.copytree(member, out)
    for old in sorted((work / "models").iterdir())[:-4]:
        shutil.rmtree(old, ignore_errors=True)


def _published(out: Path, order: Assignment, known: GlobalManifest) -> MemberManifest | None:
    """Return the member that an earlier call has published for the same round and model."""
    try:
        member = read_manifest(out, MemberManifest)
        verify_files(out, member.files)
    except Refused:
        return None
    same = (member.site, member.round, member.base) == (order.site, order.round, known.model)
    return member if same else None


def _start(order: Assignment, paths: SitePaths, known: GlobalManifest) -> Started:
    """Return where this round began; at its first call, at the site's newest checkpoint."""
    path = paths.work / _ROUND
    if path.is_file():
        started = Started(**json.loads(path.read_bytes()))
        if (started.round, started.base) == (order.round, known.model):
            return started
    saved = [saved for saved in find_checkpoints(paths.work / RUN) if saved.manifest]
    if not saved:
        started = Started(order.round, known.model, 0, None, 0.0, time.time())
    else:
        directory = saved[-1].directory
        seconds = read_state(directory)["seconds"]
        started = Started(order.round, known.model, saved[-1].step, str(directory), seconds, time.time())
    write_json(path, asdict(started))
    return started


def _check_resumable(order: Assignment, paths: SitePaths, started: Started) -> None:
    """Raise UserError if training would fall back to a checkpoint from before the round.

    It would train the old weights again on data that was counted already.
    """
    if started.resume_from is None:
        return
    for saved in reversed(find_checkpoints(paths.work / RUN)):
        if saved.step < started.first_step:
            break
        if saved.manifest is not None and not find_damage(saved.directory, saved.manifest):
            return
    raise UserError(
        f"{order.site} has no valid checkpoint of step {started.first_step} or later, where round "
        f"{order.round} began ({paths.work / RUN})",
        f"restore {started.resume_from}; or remove {paths.work}, and the site joins anew",
    )


def round_config(order: Assignment, paths: SitePaths, started: Started) -> RunConfig:
    """Return the run of a round: global weights, the site's own optimizer state, schedule and data."""
    last = started.first_step + order.steps
    sets = [
        f"run.dir='{paths.work}'",
        f"run.name={RUN}",
        f"train.horizon='{last} steps'",
        f"checkpoint.start_from='{paths.model}'",
        f"checkpoint.resume_from='{started.resume_from}'" if started.resume_from else "",
        f"checkpoint.load.reset_optimizer={str(order.inner == 'reset').lower()}",
        "checkpoint.at_end=true",
        "checkpoint.export=false",
        "observe.sample=false",
    ]
    # the schedule must not change once training has begun, also if rounds are added
    stored = paths.work / RUN / "run.toml"
    given = config_from_toml(stored if stored.is_file() else paths.run_file).schedule.horizon
    sets.append(f"schedule.horizon='{given or f'{order.horizon} steps'}'")
    return load_run(paths.run_file, [each for each in sets if each], expand).config


def _checkpoint(work: Path, step: int) -> Path | None:
    path = work / RUN / CHECKPOINTS / directory_name(step)
    return path if any(saved.directory == path for saved in find_checkpoints(work / RUN)) else None


def _publish(
    order: Assignment, paths: SitePaths, started: Started, config: RunConfig, waited: float
) -> MemberManifest:
    last = started.first_step + order.steps
    directory = _checkpoint(paths.work, last)
    if directory is None:
        raise UserError(
            f"{order.site} ended without a checkpoint of step {last}",
            f"see {paths.work / RUN / EVENTS} for the reason; the same command continues",
        )
    state, timeline = read_state(directory), Timeline.of(config)
    saved = next(each for each in find_checkpoints(paths.work / RUN) if each.directory == directory)
    about = MemberManifest(
        site=order.site,
        round=order.round,
        base=started.base,
        codec=order.codec,
        tokens=timeline.tokens_after(last) - timeline.tokens_after(started.first_step),
        first_step=started.first_step,
        step=last,
        files={},
        seconds=max(0.0, state["seconds"] - started.seconds),
        waited=waited,
        tokenizer=saved.manifest.tokenizer if saved.manifest else None,
        train_loss=_finite(state["last_loss"]),
        eval_before=_initial_evaluation(paths.work / RUN, started.first_step),
        eval_after=_finite(state["last_eval_loss"]),
    )
    if paths.out.exists():
        aside = paths.out.with_name(f".{paths.out.name}.{time.time_ns()}.replaced")
        paths.out.rename(aside)

    def describe(model: str, files: Mapping[str, str], size: int) -> MemberManifest:
        return replace(about, base=model, files=files, bytes=size)

    return write_member(paths.model, open_model(directory), paths.out, order.codec, describe)


def _finite(loss: Any) -> float | None:
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _initial_evaluation(run_dir: Path, step: int) -> float | None:
    """Return the validation loss of the weights with which the round began.

    The last evaluation at that step: the one before is of the site's own model at the end of its last round.
    """
    found = [e for e in events_since(run_dir / EVENTS, START_OVER) if e["event"] == "evaluation"]
    return next((_finite(each["eval_loss"]) for each in reversed(found) if each["step"] == step), None)


def evaluate_global(order: Assignment, paths: SitePaths) -> float | None:
    """Return the validation loss of a global model on the site's held-out data; None without such data."""
    from arriero.interrupt import Requests
    from arriero.train.run import open_session

    with locked(paths.work / ".lock", paths.work, unwritable="check the work directory", wait_s=None):
        known = open_global(paths.model)
        started = _start(order, paths, known)
        config = round_config(replace(order, steps=1), paths, started)
        with open_session(config) as session:
            if session.evaluator is None:
                return None
            return session.evaluator.loss(session.passes, Requests())
