"""The guard against bad losses: skip the update, or return to a checkpoint and skip the batches.

A loss is bad if it, or the gradient norm, is not finite, or if it is a spike: far above the median of the
last losses by the robust z-score, (loss - median) / (1.4826 * median absolute deviation). The update of a bad
step is rejected on the device, without waiting for it. The loss is a global number, so all ranks decide
alike. The host learns of bad steps at the next logged step, names their documents, and rolls back if so
configured.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arriero.checkpoint.directory import delete, find_checkpoints
from arriero.checkpoint.manager import verify_by_ranks
from arriero.config.schema import GuardSection
from arriero.data.order.loader import Batch
from arriero.errors import UserError
from arriero.train.resume import CheckpointLoader, checkpoint_ranks
from arriero.train.saving import Outcome, read_state

if TYPE_CHECKING:
    from arriero.train.session import Session

# bad steps between two logged steps that are remembered one by one
_REMEMBERED = 256
# the deviation of a normal distribution, in median absolute deviations
_MAD_TO_SIGMA = 1.4826
_RECENT_STEPS = 10_000
# a rise by less than this share of the loss times the threshold is no spike, however steady the losses are
_SMALLEST_SIGMA = 1e-3


@dataclass(frozen=True)
class BadStep:
    """A step whose update was rejected: its number and why."""

    step: int
    is_spike: bool

    @property
    def reason(self) -> str:
        return "loss spike" if self.is_spike else "loss or gradient norm not finite"


class Guard:
    """Judges the loss of each step. `scaled_loss`: infinite gradients are routine (fp16) and not reported."""

    def __init__(self, section: GuardSection, device: torch.device, scaled_loss: bool) -> None:
        self.section = section
        self._device, self._scaled_loss = device, scaled_loss
        self._losses = torch.full((section.window,), float("nan"), dtype=torch.float64, device=device)
        self._accepted = torch.zeros(1, dtype=torch.int64, device=device)
        self._bad = torch.zeros(_REMEMBERED, dtype=torch.int64, device=device)
        self.bad_count = torch.zeros(1, dtype=torch.int64, device=device)
        self._spike = torch.zeros((), dtype=torch.bool, device=device)
        self._known = 0
        self.skipped: list[tuple[int, int]] = []
        self.to_roll_back: list[BadStep] = []
        self.rollbacks: list[int] = []

    def passes_over(self, batch: Batch) -> bool:
        """Return whether a batch was bad before, and is read but not trained on."""
        return any(first <= batch.first_sample < end for first, end in self.skipped)

    @torch.no_grad()
    def allows(self, loss: Tensor) -> Tensor | None:
        """Return, on the device, whether a loss is no spike; None if spikes are not looked for."""
        if self.section.spike == "off":
            return None
        loss = loss.detach().to(self._device, torch.float64)
        median = self._losses.nanmedian()
        sigma = _MAD_TO_SIGMA * (self._losses - median).abs().nanmedian()
        sigma = torch.maximum(sigma, _SMALLEST_SIGMA * median.abs())
        is_known = self._accepted[0] >= self.section.window // 2
        self._spike = is_known & ((loss - median) > self.section.spike_z * sigma)
        return ~self._spike

    @torch.no_grad()
    def note(self, step: int, loss: Tensor, accepted: Tensor) -> None:
        """Remember the loss of an accepted step, or the number of a bad one. Does not wait for the device."""
        loss = loss.detach().to(self._device, torch.float64).reshape(1)
        accepted = accepted.detach().to(self._device).reshape(1)
        is_bad = ~accepted if not self._scaled_loss else ~loss.isfinite() | self._spike
        slot = self._accepted % len(self._losses)
        self._losses.index_copy_(0, slot, torch.where(accepted, loss, self._losses[slot]))
        self._accepted += accepted
        slot = self.bad_count % _REMEMBERED
        code = torch.full_like(slot, 2 * step) + self._spike
        self._bad.index_copy_(0, slot, torch.where(is_bad, code, self._bad[slot]))
        self.bad_count += is_bad

    def learn(self, session: "Session", bad_count: int) -> None:
        """Report the bad steps since the last logged one. Called by all ranks with the same number."""
        if bad_count == self._known:
            return
        codes = session.mesh.all_gather(self._bad)[0].tolist()
        new = [codes[n % _REMEMBERED] for n in range(max(self._known, bad_count - _REMEMBERED), bad_count)]
        self._known = bad_count
        for each in (BadStep(code // 2, bool(code % 2)) for code in new):
            samples = samples_of(session, each.step, each.step)
            self.skip([samples])
            session.record.hooks.on_bad_step(session, each, samples)
            policy = self.section.spike if each.is_spike else self.section.nonfinite
            if policy == "rollback":
                self.to_roll_back.append(each)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: losses to judge spikes by, oldest first, and rollbacks."""
        count, losses = int(self._accepted), self._losses.tolist()
        if count > len(losses):
            losses = losses[count % len(losses) :] + losses[: count % len(losses)]
        return {"losses": losses[: min(count, len(losses))], "rollbacks": self.rollbacks}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint, which may have been saved with another window or without a guard."""
        losses = [float(loss) for loss in (state or {}).get("losses", [])][-len(self._losses) :]
        self._losses.fill_(float("nan"))
        self._losses[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
        self._accepted.fill_(len(losses))
        self._spike = torch.zeros_like(self._spike)
        # a rollback loads an older state and stays counted
        self.rollbacks = sorted({*self.rollbacks, *(state or {}).get("rollbacks", [])})

    def skip(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Pass over these ranges of samples from now on; the ledger lists them."""
        self.skipped = sorted({*self.skipped, *ranges})


