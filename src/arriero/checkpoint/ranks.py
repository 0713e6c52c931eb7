"""The ranks of a run doing one thing together: all of them succeed, or all of them hear why not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from arriero.errors import UserError

Result = TypeVar("Result")


class Failed(Exception):
    """What went wrong on the first rank where something did."""


@dataclass(frozen=True)
class Ranks:
    """`group` is theirs alone: a training step must not meet a message of a save."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def on_all_ranks(self, work: Callable[[], Result]) -> list[Result]:
        """Everyone's result, on every rank."""
        mine = _attempt(work)
        if self.size == 1:
            return _results([mine])
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, mine, group=self.group)
        return _results(told)

    def gather_to_leader(self, work: Callable[[], Result]) -> list[Result]:
        """Everyone's result on rank 0, nothing elsewhere; a failure is raised on all ranks."""
        mine = _attempt(work)
        if self.size == 1:
            return _results([mine])
        told: list[Any] | None = [None] * self.size if self.is_leader else None
        dist.gather_object(mine, told, dst=0, group=self.group)
        results: list[Result] = []
        self.on_leader(lambda: results.extend(_results(told or [])))
        return results

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        if self.size == 1:
            return flag
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def on_leader(self, work: Callable[[], Result]) -> Result:
        """Done once; the others learn the result."""
        said: list[Any] = [_attempt(work) if self.is_leader else None]
        if self.size > 1:
            dist.broadcast_object_list(said, src=0, group=self.group)
        return _results(said)[0]


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, Any]:
    try:
        return work(), None
    except UserError as error:
        return None, (error.what, error.todo)
    except Failed as error:
        return None, str(error)
    except (Exception, CheckpointException) as error:
        return None, explain(error)


def cause_of(error: BaseException) -> BaseException:
    """The first rank's exception, which DCP wraps into one of its own."""
    inner = getattr(error, "failures", None)
    if isinstance(inner, dict) and inner:
        first = next(iter(inner.values()))
        return first[0] if isinstance(first, tuple) else first
    return error


def explain(error: BaseException) -> str:
    error = cause_of(error)
    return f"{type(error).__name__}: {error}"


def _results(told: Iterable[tuple[Any, Any]]) -> list[Any]:
    values = []
    for rank, (value, problem) in enumerate(told):
        if isinstance(problem, tuple):
            raise UserError(*problem)
        if problem is not None:
            raise Failed(problem if rank == 0 else f"{problem} (rank {rank})")
        values.append(value)
    return values
