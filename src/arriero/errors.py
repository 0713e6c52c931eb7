"""Mistakes a user can mend."""


class UserError(Exception):
    """What is wrong and where, then what to do about it. Shown without a traceback, exit code 2."""

    def __init__(self, what: str, todo: str = "") -> None:
        self.what = what
        self.todo = todo
        super().__init__(f"{what}; {todo}" if todo else what)
