"""The training loop."""

import signal
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arriero.data.order.loader import Batch
from arriero.interrupt import Interrupted
from arriero.train.finish import export_model
from arriero.train.guard import roll_back
from arriero.train.metrics import StepMetrics, Stopwatch, measure_step
from arriero.train.saving import Outcome
from arriero.train.session import Session


def train(session: Session) -> Outcome:
    """Train to the end of the run, then export the model. A finished run is only exported."""
    record, outcome = session.record, session.record.outcome
    has_finished = session.is_finished(outcome.tokens, outcome.seconds)
    try:
        with record.saver.requests:
            if not has_finished:
                record.hooks.on_start(session)
                _train(session, outcome)
                record.saver.wait(session)
            _export(session, outcome)
    except BaseException as error:
        if not isinstance(error, Interrupted):
            record.saver.wait(session)
        record.hooks.on_fault(session, outcome.steps, error)
        raise
    finally:
        session.data.loader.close()
    if not has_finished:
        record.hooks.on_end(session, outcome)
        record.saver.raise_if_save_failed()
    return outcome


def _train(session: Session, outcome: Outcome) -> None:
    optimizer, hooks, saver = session.optimizer, session.record.hooks, session.record.saver
    optimizer.attempts = outcome.steps
    start = time.monotonic() - outcome.seconds
    _evaluate_initial_model(session, outcome, start)
    watch = Stopwatch(session.device, session.peak_flops, session.mesh, session.config.run.share_gpu)
    is_done, is_first = False, True
    while not is_done:
        with watch.waiting_for_data():
            batch = next(session.data.loader)
        lr = session.schedule.at(outcome.steps)
        loss, grad_norm = _take_step(session, batch, lr, outcome.steps)
        outcome.steps += 1
        outcome.tokens = session.timeline.tokens_after(outcome.steps)
        watch.count(batch.real_tokens, session.flops(batch), session.hardware_flops(batch))
        hooks.on_step(session, outcome.steps, outcome.tokens)
        if is_first:
            is_first = False
            session.mesh.set_timeout(session.config.parallel.train_timeout)
        saver.requests.answer_with(partial(_stop_message, session, outcome), deferred=True)

        now = session.seconds_since(start)
        is_done = session.is_finished(outcome.tokens, now)
        line, measure = None, partial(measure_step, session, outcome, watch, lr, loss, grad_norm)
        if is_done or session.is_due(session.evaluation, outcome, now):
            line = measure()
            with watch.paused():
                line |= _evaluate(session, outcome, start)
        saves = saver.is_due(session, outcome, now, is_done)
        logs = outcome.steps == 1 or outcome.steps % session.config.observe.log_every == 0
        if line or saves or logs:
            line = line or measure()
            is_bad = bool(session.guard.to_roll_back)
            if saves and not is_bad:
                with watch.paused():
                    line["save_s"] = saver.save(session, outcome, now)
            hooks.on_metrics(session, StepMetrics(**line))
            if is_bad:
                with watch.paused():
                    roll_back(session, outcome)
                is_done = session.is_finished(outcome.tokens, now)
        saver.raise_if_interrupted(session)
    outcome.seconds = time.monotonic() - start


def _take_step(session: Session, batch: Batch, lr: float, step: int) -> tuple[Tensor, Tensor]:
    """Return loss and gradient norm of a step. A batch that the guard passes over changes nothing."""
    optimizer, guard = session.optimizer, session.guard
    if guard.passes_over(batch):
        optimizer.attempts += 1
        nothing = torch.full((), float("nan"), device=session.device.torch_device)
        return nothing, nothing
    loss = session.passes_at(step).gradients(batch, optimizer.loss_scale)
    grad_norm = optimizer.step(lr, loss, guard.allows(loss))
    guard.note(step + 1, loss, optimizer.accepted)
    return loss, grad_norm


def _evaluate_initial_model(session: Session, outcome: Outcome, start: float) -> None:
    """Evaluate before the first step with new weights; start the intervals of evaluations and checkpoints."""
    requests = session.record.saver.requests
    if (outcome.steps == 0 or session.record.new_weights) and session.evaluator is not None:
        requests.answer_with(lambda: "ending the evaluation, then exiting", deferred=True)
        _evaluate(session, outcome, start)
        if requests.agreed:
            raise Interrupted(requests.agreed)
    # nothing is new before the first step, which may compile for minutes: a signal stops at once
    since = f"no step was taken since step {outcome.steps}" if outcome.steps else "no step was taken yet"
    requests.answer_with(lambda: since, deferred=False)
    now = session.seconds_since(start)
    session.evaluation.restart(now)
    session.record.saver.begin(now)


def _evaluate(session: Session, outcome: Outcome, start: float) -> dict[str, Any]:
    """Return the metrics of an evaluation; none without validation data, or if a signal ended it."""
    if session.evaluator is None:
        return {}
    begin = time.perf_counter()
    loss = session.evaluator.loss(session.passes, session.record.saver.requests)
    session.evaluation.restart(session.seconds_since(start))
    if loss is None:
        return {}
    outcome.first_eval_loss = loss if outcome.first_eval_loss is None else outcome.first_eval_loss
    outcome.last_eval_loss = loss
    session.record.hooks.on_evaluation(session, outcome.steps, outcome.tokens, loss)
    several = session.eval_losses or None
    return {"eval_loss": loss, "eval_s": time.perf_counter() - begin, "eval_losses": several}


def _export(session: Session, outcome: Outcome) -> None:
    """Export the model if the run file asks for it; a signal to any rank ends the export on all ranks."""
    requests = session.record.saver.requests
    session.mesh.set_timeout(session.config.parallel.init_timeout)
    if not session.config.checkpoint.export:
        return
    requests.answer_with(
        lambda: "ending the export, which the same command repeats, then exiting", deferred=True
    )
    outcome.model = export_model(session, lambda: bool(requests.stop))
    if outcome.model is None:
        raise Interrupted(requests.stop or signal.SIGTERM)


def _stop_message(session: Session, outcome: Outcome) -> str:
    """Name the step at which a signal stops the run; several ranks agree on it one step later."""
    step = outcome.steps + (1 if session.mesh.world.size == 1 else 2)
    if session.total_steps is not None:
        step = min(step, session.total_steps)
    return f"saving at step {step}, then exiting"
