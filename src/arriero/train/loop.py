"""The training loop."""

import math
import time

from arriero.errors import UserError
from arriero.train.finish import finished_model
from arriero.train.interrupt import Interrupted
from arriero.train.metrics import StepMetrics, Stopwatch
from arriero.train.outcome import Outcome
from arriero.train.session import Session


def train(session: Session) -> Outcome:
    """From where the session begins to its end; a run that is at its end already is only exported."""
    outcome = session.outcome
    try:
        if session.finished(outcome.tokens, outcome.seconds):
            outcome.model = finished_model(session)
            return outcome
        with session.saver.requests:
            session.hooks.on_start(session)
            _train(session, outcome)
            outcome.model = finished_model(session)
            session.saver.wait(session)
    except BaseException as error:
        if not isinstance(error, Interrupted):
            session.saver.wait(session)
        session.hooks.on_fault(session, outcome.steps, error)
        raise
    finally:
        session.loader.close()
    session.hooks.on_end(session, outcome)
    session.saver.refuse_silence()
    return outcome


def _train(session: Session, outcome: Outcome) -> None:
    start = time.monotonic() - outcome.seconds
    _begin(session, outcome, start)
    watch = Stopwatch(session.device, session.peak_flops, session.mesh)
    done = False
    while not done:
        with watch.waiting_for_data():
            batch = next(session.loader)
        lr = session.schedule.at(outcome.steps)
        loss = session.passes_at(outcome.steps).gradients(batch, session.optimizer.loss_scale)
        grad_norm = session.optimizer.step(lr)
        outcome.steps += 1
        outcome.tokens = session.timeline.tokens_after(outcome.steps)
        watch.count(batch.real_tokens, session.flops(batch))
        session.hooks.on_step(session, outcome.steps, outcome.tokens)

        now = session.seconds_since(start)
        done = session.finished(outcome.tokens, now)
        evaluates = session.is_due(session.evaluation, outcome, now) or done
        saves = session.saver.due(session, outcome, now, done)
        if outcome.steps % session.config.observe.log_every == 0 or outcome.steps == 1 or evaluates or saves:
            lap = watch.lap()
            with watch.paused():
                value = _finite(loss.item(), outcome.steps)
                eval_loss = _evaluate(session, outcome, start) if evaluates else None
                outcome.saw(value, lap["tokens_per_s"])
                save_s = session.saver.save(session, outcome, now) if saves else None
            metrics = StepMetrics(
                outcome.steps,
                outcome.tokens,
                value,
                grad_norm.item(),
                lr,
                eval_loss=eval_loss,
                save_s=save_s,
                **lap,
            )
            session.hooks.on_metrics(session, metrics)
        if not done:
            session.saver.stop_if_told(session)
    outcome.seconds = time.monotonic() - start


def _begin(session: Session, outcome: Outcome, start: float) -> None:
    """A fresh model is evaluated; one that goes on was."""
    if outcome.steps == 0:
        _evaluate(session, outcome, start)
    now = session.seconds_since(start)
    session.evaluation.restart(now)
    session.saver.begin(now)


def _evaluate(session: Session, outcome: Outcome, start: float) -> float | None:
    if session.evaluator is None:
        return None
    loss = session.evaluator.loss(session.passes)
    outcome.first_eval_loss = loss if outcome.first_eval_loss is None else outcome.first_eval_loss
    outcome.last_eval_loss = loss
    session.evaluation.restart(session.seconds_since(start))
    session.hooks.on_evaluation(session, outcome.steps, outcome.tokens, loss)
    return loss


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss} at step {step}", "lower optim.lr, or lengthen schedule.warmup")
    return loss
