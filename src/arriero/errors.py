"""Errors that a user can fix."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# EX_TEMPFAIL of sysexits.h: the same command may succeed
EXIT_RESTART = 75


class UserError(Exception):
    """An error message and what to do about it, printed without a traceback; the exit code is 2."""

    exit_code = 2

    def __init__(self, what: str, todo: str = "") -> None:
        self.what = what
        self.todo = todo
        super().__init__(f"{what}; {todo}" if todo else what)

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        kind = UserError if self.exit_code == UserError.exit_code else NodeError
        return kind, (self.what, self.todo)


class NodeError(UserError):
    """An error of one node, which the same command may not have on another; the exit code is 75."""

    exit_code = EXIT_RESTART


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the choice that is most similar to a mistyped word."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)), None)


def first_problem(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the first of pydantic's errors in one line: key, problem, and the value if it is short."""
    first = errors[0]
    key = ".".join(map(str, first["loc"]))
    value = repr(first["input"])
    shown = f", not {value}" if key and len(value) <= 80 and first["type"] != "missing" else ""
    return f"{key or 'the file'}: {first['msg']}{shown}"
