"""The training loop."""

import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from arriero.checkpoint.directory import find_checkpoints
from arriero.errors import UserError
from arriero.interrupt import Interrupted
from arriero.train.finish import finished_model
from arriero.train.metrics import StepMetrics, Stopwatch
from arriero.train.saving import Outcome
from arriero.train.session import Session


def train(session: Session) -> Outcome:
    """Train from where the session begins to its end, then export; a finished run is only exported."""
    outcome, requests = session.record.outcome, session.record.saver.requests
    try:
        if session.is_finished(outcome.tokens, outcome.seconds):
            with requests:
                outcome.model = _exported(session)
            return outcome
        session.optimizer.attempts = outcome.steps
        with requests:
            session.record.hooks.on_start(session)
            _train(session, outcome)
            session.record.saver.wait(session)
            outcome.model = _exported(session)
    except BaseException as error:
        if not isinstance(error, Interrupted):
            session.record.saver.wait(session)
        session.record.hooks.on_fault(session, outcome.steps, error)
        raise
    finally:
        session.data.loader.close()
    session.record.hooks.on_end(session, outcome)
    session.record.saver.raise_if_save_failed()
    return outcome


def _train(session: Session, outcome: Outcome) -> None:
    start = time.monotonic() - outcome.seconds
    _begin(session, outcome, start)
    watch = Stopwatch(session.device, session.peak_flops, session.mesh)
    done = False
    while not done:
        with watch.waiting_for_data():
            batch = next(session.data.loader)
        lr = session.schedule.at(outcome.steps)
        loss = session.passes_at(outcome.steps).gradients(batch, session.optimizer.loss_scale)
        grad_norm = session.optimizer.step(lr, loss)
        outcome.steps += 1
        outcome.tokens = session.timeline.tokens_after(outcome.steps)
        watch.count(batch.real_tokens, session.flops(batch))
        session.record.hooks.on_step(session, outcome.steps, outcome.tokens)
        session.record.saver.requests.expect(lambda: _plan_to_stop(session, outcome), deferred=True)

        now = session.seconds_since(start)
        done = session.is_finished(outcome.tokens, now)
        line: dict[str, Any] | None = None
        if session.is_due(session.evaluation, outcome, now) or done:
            line = _measured(session, outcome, watch, lr, loss, grad_norm)
            with watch.paused():
                line["eval_loss"] = _evaluate(session, outcome, start)
        saves = session.record.saver.is_due(session, outcome, now, done)
        if line or saves or outcome.steps % session.config.observe.log_every == 0 or outcome.steps == 1:
            line = line or _measured(session, outcome, watch, lr, loss, grad_norm)
            if saves:
                with watch.paused():
                    line["save_s"] = session.record.saver.save(session, outcome, now)
            session.record.hooks.on_metrics(session, StepMetrics(**line))
        session.record.saver.raise_if_interrupted(session)
    outcome.seconds = time.monotonic() - start


def _exported(session: Session) -> Path | None:
    """None where checkpoint.export is false; a signal to any rank ends it early on all."""
    requests = session.record.saver.requests
    requests.expect(lambda: "ending the export, which the same command repeats, then exiting", deferred=True)
    model = finished_model(session, lambda: bool(requests.stop))
    if model is None and session.config.checkpoint.export:
        raise Interrupted(requests.stop or signal.SIGTERM)
    return model


def _begin(session: Session, outcome: Outcome, start: float) -> None:
    """Evaluate a fresh model; one that is resumed was evaluated."""
    requests = session.record.saver.requests
    if outcome.steps == 0 and session.evaluator is not None:
        requests.expect(lambda: "ending the evaluation, then exiting", deferred=True)
        _evaluate(session, outcome, start)
        if requests.agreed:
            raise Interrupted(requests.agreed)
    # until a step is done there is nothing new to save, and compiling it may take minutes
    since = f"no step was taken since step {outcome.steps}" if outcome.steps else "no step was taken yet"
    requests.expect(lambda: since, deferred=False)
    now = session.seconds_since(start)
    session.evaluation.restart(now)
    session.record.saver.begin(now)


def _measured(
    session: Session, outcome: Outcome, watch: Stopwatch, lr: float, loss: Tensor, grad_norm: Tensor
) -> dict[str, Any]:
    """The fields of a line of metrics.jsonl; the only place where training waits for the device."""
    optimizer = session.optimizer
    lap, values = watch.lap([loss, grad_norm, optimizer.taken, optimizer.skipped_in_a_row])
    value, norm, taken, in_a_row = values
    outcome.add(value, lap["tokens_per_s"])
    line: dict[str, Any] = {"step": outcome.steps, "tokens": outcome.tokens}
    line |= {"loss": value, "grad_norm": norm}
    line |= {"lr": lr, "skipped": outcome.steps - int(taken), **lap}
    never = outcome.steps == session.total_steps and taken == 0
    if in_a_row > session.config.optim.max_skips or never:
        session.record.hooks.on_metrics(session, StepMetrics(**line))
        # the message names the newest checkpoint, which may still be on its way to the disk
        session.record.saver.wait(session)
        raise UserError(*_too_many_skips(session, outcome.steps, int(in_a_row)))
    return line


def _too_many_skips(session: Session, step: int, in_a_row: int) -> tuple[str, str]:
    optim = session.config.optim
    saved = [each.step for each in find_checkpoints(session.run_dir) if each.problem is None]
    resume = f" --set checkpoint.resume_from={session.run_dir}" if saved else ""
    whence = f"continue from the checkpoint of step {saved[-1]}" if saved else "start again"
    return (
        f"{in_a_row} updates in a row were skipped up to step {step}, because the loss or the gradient norm "
        f"was not finite (optim.max_skips is {optim.max_skips})",
        f"{whence} with a lower learning rate: --set run.name=NEW{resume} --set optim.lr={optim.lr / 2:g}",
    )


def _plan_to_stop(session: Session, outcome: Outcome) -> str:
    """Several ranks agree on the step while the next one is computed."""
    step = outcome.steps + (1 if session.mesh.world.size == 1 else 2)
    if session.total_steps is not None:
        step = min(step, session.total_steps)
    return f"saving at step {step}, then exiting"


def _evaluate(session: Session, outcome: Outcome, start: float) -> float | None:
    """None without held-out data, and where a signal ended it early."""
    if session.evaluator is None:
        return None
    loss = session.evaluator.loss(session.passes, session.record.saver.requests)
    session.evaluation.restart(session.seconds_since(start))
    if loss is None:
        return None
    outcome.first_eval_loss = loss if outcome.first_eval_loss is None else outcome.first_eval_loss
    outcome.last_eval_loss = loss
    session.record.hooks.on_evaluation(session, outcome.steps, outcome.tokens, loss)
    return loss
