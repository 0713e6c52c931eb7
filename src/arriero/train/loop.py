"""The training loop."""

import math
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from arriero.data.order.loader import IGNORED, Batch
from arriero.errors import UserError
from arriero.train.build import Session
from arriero.train.finish import export_model
from arriero.train.metrics import StepMetrics, Stopwatch


@dataclass
class Outcome:
    """What a run has to show for itself so far."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    model: str | None = None
    rates: list[float] = field(default_factory=list)

    def saw(self, loss: float, tokens_per_s: float) -> None:
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss
        self.rates.append(tokens_per_s)

    @property
    def tokens_per_s(self) -> float:
        """The median of the logged rates: the first step, compilation and evaluation do not blur it."""
        return statistics.median(self.rates[1:] or self.rates)

    def describe(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["rates"]
        return fields | {"tokens_per_s": self.tokens_per_s}


def train(session: Session) -> Outcome:
    outcome = Outcome()
    try:
        session.hooks.on_start(session)
        _train(session, outcome)
        outcome.model = str(export_model(session))
    except BaseException as error:
        session.hooks.on_fault(session, outcome.steps, error)
        raise
    finally:
        session.loader.close()
    session.hooks.on_end(session, outcome)
    return outcome


def _train(session: Session, outcome: Outcome) -> None:
    start = time.monotonic()
    _evaluate(session, outcome)
    watch = Stopwatch(session.device, session.peak_flops)
    done = False
    while not done:
        with watch.waiting_for_data():
            batch = next(session.loader)
        lr = session.config.optim.lr * session.schedule.at(outcome.tokens)
        loss = _gradients(session, batch)
        grad_norm = session.optimizer.step(lr)
        outcome.steps += 1
        outcome.tokens += session.tokens_per_step
        watch.count(batch.real_tokens, session.flops(batch))
        session.hooks.on_step(session, outcome.steps, outcome.tokens)

        done = session.finished(outcome.tokens, time.monotonic() - start)
        evaluates = session.evaluation.due(outcome.tokens) or done
        if outcome.steps % session.config.observe.log_every == 0 or outcome.steps == 1 or evaluates:
            lap = watch.lap()
            with watch.paused():
                value = _finite(loss.item(), outcome.steps)
                eval_loss = _evaluate(session, outcome) if evaluates else None
            outcome.saw(value, lap["tokens_per_s"])
            metrics = StepMetrics(
                outcome.steps, outcome.tokens, value, grad_norm.item(), lr, eval_loss=eval_loss, **lap
            )
            session.hooks.on_metrics(session, metrics)
    outcome.seconds = time.monotonic() - start


def _gradients(session: Session, batch: Batch) -> torch.Tensor:
    """Accumulate a batch's gradients, micro-batch by micro-batch; returns the mean loss over its tokens."""
    labels = int((batch.labels_BT != IGNORED).sum())
    mean = torch.zeros((), device=session.device.torch_device)
    for micro in batch.split(session.micro_batch):
        micro = micro.to(session.device.torch_device)
        summed = session.model(micro.tokens_BT, micro.positions_BT, micro.documents_BT, micro.labels_BT)
        loss = summed / max(labels, 1)
        (loss * session.optimizer.loss_scale).backward()
        mean += loss.detach()
    return mean


def _evaluate(session: Session, outcome: Outcome) -> float | None:
    if session.evaluator is None:
        return None
    loss = session.evaluator.loss(session.model)
    outcome.first_eval_loss = loss if outcome.first_eval_loss is None else outcome.first_eval_loss
    outcome.last_eval_loss = loss
    session.evaluation.restart()
    session.hooks.on_evaluation(session, outcome.steps, outcome.tokens, loss)
    return loss


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss} at step {step}", "lower optim.lr, or lengthen schedule.warmup")
    return loss
