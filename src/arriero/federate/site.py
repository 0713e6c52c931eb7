"""A site's part of a round: train from the global model, with the site's own optimizer and data, and publish.

The site's run is one ordinary run directory, WORK/run, over all rounds. WORK/round.json records from which
checkpoint the current round started, so a site that was killed continues inside the round.
"""

import hashlib
import math
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from arriero.checkpoint.convert import find_model, open_model
from arriero.checkpoint.directory import CHECKPOINTS, directory_name, find_checkpoints, find_damage
from arriero.checkpoint.formats.model_reader import ModelReader
from arriero.checkpoint.formats.peft_directory import CONFIG
from arriero.config.load import config_from_toml, load_run
from arriero.config.schema import RunConfig
from arriero.config.timeline import Timeline
from arriero.errors import UserError
from arriero.events import EVENTS, START_OVER, events_since
from arriero.federate.members import (
    GlobalManifest,
    MemberManifest,
    Record,
    Refused,
    open_global,
    read_manifest,
    verify_files,
    write_json,
    write_member,
)
from arriero.federate.round_files import Assignment
from arriero.files import link_tree, locked, publish_file, sha256_of_json, staged_directory
from arriero.model.description import base_of_adapter
from arriero.model.presets import expand
from arriero.train.hooks import Hook
from arriero.train.saving import read_state

RUN = "run"
_ROUND, _FINGERPRINT = "round.json", "fingerprint.json"
_EVALUATION = "evaluation"
# files of a turn, which goes to a site, and of its answer
MODEL, ORDER, RUN_FILE, MEMBER, EVALUATION = "model", "order.json", "run.toml", "member", "evaluation.json"


@dataclass(frozen=True)
class Launcher:
    """`nproc` ranks of this machine, or a job on `nodes` nodes with a site profile of `arriero launch`."""

    nproc: int = 1
    profile: str | None = None
    nodes: int = 1

    def train(self, config: RunConfig, work: Path, hooks: tuple[Hook, ...] = ()) -> float:
        """Train a run to its horizon; return the seconds that it waited in a queue.

        Whether it was reached is read from the checkpoints: the state of a job says too little.
        """
        if self.profile is not None:
            return self._submit(config, self.profile, work)
        from arriero.train.run import run

        run(config, list(hooks), nproc=None if self.nproc == 1 else self.nproc)
        return 0.0

    def _submit(self, config: RunConfig, profile: str, work: Path) -> float:
        """Submit a job as `arriero launch submit` does and wait for it; a job that is alive is waited for."""
        from arriero import slurm
        from arriero.launch.commands import chosen_site
        from arriero.launch.jobs import JobRequest, launch_folder, render, submit_chain

        earlier = slurm.submitted(launch_folder(config))[-1:]
        states = {each["job"]: slurm.job_facts(each["job"]).get("JobState") for each in earlier}
        alive = [job for job, state in states.items() if state not in (*slurm.ENDED, None)]
        given = Path(profile) if Path(profile).is_absolute() else work / profile
        site = chosen_site(str(given) if given.is_file() else profile)
        job = alive[0] if alive else submit_chain(render(config, site, JobRequest(nodes=self.nodes)), 1)[0]
        slurm.wait_for(job, poll_s=2.0)
        said = slurm.job_facts(job)
        return _seconds_between(said.get("SubmitTime"), said.get("StartTime"))


def _seconds_between(start: str | None, end: str | None) -> float:
    try:
        return max(
            0.0, (datetime.fromisoformat(end or "") - datetime.fromisoformat(start or "")).total_seconds()
        )
    except ValueError:
        return 0.0


LOCAL = Launcher()


class Started(Record):
    """Where the site's current round began. `seconds` is the training time of the run until then."""

    round: int
    base: str
    first_step: int
    resume_from: str | None
    seconds: float
    at: float


