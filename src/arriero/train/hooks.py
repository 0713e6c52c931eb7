"""Hooks: how optional behaviour observes a run."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arriero.checkpoint.manager import SaveReport
    from arriero.train.guard import BadStep
    from arriero.train.metrics import StepMetrics
    from arriero.train.saving import Outcome
    from arriero.train.session import Session
    from arriero.train.stragglers import SlowRank


class Hook:
    """Base class of everything that observes a run: override the methods you need.

    Hooks are called in the order of their list, on rank 0 only unless `on_all_ranks` is set.
    """

    on_all_ranks = False

    def on_prepare(self, stage: str, done: int, total: int) -> None:
        """Called while a built-in or raw dataset is prepared, before the session exists."""

    def on_start(self, session: "Session") -> None: ...

    def on_step(self, session: "Session", step: int, tokens: int) -> None: ...

    def on_metrics(self, session: "Session", metrics: "StepMetrics") -> None: ...

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None: ...

    def on_save(self, session: "Session", report: "SaveReport") -> None: ...

    def on_slow_rank(self, session: "Session", slow: "SlowRank") -> None:
        """Called when a rank was slower than the others for 20 logged steps."""

    def on_bad_step(self, session: "Session", bad: "BadStep", samples: tuple[int, int]) -> None:
        """Called when the update of a step was rejected; `samples` is the range of its global batch."""

    def on_rollback(self, session: "Session", to_step: int | None, about: dict[str, Any]) -> None:
        """Called after the run returned to the checkpoint of `to_step`; None: there was none."""

    def on_end(self, session: "Session", outcome: "Outcome") -> None:
        self.on_stop()

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        self.on_stop()

    def on_stop(self) -> None:
        """Called when training ends in any way, by `on_end` and `on_fault` unless they are overridden."""

    def on_close(self) -> None:
        """Called last in every case, also if the session could not be built."""


_CALLS = [name for name, value in vars(Hook).items() if name.startswith("on_") and callable(value)]


class Hooks(Hook):
    """All hooks of a run as one: calls each method of all hooks."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks
        self._methods = {name: [getattr(hook, name) for hook in hooks] for name in _CALLS}

    def on_fault(self, session: "Session", step: int, error: BaseException) -> None:
        """Call all hooks, also if one of them fails."""
        for hook in self._hooks:
            try:
                hook.on_fault(session, step, error)
            except Exception as second:
                error.add_note(f"{type(hook).__name__} failed too: {second}")


def _calls_all(name: str) -> Callable[..., None]:
    def call(self: Hooks, *arguments: Any) -> None:
        for method in self._methods[name]:
            method(*arguments)

    return call


for _name in set(_CALLS) - vars(Hooks).keys():
    setattr(Hooks, _name, _calls_all(_name))


class Recorder(Hook):
    """Keep the losses and gradient norms of all logged steps in memory."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.grad_norms: dict[int, float] = {}
        self.eval_losses: dict[int, float] = {}

    def on_metrics(self, session: "Session", metrics: "StepMetrics") -> None:
        self.losses[metrics.step] = metrics.loss
        self.grad_norms[metrics.step] = metrics.grad_norm

    def on_evaluation(self, session: "Session", step: int, tokens: int, loss: float) -> None:
        self.eval_losses[step] = loss
