"""One shard of a prepare: read its pieces, encode them, shuffle the documents, put the files in place.

Ids are first laid down unshuffled in a file beside the shard, so memory holds one batch of text and a few
numbers per document, whatever the size of the shard.
"""

import json
import mmap
import shutil
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from arriero.data.prepare.preparation import Preparation
from arriero.data.store.shards import DTYPES, Shard, ShardWriter, dtype_for, sync_directory, write_durably
from arriero.data.text.readers import BadRecords, read_piece
from arriero.data.tokens.backends import REFERENCE, Backend, Encoded, OtherIds, SpotCheck, load_backend
from arriero.errors import UserError

GATHERED_TOKENS = 2**20
MAKING = ".making"

Report = Callable[[int, int], None]
"""Called with bytes read and tokens made since the last call."""


def make_shard(preparation: Preparation, number: int, report: Report) -> None:
    name = preparation.shard_name(number)
    used, backend = load_backend(preparation.backend.used, preparation.definition)
    seed = [preparation.settings["seed"], number]
    check = None if used == REFERENCE else SpotCheck(preparation.definition, seed)
    redone = ""
    work = preparation.work / f"{name}{MAKING}"
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
    work.mkdir()
    try:
        with (work / "unshuffled").open("w+b", buffering=2**20) as file:
            gathering = _Gathering(preparation, backend, report, check)
            try:
                gathering.encode_shard(number, file)
            except OtherIds as error:
                report(-gathering.read_bytes, -sum(gathering.lengths))
                redone = f"shard {name}: {used} gave {error}"
                used, backend = load_backend(REFERENCE, preparation.definition)
                file.seek(0)
                file.truncate()
                gathering = _Gathering(preparation, backend, report)
                gathering.encode_shard(number, file)
            file.flush()
            report(preparation.shard_bytes(number) - gathering.read_bytes, 0)
            shard = _write_shuffled(work, name, file, gathering, seed)
        for suffix in (".idx", ".bin"):
            (work / f"{name}{suffix}").replace(preparation.directory / f"{name}{suffix}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    sync_directory(preparation.directory)
    record: dict[str, Any] = {
        "shard": shard._replace(text_bytes=gathering.text_bytes)._asdict(),
        "backend": used,
        "redone": redone,
        "empty": gathering.empty,
        "spelled_out": gathering.spelled_out,
        "sources": {
            number: [each.kept, each.count, each.links, each.examples]
            for number, each in gathering.sources.items()
        },
    }
    write_durably(preparation.record_path(number), json.dumps(record).encode())


class _Gathering:
    """Counts what goes into a shard while its pieces are encoded."""

    def __init__(
        self, preparation: Preparation, backend: Backend, report: Report, check: SpotCheck | None = None
    ) -> None:
        self._preparation = preparation
        self._check = check
        self._backend = backend
        self._report = report
        self.vocab_size = preparation.vocab_size
        self.dtype = DTYPES[dtype_for(preparation.vocab_size)].numpy
        self.lengths = array("i")
        self.text_bytes = 0
        self.read_bytes = 0
        self.empty = 0
        self.spelled_out = {"bos": 0, "eos": 0}
        self.sources: dict[int, BadRecords] = {}

    def encode_shard(self, number: int, file: IO[bytes]) -> None:
        preparation = self._preparation
        for piece in preparation.shards[number]:
            files = preparation.inputs[piece.first : piece.first + piece.files]
            column = preparation.text.column_of(files[0])
            bad = self.sources.setdefault(files[0].source, BadRecords(preparation.text.skip_bad))
            for batch in read_piece(files, piece.begin, piece.end, column, bad):
                bad.kept += len(batch.texts)
                encoded = self._encode([text for text in batch.texts if text])
                for mark, count in preparation.separators.spelled_out(batch.texts).items():
                    self.spelled_out[mark] += count
                self.empty += len(batch.texts) - len(encoded.lengths)
                self.text_bytes += batch.text_bytes
                self.read_bytes += batch.read_bytes
                self._lay_down(encoded, file, files[0].path)
                self._report(batch.read_bytes, len(encoded.ids))

    def _encode(self, texts: list[str]) -> Encoded:
        encoded = self._backend.encode(texts)
        if self._check and texts:
            self._check.look(texts, encoded)
        if not encoded.lengths.all():
            encoded = Encoded(encoded.ids, encoded.lengths[encoded.lengths > 0])
        separators = self._preparation.separators
        separators.refuse_doubled(encoded)
        return separators.around(encoded)

    def _lay_down(self, encoded: Encoded, file: IO[bytes], path: str) -> None:
        if not len(encoded.ids):
            return
        if (largest := int(encoded.ids.max())) >= self.vocab_size:
            raise UserError(
                f"{path}: the tokenizer gives id {largest}, its vocabulary has {self.vocab_size}",
                "use a tokenizer whose ids lie within its vocabulary",
            )
        if (longest := int(encoded.lengths.max())) >= 2**31:
            raise UserError(f"{path}: a document has {longest} tokens", "split documents beyond 2**31 tokens")
        file.write(encoded.ids.astype(self.dtype).data)
        self.lengths.frombytes(encoded.lengths.astype(np.intc).tobytes())


def _write_shuffled(work: Path, name: str, file: IO[bytes], gathering: _Gathering, seed: list[int]) -> Shard:
    lengths = np.array(gathering.lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    with ShardWriter(work, name, gathering.vocab_size) as writer:
        if len(ends):
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                _gather(np.frombuffer(mapped, gathering.dtype), ends - lengths, lengths, order, writer)
        return writer.close()


def _gather(
    tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, order: np.ndarray, writer: ShardWriter
) -> None:
    """Documents in their new order, about a million tokens at a time."""
    starts, lengths = starts[order], lengths[order]
    totals = np.cumsum(lengths)
    cuts = [0, *np.searchsorted(totals, np.arange(GATHERED_TOKENS, totals[-1], GATHERED_TOKENS)), len(order)]
    for begin, end in pairwise(cuts):
        if begin == end:
            continue
        first, size = starts[begin:end].tolist(), lengths[begin:end].tolist()
        chosen = [tokens[a : a + n] for a, n in zip(first, size, strict=True)]
        writer.add_many(np.concatenate(chosen), lengths[begin:end])
