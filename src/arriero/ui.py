"""Terminal output of all verbs: the console, --quiet, --json, the bar of work counted in bytes."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Whether consoles made from now on print nothing."""
    global _quiet
    _quiet = quiet


def make_console(as_json: bool = False, wide: bool = False) -> Console:
    """The console of a verb. With --json bars go to standard error, where they do not disturb the object.

    `wide` is for tables: 160 columns where the output is not a terminal.
    """
    width = 160 if wide and not sys.stdout.isatty() and "COLUMNS" not in os.environ else None
    return Console(highlight=False, stderr=as_json, quiet=_quiet, width=width)


def print_json(facts: Mapping[str, Any]) -> None:
    """Print one JSON object, the whole standard output of a verb with --json."""
    sys.stdout.write(json.dumps(facts, indent=2, allow_nan=False, default=str) + "\n")


def byte_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
