"""How long work tells how far it is; the caller draws it."""

from typing import Protocol


class Progress(Protocol):
    """Called with a stage in words and how much of it is done."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    pass