class Fingerprint(Record):
    """The fingerprint of an adapter's base model; `stamp` tells whether a file of it has changed since."""

    stamp: str
    fingerprint: str


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
    with _work_lock(paths.work):
        known = open_global(paths.model, outer=False)
        if (done := _published(paths.out, order, known)) is not None:
            return done
        started = _start(order, paths, known)
        config = round_config(order, paths, started)
        waited = 0.0
        if _checkpoint(paths.work, started.first_step + order.steps) is None:
            _check_resumable(order, paths, started)
            if started.resume_from is None and not find_checkpoints(paths.work / RUN):
                # a first attempt that could save nothing, as on a full disk, leaves nothing to resume
                shutil.rmtree(paths.work / RUN, ignore_errors=True)
            waited = launcher.train(config, paths.work, hooks)
        return _publish(order, paths, started, config, waited)


def run_turn(turn: Path, site: str, work: Path, out: Path, launcher: Launcher = LOCAL) -> None:
    """Do what the order of a turn asks, and answer with the order and the member or the evaluation.

    Model and member are moved or linked, so that a workflow that keeps all its files keeps no second copy.
    """
    order = Assignment.read(turn / ORDER)
    if order.site != site:
        raise UserError(f"{turn} holds an order for {order.site}, not {site}", "check the workflow")
    model = work / "models" / f"{order.round:04d}"
    _take_model(turn / MODEL, model)
    run_file = work / f"{site}.toml"
    publish_file(run_file, (turn / RUN_FILE).read_bytes())
    last = work / "answer"
    if last.is_symlink():
        shutil.rmtree(last / MEMBER, ignore_errors=True)
        last.unlink()
    out.mkdir(parents=True, exist_ok=True)
    last.symlink_to(out)
    made = work / MEMBER if order.steps else out / EVALUATION
    perform(order, SitePaths(model, run_file, work, made), launcher)
    if order.steps:
        link_tree(made, out / MEMBER)
    publish_file(out / ORDER, (turn / ORDER).read_bytes())
    for old in sorted((work / "models").iterdir())[:-4]:
        shutil.rmtree(old, ignore_errors=True)


def _take_model(arrived: Path, target: Path) -> None:
    """Move the global model to a place that is the same after a restart; keep one that is there."""
    wanted = (arrived / GlobalManifest.FILE).read_bytes()
    kept = target / GlobalManifest.FILE
    if kept.is_file() and kept.read_bytes() == wanted:
        return
    open_global(arrived, outer=False)
    shutil.rmtree(target, ignore_errors=True)
    with staged_directory(target) as making:
        link_tree(arrived, making)
    for path in arrived.rglob("*"):
        if path.is_file() and path.name != GlobalManifest.FILE:
            path.unlink()


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
        started = Started.read(path)
        if (started.round, started.base) == (order.round, known.model):
            return started
    saved = [saved for saved in find_checkpoints(paths.work / RUN) if saved.manifest]
    begun: dict[str, Any] = {"first_step": 0, "resume_from": None, "seconds": 0.0}
    if saved:
        directory = saved[-1].directory
        begun = {"first_step": saved[-1].step, "resume_from": str(directory)}
        begun["seconds"] = read_state(directory)["seconds"]
    started = Started(round=order.round, base=known.model, at=time.time(), **begun)
    started.write(path)
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
        *_weights(paths),
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


def _weights(paths: SitePaths) -> list[str]:
    """Return the keys that give a run the global model, or the global adapter beside the base model."""
    key = "adapter_from" if (paths.model / CONFIG).is_file() else "start_from"
    return [f"checkpoint.{key}='{paths.model}'"]


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
    if paths.out.exists():
        # a rename first: nobody sees half a member
        aside = paths.out.with_name(f".{paths.out.name}.{time.time_ns()}.replaced")
        paths.out.rename(aside)
        shutil.rmtree(aside)
    return write_member(
        paths.model,
        open_model(directory),
        paths.out,
        order.codec,
        site=order.site,
        round=order.round,
        tokens=timeline.tokens_after(last) - timeline.tokens_after(started.first_step),
        first_step=started.first_step,
        step=last,
        seconds=max(0.0, state["seconds"] - started.seconds),
        waited=waited,
        tokenizer=saved.manifest.tokenizer if saved.manifest else None,
        frozen=_fingerprint(config.checkpoint.adapter_from and config.checkpoint.start_from, paths.work),
        train_loss=_finite(state["last_loss"]),
        eval_before=_initial_evaluation(paths.work / RUN, started.first_step),
        eval_after=_finite(state["last_eval_loss"]),
    )


