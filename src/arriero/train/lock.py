"""One run at a time in a run directory: two would delete each other's checkpoints."""

from contextlib import AbstractContextManager
from pathlib import Path

from arriero.files import locked

# a killed run may need a moment to disappear
WAIT_S = 3.0


def held(directory: Path) -> AbstractContextManager[bool]:
    """Lock a run directory, which need not exist yet, for this process; the lock file is beside it."""
    return locked(
        directory.with_name(f".{directory.name}.lock"),
        directory,
        busy="wait for it or stop it, or choose another run with --set run.name=NAME",
        unwritable="set run.dir to a directory you may write",
        wait_s=WAIT_S,
    )
