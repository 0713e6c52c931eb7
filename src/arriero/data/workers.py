"""Worker processes of a command, and the callback for their progress."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from arriero.errors import UserError

CONTEXT = multiprocessing.get_context("spawn")


@contextmanager
def worker_pool(
    workers: int, begin: Callable[..., None] | None = None, *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Start processes that call `begin` first and end with this process, even if it is killed."""
    with ProcessPoolExecutor(workers, CONTEXT, _begin, (begin, arguments)) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed", "repeat the command; with fewer --workers if memory ran out"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    if begin is not None:
        begin(*arguments)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


ProgressCallback = Callable[[str, int, int], None]
"""Called with the name of a stage, the amount done and the total."""


def no_progress(stage: str, done: int, total: int) -> None:
    pass