def _fingerprint(base: str | None, work: Path) -> str | None:
    """Return a fingerprint of an adapter's base model in any format: the first row of every tensor.

    Most formats are read whole for it, so WORK/fingerprint.json keeps it until a file of the model changes.
    """
    if base is None:
        return None
    source = find_model(base)
    known, stamp = work / _FINGERPRINT, _stamp(source)
    with suppress(OSError, ValueError):
        if (kept := Fingerprint.read(known)).stamp == stamp:
            return kept.fingerprint
    digest = hashlib.sha256()
    for name, meta in sorted(source.tensors.items()):
        row = source.read_slice(name, (slice(0, 1), *(slice(None) for _ in meta.shape[1:])))
        digest.update(name.encode() + row.float().contiguous().numpy().tobytes())
    made = Fingerprint(stamp=stamp, fingerprint=digest.hexdigest())
    made.write(known)
    return made.fingerprint


def _stamp(source: ModelReader) -> str:
    """Return a checksum of path, size and time of each file of a model; the base of an adapter included."""
    places = [Path(source.where)]
    if source.format == "peft" and source.adapter is not None and source.adapter.base:
        places.append(base_of_adapter(places[0], source.adapter.base))
    files = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*")))]
    facts = ((str(path.absolute()), path.stat()) for path in files if path.is_file())
    return sha256_of_json([(name, fact.st_size, fact.st_mtime_ns) for name, fact in facts])


def _finite(loss: Any) -> float | None:
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _initial_evaluation(run_dir: Path, step: int) -> float | None:
    """Return the validation loss of the weights with which the round began.

    The last evaluation at that step: the one before is of the site's own model at the end of its last round.
    """
    found = [e for e in events_since(run_dir / EVENTS, START_OVER) if e["event"] == "evaluation"]
    return next((_finite(each["eval_loss"]) for each in reversed(found) if each["step"] == step), None)


def evaluate_global(paths: SitePaths, launcher: Launcher = LOCAL) -> float | None:
    """Return the validation loss of a global model on the site's held-out data; None without such data.

    It is measured as at the start of a round, in a run of one step that is deleted: so it needs the same
    nodes and memory as a round, and no other way to run a job.
    """
    with _work_lock(paths.work):
        run_dir = paths.work / _EVALUATION
        shutil.rmtree(run_dir, ignore_errors=True)
        open_global(paths.model, outer=False)
        sets = [
            f"run.dir='{paths.work}'",
            f"run.name={_EVALUATION}",
            "train.horizon='1 steps'",
            *_weights(paths),
            "checkpoint.every=false",
            "checkpoint.at_end=false",
            "checkpoint.export=false",
            "observe.sample=false",
        ]
        launcher.train(load_run(paths.run_file, sets, expand).config, paths.work)
        loss = _initial_evaluation(run_dir, 0)
        shutil.rmtree(run_dir, ignore_errors=True)
        return loss


def _work_lock(work: Path) -> Any:
    todo = "give the site a work directory that it may write"
    return locked(work / ".lock", work, unwritable=todo, wait_s=None)


def perform(order: Assignment, paths: SitePaths, launcher: Launcher, hooks: tuple[Hook, ...] = ()) -> None:
    """Do what a site was asked: train a round, or evaluate the final model."""
    if order.steps:
        run_round(order, paths, launcher, hooks)
    else:
        write_json(paths.out, {"site": order.site, "eval_loss": evaluate_global(paths, launcher)})
