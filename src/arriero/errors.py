"""Mistakes a user can mend."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What is wrong and where, then what to do about it. Shown without a traceback, exit code 2."""

    def __init__(self, what: str, todo: str = "") -> None:
        self.what = what
        self.todo = todo
        super().__init__(f"{what}; {todo}" if todo else what)

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        return UserError, (self.what, self.todo)


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice a mistyped word most likely means."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)), None)
