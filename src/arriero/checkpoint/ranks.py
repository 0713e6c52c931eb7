"""Collective calls in which all ranks succeed, or all of them raise the first error."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from arriero.errors import UserError

Result = TypeVar("Result")


class Failed(Exception):
    """The error of the first rank that failed."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run. `group` is separate from those of training, because saves run in a thread."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def on_all_ranks(self, work: Callable[[], Result]) -> list[Result]:
        """Run `work` on every rank and return all results on every rank."""
        mine = _attempt(work)
        if self.size == 1:
            return _results([mine])
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, mine, group=self.group)
        return _results(gathered)

    def gather_to_leader(self, work: Callable[[], Result]) -> list[Result]:
        """Run `work` on every rank; return all results on rank 0. A failure is raised on all ranks."""
        mine = _attempt(work)
        if self.size == 1:
            return _results([mine])
        gathered: list[Any] | None = [None] * self.size if self.is_leader else None
        dist.gather_object(mine, gathered, dst=0, group=self.group)
        results: list[Result] = []
        self.on_leader(lambda: results.extend(_results(gathered or [])))
        return results

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank."""
        if self.size == 1:
            return flag
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def on_leader(self, work: Callable[[], Result]) -> Result:
        """Run `work` on rank 0 and return its result on every rank."""
        shared: list[Any] = [_attempt(work) if self.is_leader else None]
        if self.size > 1:
            dist.broadcast_object_list(shared, src=0, group=self.group)
        return _results(shared)[0]


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
    """Return the first rank's exception, which DCP wraps in a CheckpointException."""
    inner = getattr(error, "failures", None)
    if isinstance(inner, dict) and inner:
        first = next(iter(inner.values()))
        return first[0] if isinstance(first, tuple) else first
    return error


def explain(error: BaseException) -> str:
    error = cause_of(error)
    return f"{type(error).__name__}: {error}"


def _results(gathered: Iterable[tuple[Any, Any]]) -> list[Any]:
    values = []
    for rank, (value, problem) in enumerate(gathered):
        if isinstance(problem, tuple):
            raise UserError(*problem)
        if problem is not None:
            raise Failed(problem if rank == 0 else f"{problem} (rank {rank})")
        values.append(value)
    return values
