"""A run's tensors under the names they have in checkpoints, and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.checkpoint.formats.dcp import CarefulReader
from arriero.checkpoint.lazily import OneByOne
from arriero.checkpoint.manifest import Manifest
from arriero.checkpoint.pieces import Extremes, Piece, pieces_of, read_pieces
from arriero.checkpoint.ranks import Ranks
from arriero.errors import UserError

MODEL = "model."
OPTIM = "optim."
_READ_AT_ONCE = 4 << 30
_LISTED = 12

Moments = Mapping[str, Mapping[str, Tensor]]


def flat(weights: Mapping[str, Tensor], state: Moments) -> Mapping[str, Tensor]:
    """Under their names in checkpoints; each is taken from where it is when it is asked for."""
    makers = {MODEL + name: partial(weights.__getitem__, name) for name in weights}
    for name, kinds in state.items():
        makers |= {f"{OPTIM}{name}.{kind}": partial(kinds.__getitem__, kind) for kind in kinds}
    return OneByOne(makers)


def flat_weights(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return flat(weights, {})


Described = Mapping[str, tuple[str, list[int]]]


def described(pieces: Mapping[str, Piece]) -> Described:
    """Of each tensor, its type and its whole shape."""
    return {
        name: (str(piece.local.dtype).removeprefix("torch."), list(piece.shape))
        for name, piece in pieces.items()
    }


def bytes_of(tensors: Described) -> int:
    return sum(getattr(torch, dtype).itemsize * prod(shape) for dtype, shape in tensors.values())


@dataclass(frozen=True)
class Tolerated:
    """Patterns of names that may be missing from a checkpoint, or be in it without use."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load_tensors(
    directory: Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    keep: Callable[[str, Tensor], None],
    ranks: Ranks,
    everywhere: Callable[[dict[str, Any]], dict[str, Any]],
    tolerated: Tolerated,
    prefix: str = "",
) -> None:
    """Fill the tensors, in place, from a checkpoint of any layout, and give each to `keep`; some at a time,
    since all may not fit. Called by all ranks.

    `everywhere` joins what the ranks of a pipeline hold. Only names with `prefix` are looked at.
    """
    pieces = pieces_of(tensors)
    wanted = everywhere({name: list(piece.shape) for name, piece in pieces.items()})
    there = {name: shape for name, (_, shape) in manifest.tensors.items() if name.startswith(prefix)}
    _refuse_strangers(directory, wanted, there, tolerated)
    # of all ranks' names and in the file's order, lest one read less often than the others
    sizes = {name: bytes_of({name: manifest.tensors[name]}) for name in there if name in wanted}
    reader = CarefulReader(directory)
    for names in _batches(sizes, _READ_AT_ONCE * ranks.size):
        some = {name: tensors[name] for name in names if name in tensors}
        read_pieces(reader, pieces_of(some), ranks)
        for name, tensor in some.items():
            keep(name, tensor)


def non_finite_tensors(
    directory: Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Names of the tensors of a checkpoint with a NaN or an infinity; read whole, one at a time."""
    reader, extremes = CarefulReader(directory), Extremes()
    for name, (dtype, shape) in manifest.tensors.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensor.is_floating_point():
            read_pieces(reader, pieces_of({name: tensor}), Ranks())
            extremes.add(name, tensor)
        progress(tensor.nbytes)
    return extremes.non_finite()


def _batches(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    batch: list[str] = []
    left = most
    for name, size in sizes.items():
        if batch and size > left:
            yield batch
            batch, left = [], most
        batch.append(name)
        left -= size
    if batch:
        yield batch


def _refuse_strangers(
    directory: Path, wanted: Mapping[str, Any], there: Mapping[str, Any], tolerated: Tolerated
) -> None:
    missing = _not_tolerated(wanted.keys() - there.keys(), tolerated.missing)
    unexpected = _not_tolerated(there.keys() - wanted.keys(), tolerated.unexpected)
    changed = sorted(name for name in wanted.keys() & there.keys() if list(wanted[name]) != list(there[name]))
    shapes = [f"{name} {there[name]}, not {wanted[name]}" for name in changed]
    problems = [
        f"{heading} {listed(names)}"
        for heading, names in (("lacks", missing), ("has unexpected", unexpected), ("has", shapes))
        if names
    ]
    if problems:
        raise UserError(
            f"{directory} does not fit this model and optimizer: it {'; it '.join(problems)}",
            "use the run file it was trained with, or name what may differ in checkpoint.load.allow_missing "
            "or checkpoint.load.allow_unexpected",
        )


def _not_tolerated(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns))


def listed(names: list[str]) -> str:
    """The first of many names, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
