"""Evaluations of a checkpoint, stored beside its manifest: one file each, published atomically.

The manifest does not list these files, so that a checkpoint stays as it was saved.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from arriero.checkpoint.directory import MANIFEST, SavedCheckpoint
from arriero.files import publish_file, sha256_of_json
from arriero.units import human_bytes, human_count

_NAME = "evaluation-{}.json"


@dataclass(frozen=True)
class Evaluation:
    """`scores` are the main numbers by name; `settings` identify the evaluation, `details` has the rest."""

    kind: str
    scores: Mapping[str, float]
    settings: Mapping[str, Any]
    details: Mapping[str, Any]
    time: float

    def __str__(self) -> str:
        return ", ".join(f"{name} {_rounded(value)}" for name, value in self.scores.items())


def _rounded(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def attach_evaluation(
    directory: Path,
    kind: str,
    scores: Mapping[str, float],
    settings: Mapping[str, Any],
    details: Mapping[str, Any],
) -> Path | None:
    """Store an evaluation beside the manifest of a checkpoint; an earlier one of the same settings is
    replaced. Return None for a directory without a manifest: other formats are left as they are."""
    if not (directory / MANIFEST).is_file():
        return None
    made = Evaluation(kind, scores, settings, details, time.time())
    path = directory / _NAME.format(_key(kind, settings))
    publish_file(path, (json.dumps(asdict(made), indent=1) + "\n").encode())
    return path


@dataclass(frozen=True)
class CheckpointRow:
    """The facts of a saved checkpoint for a row of a table; None where its manifest cannot be read."""

    step: int
    directory: str
    tokens: int | None
    bytes: int | None
    saved_at: float | None
    evaluations: Sequence[Evaluation]
    problem: str | None

    @property
    def scores(self) -> str:
        return "; ".join(map(str, self.evaluations))

    def shown(self, when: Callable[[float], str]) -> tuple[str, str, str]:
        """Return tokens, size and time of saving as text."""
        if self.tokens is None or self.bytes is None or self.saved_at is None:
            return "", "", ""
        return human_count(self.tokens), human_bytes(self.bytes), when(self.saved_at)


def checkpoint_row(saved: SavedCheckpoint) -> CheckpointRow:
    made, scores = saved.manifest, read_evaluations(saved.directory)
    held = (made.tokens, made.size, made.time) if made else (None, None, None)
    return CheckpointRow(saved.step, str(saved.directory), *held, scores, saved.problem)


def has_evaluation(directory: Path, kind: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has an evaluation with these settings."""
    return (directory / _NAME.format(_key(kind, settings))).is_file()


def read_evaluations(directory: Path) -> list[Evaluation]:
    """Return the evaluations of a checkpoint, oldest first; a file that is not one is ignored."""
    found = []
    for path in directory.glob(_NAME.format("*")):
        with suppress(OSError, ValidationError):
            found.append(_reader().validate_json(path.read_bytes()))
    return sorted(found, key=lambda each: each.time)


@cache
def _reader() -> TypeAdapter[Evaluation]:
    return TypeAdapter(Evaluation)


def _key(kind: str, settings: Mapping[str, Any]) -> str:
    return f"{kind}-{sha256_of_json(dict(settings))[:12]}"
