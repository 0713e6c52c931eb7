"""Arguments that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[
    Path | None, typer.Argument(help="A run file; without one, the embedded default.", show_default=False)
]
Sets = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file; repeatable.")
]
