"""The command line in a forked process."""

import gc
import os
import sys


def run_command_line(arguments, cwd, environment, files, code=None):
    """Become `python -m arriero ARGUMENTS`, or `python -c CODE ARGUMENTS`, elsewhere."""
    from arriero.__main__ import main

    gc.freeze()  # a collection would copy the memory that this process shares with its parent
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["arriero", *arguments]
    if code is None:
        main()
    else:
        exec(code, {})
