"""Evaluate the checkpoints of a run as they appear."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from arriero.checkpoint.directory import SavedCheckpoint, find_checkpoints
from arriero.checkpoint.scores import attach_evaluation, has_evaluation
from arriero.errors import UserError
from arriero.evaluate.perplexity import Perplexity, PerplexityRequest, measure_perplexity
from arriero.evaluate.tasks import TaskScores, TasksRequest, evaluate_tasks
from arriero.events import end_of
from arriero.parallel.spawn import RankFailed, run_ranks

Request = PerplexityRequest | TasksRequest


@dataclass(frozen=True)
class Result:
    """The scores of a checkpoint, or why it was not evaluated."""

    step: int
    kind: str
    scores: Mapping[str, float]
    problem: str | None = None


def watch_run(
    run: Path,
    requests: Sequence[Request],
    nproc: int,
    poll_s: float,
    once: bool,
    show: Callable[[Result], None],
) -> bool:
    """Evaluate until the run has ended, or only what is there with `once`; return whether any failed."""
    tried: set[tuple[str, int]] = set()
    failed = False
    while True:
        # asked before looking: a checkpoint may be saved between the two
        has_ended = once or end_of(run) is not None
        for request, saved in _unevaluated(run, requests, tried):
            tried.add((_kind(request), saved.step))
            result = _evaluate(request, saved, nproc)
            failed = failed or result.problem is not None
            show(result)
        if has_ended:
            return failed
        time.sleep(poll_s)


def _kind(request: Request) -> str:
    return "perplexity" if isinstance(request, PerplexityRequest) else "tasks"


def _unevaluated(
    run: Path, requests: Sequence[Request], tried: set[tuple[str, int]]
) -> Iterator[tuple[Request, SavedCheckpoint]]:
    for saved in find_checkpoints(run, report_unreadable=True):
        for request in requests:
            kind = _kind(request)
            known = (kind, saved.step) in tried or has_evaluation(saved.directory, kind, request.settings())
            if saved.problem is None and not known:
                yield request, saved


def _evaluate(request: Request, saved: SavedCheckpoint, nproc: int) -> Result:
    """Evaluate in processes of their own, so that a run of weeks leaves no memory behind."""
    kind = _kind(request)
    try:
        found = _measure(replace(request, model=str(saved.directory)), nproc)
        scores = found.main()
        attach_evaluation(saved.directory, kind, scores, request.settings(), found.to_dict())
    except (UserError, OSError, RankFailed) as error:
        gone = "" if saved.directory.exists() else "deleted before it was evaluated: "
        return Result(saved.step, kind, {}, f"{gone}{error}")
    return Result(saved.step, kind, scores)


def _measure(request: Request, nproc: int) -> Perplexity | TaskScores:
    if isinstance(request, PerplexityRequest):
        return measure_perplexity(request, nproc)
    return run_ranks(lambda: _tasks_alone(request), 1)


def _tasks_alone(request: TasksRequest) -> TaskScores:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        # the harness would wait for other ranks
        os.environ.pop(name, None)
    return evaluate_tasks(request)
