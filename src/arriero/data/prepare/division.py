"""How the inputs are divided over shards: decided once, before any text is read, and written down.

Big JSONL files are cut into byte ranges, Parquet into row groups; small text files are put together. The
pieces are shuffled and dealt to the shards, so each shard mixes the inputs and none depends on who makes it.
"""

import heapq
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from arriero.data.text.readers import NO_FILE
from arriero.data.text.sources import DANGLING, Input
from arriero.data.text.synthetic import markov_text
from arriero.errors import UserError

PIECES_PER_SHARD = 8
LARGEST_PIECE = 64_000_000
ONE_DOCUMENT = ("text", DANGLING)
UNPACKED = 4  # compressed text grows by about this much


class Piece(NamedTuple):
    """`files` inputs from number `first` on; `begin` and `end` as `readers.read_piece` takes them."""

    first: int
    files: int
    begin: int
    end: int
    bytes: int


def divide(inputs: Sequence[Input], shard_bytes: int, seed: int) -> list[list[Piece]]:
    """The pieces of each shard. `shard_bytes` is text, estimated where a file is compressed."""
    pieces = _pieces(inputs, max(1, min(LARGEST_PIECE, shard_bytes // PIECES_PER_SHARD)))
    if not pieces:
        raise UserError("the sources hold no text", "check the paths; empty files have no documents")
    total = sum(piece.bytes for piece in pieces)
    count = min(len(pieces), max(1, round(total / shard_bytes)))
    shards: list[list[Piece]] = [[] for _ in range(count)]
    filled = [(0, number) for number in range(count)]
    for piece in random.Random(seed).sample(pieces, len(pieces)):
        size, number = heapq.heappop(filled)
        shards[number].append(piece)
        heapq.heappush(filled, (size + piece.bytes, number))
    return shards


def _pieces(inputs: Sequence[Input], size: int) -> list[Piece]:
    pieces: list[Piece] = []
    for number, source in enumerate(inputs):
        if source.kind in ONE_DOCUMENT:
            _add_text(pieces, inputs, number, size)
        elif source.kind == "parquet":
            pieces += _row_groups(source, number, size)
        elif source.kind == "synthetic":
            pieces += _synthetic(source, number, size)
        elif source.compression or source.kind == "arrow":
            if source.size:
                pieces.append(Piece(number, 1, 0, NO_FILE, _text_bytes(source)))
        else:
            cuts = _cuts(source.size, size)
            pieces += [Piece(number, 1, a, b, b - a) for a, b in pairwise(cuts)]
    return pieces


def _text_bytes(source: Input) -> int:
    return source.size * (UNPACKED if source.compression else 1)


def _cuts(whole: int, size: int) -> list[int]:
    count = max(1, -(-whole // size))
    return [whole * i // count for i in range(count + 1)] if whole else []


def _add_text(pieces: list[Piece], inputs: Sequence[Input], number: int, size: int) -> None:
    """Put the file to the piece before it while that stays small."""
    amount = _text_bytes(inputs[number])
    if pieces:
        last = pieces[-1]
        first = inputs[last.first]
        one_source = first.source == inputs[number].source
        adjoins = one_source and last.first + last.files == number and first.kind in ONE_DOCUMENT
        if adjoins and last.bytes + amount <= size:
            pieces[-1] = last._replace(files=last.files + 1, bytes=last.bytes + amount)
            return
    pieces.append(Piece(number, 1, 0, NO_FILE, amount))


def _row_groups(source: Input, number: int, size: int) -> list[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source.path) as file:
            sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{source.path} is not a Parquet file ({reason})", "fetch or write it again"
        ) from None
    pieces: list[Piece] = []
    for group, amount in enumerate(sizes):
        if pieces and pieces[-1].bytes + amount <= size:
            pieces[-1] = pieces[-1]._replace(end=group + 1, bytes=pieces[-1].bytes + amount)
        else:
            pieces.append(Piece(number, 1, group, group + 1, amount))
    return pieces


def _synthetic(source: Input, number: int, size: int) -> list[Piece]:
    each = markov_text().document_bytes
    cuts = _cuts(max(1, round(source.size / each)), max(1, int(size / each)))
    return [Piece(number, 1, a, b, int((b - a) * each)) for a, b in pairwise(cuts)]
