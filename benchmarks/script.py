"""Run a function as a command-line script: mistakes end with one sentence and exit code 2."""

import sys
from collections.abc import Callable

import typer

from arriero.errors import UserError


def run_script(command: Callable[..., None]) -> None:
    try:
        typer.run(command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
