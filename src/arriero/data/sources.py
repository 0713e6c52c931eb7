"""Where text comes from: documents, one after another."""

import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

from arriero.errors import UserError

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Document(NamedTuple):
    name: str
    text: str


def stdlib_documents(folder: Path | None = None) -> list[Document]:
    """The Python standard library's own source without its tests, one file a document, in order of path."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(_python_files(folder), key=lambda path: path.relative_to(folder).as_posix()):
        try:
            text = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text:
            documents.append(Document(path.relative_to(folder).as_posix(), text))
    if not documents:
        raise UserError(
            f"the Python standard library at {folder} has no source files",
            "use a Python that carries its sources, or name a prepared dataset",
        )
    return documents


def _python_files(folder: Path) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [Path(parent, name) for name in files if name.endswith(".py")]
    return found