def samples_of(session: "Session", first: int, last: int) -> tuple[int, int]:
    """Return the first sample of step `first`, and the one after step `last`."""
    return session.timeline.samples_after(first - 1), session.timeline.samples_after(last)


def roll_back(session: "Session", outcome: Outcome) -> None:
    """Return to the newest checkpoint before the bad steps, and pass over their batches from now on.

    Called by all ranks. Without such a checkpoint the bad updates stay skipped and training continues.
    """
    guard, saver, ranks = session.guard, session.record.saver, checkpoint_ranks(session.mesh)
    bad, guard.to_roll_back = guard.to_roll_back, []
    firsts = [max(1, each.step - guard.section.skip_batches + 1) for each in bad]
    reasons = ", ".join(sorted({each.reason for each in bad}))
    about = {"from_step": outcome.steps, "bad_steps": [each.step for each in bad], "reason": reasons}
    saver.wait(session)
    found = ranks.on_leader(lambda: find_checkpoints(session.run_dir))
    older = [each for each in found if each.problem is None and each.step < min(firsts)]
    saved = next((each for each in reversed(older) if verify_by_ranks(each, ranks) is None), None)
    if saved is None:
        session.record.hooks.on_rollback(session, None, about)
        return
    state = ranks.on_leader(lambda: read_state(saved.directory))
    _count_rollback(guard, bad[0].step)
    guard.skip(samples_of(session, first, each.step) for first, each in zip(firsts, bad, strict=True))
    ranks.on_leader(lambda: _delete_newer(session, saved.step))
    section = session.config.checkpoint
    loader = CheckpointLoader(
        session.model, session.mesh, section.load, session.optimizer, session.run_dir, section.start_from
    )
    loader.load_checkpoint(saved)
    before = Outcome.from_state(state)
    outcome.steps, outcome.tokens = before.steps, before.tokens
    session.optimizer.attempts = outcome.steps
    session.optimizer.skipped_in_a_row.zero_()
    guard.load(state.get("guard"))
    saver.roll_back(session, outcome.steps, int(state["data"]["sample"]))
    session.record.hooks.on_rollback(session, saved.step, about)


def _delete_newer(session: "Session", step: int) -> None:
    """Delete newer checkpoints, which contain updates that are undone, so that no restart resumes there."""
    for each in find_checkpoints(session.run_dir):
        if each.step > step and (problem := delete(each.directory)):
            raise UserError(
                f"{each.directory} cannot be deleted ({problem}), and the run returns to step {step}",
                "delete it and start the run again",
            )


def _count_rollback(guard: Guard, step: int) -> None:
    """Count a rollback; older ones than 10,000 steps are forgotten, because a long run may have many."""
    guard.rollbacks = [before for before in guard.rollbacks if before > step - _RECENT_STEPS] + [step]
    if len(guard.rollbacks) > guard.section.max_rollbacks:
        raise UserError(
            f"step {step} would be rolled back, and guard.max_rollbacks is {guard.section.max_rollbacks}",
            "check the data and the learning rate of these steps; events.jsonl names the documents",
        )
