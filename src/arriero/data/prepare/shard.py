"""Make one shard of a prepared dataset: read its text ranges, encode them, shuffle the documents, publish.

The ids are first written unshuffled to a file beside the shard, so memory holds one batch of text and a few
numbers per document, whatever the size of the shard.
"""

import json
import mmap
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from arriero.data.prepare.planning import Preparation
from arriero.data.store.loss_mask import MASK
from arriero.data.store.shards import DTYPES, ShardWriter, dtype_for
from arriero.data.text.formats import MarkedText
from arriero.data.text.readers import BadRecords, read_text_range
from arriero.data.tokens.encoders import REFERENCE, CheckedEncoder, IdsDiffer, load_encoder
from arriero.data.tokens.marked import encode_chats, encode_parts
from arriero.data.tokens.tokenizer import Encoded, Separators, SpecialToken
from arriero.errors import UserError
from arriero.files import publish_file, sha256_of_file, sync

MAKING = ".making"
GATHERED_TOKENS = 2**20

Report = Callable[[int, int], None]
"""Called with the bytes read and the tokens made since the last call."""


def make_shard(preparation: Preparation, number: int, report: Report) -> None:
    """Make a shard and its record; if the ids differ from those of `tokenizers`, repeat it with that."""
    name = preparation.shard_name(number)
    seed = [preparation.settings["seed"], number]
    redone = mask_sha256 = ""
    work = preparation.work / f"{name}{MAKING}"
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
    work.mkdir()
    try:
        unshuffled, included = (
            (work / each).open("w+b", buffering=2**20) for each in ("unshuffled", "included")
        )
        with unshuffled, included:
            encoding = ShardEncoding(preparation, preparation.backend.used, seed, report)
            try:
                encoding.encode_shard(number, unshuffled, included)
            except IdsDiffer as error:
                report(-encoding.read_bytes, -sum(encoding.lengths))
                redone = f"shard {name}: {encoding.used} gave {error}"
                for file in (unshuffled, included):
                    file.seek(0)
                    file.truncate()
                encoding = ShardEncoding(preparation, REFERENCE, seed, report)
                encoding.encode_shard(number, unshuffled, included)
            report(preparation.shard_bytes(number) - encoding.read_bytes, 0)
            with ShardWriter(work, name, preparation.vocab_size) as writer:
                for ids, lengths in _shuffled(unshuffled, encoding.dtype, encoding.lengths, seed):
                    writer.add_many(ids, lengths)
                shard = writer.close()
            suffixes = [".idx", ".bin"]
            if preparation.text.masks_loss:
                suffixes.append(f".{MASK}")
                _write_mask(work / f"{name}.{MASK}", included, encoding.lengths, seed)
                mask_sha256 = sha256_of_file(work / f"{name}.{MASK}")
        for suffix in suffixes:
            (work / f"{name}{suffix}").replace(preparation.directory / f"{name}{suffix}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    sync(preparation.directory)
    record: dict[str, Any] = {
        "shard": shard._replace(text_bytes=encoding.text_bytes)._asdict(),
        "backend": encoding.used,
        "redone": redone,
        "empty": encoding.empty,
        "spelled_out": encoding.spelled_out,
        "mask_sha256": mask_sha256,
        "sources": {
            source: [each.kept, each.count, each.links, each.examples]
            for source, each in encoding.sources.items()
        },
    }
    publish_file(preparation.record_path(number), json.dumps(record).encode())


class ShardEncoding:
    """Encodes the text ranges of a shard and counts what goes into it."""

    def __init__(self, preparation: Preparation, encoder: str, seed: list[int], report: Report) -> None:
        self._preparation, self._report = preparation, report
        self.used, self._encoder = load_encoder(encoder, preparation.definition)
        if self.used != REFERENCE:
            self._encoder = CheckedEncoder(self._encoder, preparation.definition, seed)
        self.dtype = DTYPES[dtype_for(preparation.vocab_size)].numpy
        self.lengths = array("i")
        self.text_bytes = self.read_bytes = self.empty = 0
        self.spelled_out = {"bos": 0, "eos": 0}
        self.sources: dict[int, BadRecords] = {}

    def encode_shard(self, number: int, file: IO[bytes], masks: IO[bytes]) -> None:
        """Write the ids and, where the loss excludes some, for each a byte that is 1 if it is included."""
        preparation = self._preparation
        for part in preparation.shards[number]:
            files = preparation.inputs[part.first : part.first + part.files]
            column = preparation.text.format_of(files[0])
            bad = self.sources.setdefault(files[0].source, BadRecords(preparation.text.skip_bad))
            for batch in read_text_range(files, part.begin, part.end, column, bad):
                bad.kept += len(batch.texts)
                encoded, included = self.encode([text for text in batch.texts if text])
                for separator, count in preparation.separators.spelled_out(batch.texts).items():
                    self.spelled_out[separator] += count
                self.empty += len(batch.texts) - len(encoded.lengths)
                self.text_bytes += batch.text_bytes
                self.read_bytes += batch.read_bytes
                self._write(encoded, file, files[0].path)
                if preparation.text.masks_loss:
                    masks.write(included.data)
                self._report(batch.read_bytes, len(encoded.ids))

    def encode(self, texts: list[str]) -> tuple[Encoded, np.ndarray]:
        """Return the ids of documents with their separators, and for each token whether it is included."""
        separators = self._preparation.separators
        marked = [text for text in texts if isinstance(text, MarkedText)]
        if len(marked) < len(texts) or not texts:
            encoded = self._encoder.encode(texts)
            included = np.ones(len(encoded.ids), dtype=bool)
        elif marked[0].is_chat:
            encoded, included = encode_chats(marked, self._preparation.definition)
        else:
            encoded, included = encode_parts(marked, self._encoder)
        if not encoded.lengths.all():
            encoded = Encoded(encoded.ids, encoded.lengths[encoded.lengths > 0])
        separators.check_not_doubled(encoded)
        # the loss includes the end of a document, and its beginning where there is no prompt
        flags = (SpecialToken("", int(not marked)), SpecialToken("", 1))
        edges = Separators(*(flag if mark else None for flag, mark in zip(flags, separators, strict=True)))
        masks = edges.around(Encoded(included.astype(np.uint8), encoded.lengths)).ids
        return separators.around(encoded), masks

    def _write(self, encoded: Encoded, file: IO[bytes], path: str) -> None:
        if not len(encoded.ids):
            return
        if (largest := int(encoded.ids.max())) >= (vocab_size := self._preparation.vocab_size):
            raise UserError(
                f"{path}: the tokenizer gives id {largest}, its vocabulary has {vocab_size}",
                "use a tokenizer whose ids lie within its vocabulary",
            )
        if (longest := int(encoded.lengths.max())) >= 2**31:
            raise UserError(f"{path}: a document has {longest} tokens", "split documents beyond 2**31 tokens")
        file.write(encoded.ids.astype(self.dtype).data)
        self.lengths.frombytes(encoded.lengths.astype(np.intc).tobytes())


def _write_mask(path: Path, included: IO[bytes], sizes: Sequence[int], seed: list[int]) -> None:
    """Write the loss mask of a shard, one bit per token, in the order of its documents."""
    left = np.empty(0, dtype=np.uint8)
    with path.open("wb") as target:
        for bits, _ in _shuffled(included, np.uint8, sizes, seed):
            bits = np.concatenate((left, bits))
            whole = len(bits) // 8 * 8
            target.write(np.packbits(bits[:whole], bitorder="little").data)
            left = bits[whole:]
        target.write(np.packbits(left, bitorder="little").data)
        target.flush()
        os.fsync(target.fileno())


def _shuffled(
    file: IO[bytes], dtype: Any, sizes: Sequence[int], seed: list[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield documents and their lengths in a random order, about a million elements at a time."""
    lengths = np.array(sizes, dtype=np.int64)
    if not len(lengths):
        return
    file.flush()
    order = np.random.default_rng(seed).permutation(len(lengths))
    starts, lengths = (np.cumsum(lengths) - lengths)[order], lengths[order]
    totals = np.cumsum(lengths)
    cuts = [0, *np.searchsorted(totals, np.arange(GATHERED_TOKENS, totals[-1], GATHERED_TOKENS)), len(starts)]
    tokens = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)
    for begin, end in pairwise(cuts):
        spans = zip(starts[begin:end].tolist(), lengths[begin:end].tolist(), strict=True)
        if begin < end:
            yield np.concatenate([tokens[a : a + n] for a, n in spans]), lengths[begin:end]
