"""Run a training job: resolve the settings, join the process group, build the session, train."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from arriero.config.schema import RunConfig
from arriero.errors import UserError
from arriero.interrupt import Requests
from arriero.parallel.spawn import run_ranks
from arriero.parallel.world import World, process_group, world_from
from arriero.train.rank_process import rank_log_path, report_failure
from arriero.train.rundir import lock_run, run_directory

if TYPE_CHECKING:
    from arriero.train.build import Arrangement
    from arriero.train.hooks import Hook, Recorder
    from arriero.train.saving import Outcome
    from arriero.train.session import Session


@dataclass(frozen=True)
class RunResult:
    """What a run has reached.

    `losses`, `grad_norms` and `eval_losses` map each step that this call logged to its training loss,
    gradient norm and validation loss; they are empty on ranks other than 0. `model` is the exported Hugging
    Face or PEFT directory, or None. `has_trained` is False if the run was finished before.
    """

    run_dir: Path
    model: Path | None
    steps: int
    tokens: int
    seconds: float
    last_loss: float | None
    last_eval_loss: float | None
    losses: Mapping[int, float]
    grad_norms: Mapping[int, float]
    eval_losses: Mapping[int, float]
    has_trained: bool


def run(
    config: RunConfig,
    hooks: "Sequence[Hook]" = (),
    nproc: int | None = None,
    refusal: UserError | None = None,
) -> RunResult:
    """Train a run to its end and return what it reached; a run that was stopped resumes.

    Without `nproc` it trains in this process, which is one rank if torchrun, srun or mpirun started several.
    With `nproc` it forks that many ranks on this machine; the caller must not have used a GPU before. Hooks
    are called in the process of rank 0, whose output is shown only if there are hooks. A `refusal` of rank 0
    under a launcher is raised on all ranks.
    """
    if nproc is None:
        return _run_rank(config, hooks, is_child=False, refusal=refusal)
    if world_from().size > 1:
        raise UserError("a launcher has started several ranks already", "omit --nproc")
    with lock_run(config):
        # imported once here, so that the forked ranks need not import it
        import_module("arriero.train.build")
        log_of = partial(rank_log_path, run_directory(config))
        work = partial(_run_rank, config, hooks, is_child=True)
        return run_ranks(work, nproc, leader_prints=bool(hooks), log_of=log_of)


def _run_rank(
    config: RunConfig, hooks: "Sequence[Hook]", is_child: bool, refusal: UserError | None = None
) -> RunResult:
    """Run one rank. A forked rank is a process of its own, whose parent has locked the run directory."""
    world = world_from()
    with Requests(prints=world.is_leader, final=is_child), ExitStack() as stack:
        if world.is_leader and not is_child:
            try:
                # locked before torch is imported, so that a second run is rejected quickly
                stack.enter_context(lock_run(config))
            except UserError as error:
                refusal = error
                if world.size == 1:
                    raise
        try:
            return _train(config, world, hooks, refusal)
        except BaseException as error:
            report_failure(run_directory(config), world, error)
            raise


def _train(config: RunConfig, world: World, hooks: "Sequence[Hook]", refusal: UserError | None) -> RunResult:
    from arriero.train.build import arrange
    from arriero.train.device import out_of_memory
    from arriero.train.finish import outcome_if_ended
    from arriero.train.hooks import Recorder
    from arriero.train.loop import train

    plan, recorder = arrange(config, world), Recorder()
    if (outcome := outcome_if_ended(config)) is not None:
        # all ranks return here, so rank 0 must not wait for them in the process group
        if refusal is not None:
            raise refusal
        return _result(config, outcome, recorder)
    try:
        with _session(plan, [recorder, *hooks], refusal) as session:
            return _result(config, train(session), recorder)
    except Exception as error:
        if (
            isinstance(error, UserError)
            or (memory := out_of_memory(error, plan.resolved, plan.device)) is None
        ):
            raise
        raise memory from error


@contextmanager
def open_session(config: RunConfig, hooks: "Sequence[Hook]" = ()) -> "Iterator[Session]":
    """Build the session of this rank without training it."""
    from arriero.train.build import arrange

    with _session(arrange(config, world_from()), hooks) as session:
        try:
            yield session
        finally:
            session.data.loader.close()


@contextmanager
def _session(
    plan: "Arrangement", hooks: "Sequence[Hook]", refusal: UserError | None = None
) -> "Iterator[Session]":
    """Join the process group and build; `refusal`, why rank 0 cannot take part, is raised on all ranks."""
    from arriero.train.build import build
    from arriero.train.hooks import Hooks

    share_gpu, timeout = (
        plan.config.run.share_gpu,
        timedelta(seconds=plan.config.parallel.init_timeout.amount),
    )
    try:
        with process_group(plan.world, plan.device.torch_device, timeout, refusal, share_gpu):
            yield build(plan, Hooks(hooks).on_prepare, hooks)
    finally:
        Hooks(hooks).on_close()


def _result(config: RunConfig, outcome: "Outcome", recorder: "Recorder") -> RunResult:
    from arriero.train.finish import exported_name

    exported = run_directory(config) / exported_name(config)
    model = exported if config.checkpoint.export and exported.is_dir() else None
    names = ("steps", "tokens", "seconds", "last_loss", "last_eval_loss", "has_trained")
    reached = {name: getattr(outcome, name) for name in names}
    return RunResult(run_dir=run_directory(config), model=model, **reached, **vars(recorder))
