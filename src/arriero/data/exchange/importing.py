"""Other systems' token files become a prepared dataset; files of raw tokens are linked, not copied."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from arriero.data.exchange import columns, raw
from arriero.data.exchange.columns import EOS_KEPT, EOS_STRIPPED, ColumnFile
from arriero.data.exchange.raw import RawFile, find_files, read_raw
from arriero.data.order.heldout import HELDOUT_SEED
from arriero.data.store.links import Link, place
from arriero.data.store.scan import Advance, Scan, scan_tokens, unseen
from arriero.data.store.shards import (
    DTYPES,
    Shard,
    ShardWriter,
    dtype_for,
    index_bytes,
    sha256_of,
    write_durably,
)
from arriero.data.store.staging import staged_directory
from arriero.data.store.store import write_manifest
from arriero.data.tokens.tokenizer import Tokenizer, read_definition
from arriero.errors import UserError

FORMATS = (*raw.SUFFIX, *columns.SUFFIX)
PROVENANCE = "imported.tsv"

Separator = Literal["add", "keep"]


@dataclass
class Imported:
    """What was made, and what the user should know of it."""

    shards: list[Shard] = field(default_factory=list)
    placed: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)
    without_eos: int = 0
    empty: int = 0
    eos_added: int = 0

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)


class Import:
    """One import. `files` are known at once, so that a caller can show progress over `total_bytes`."""

    def __init__(
        self,
        format: str,
        sources: Sequence[Path],
        tokenizer: Tokenizer,
        *,
        dtype: str | None = None,
        column: str | None = None,
        separator: Separator = "add",
        link: Link = "auto",
    ) -> None:
        suffixes = raw.SUFFIX | columns.SUFFIX
        if format not in suffixes:
            raise UserError(
                f"'{format}' is not a format of token files", f"choose one of {', '.join(FORMATS)}"
            )
        self.format = format
        self.sources = list(sources)
        self.files = find_files(self.sources, suffixes[format])
        self.total_bytes = sum(path.stat().st_size for path in self.files if path.is_file())
        self._tokenizer = tokenizer
        self._dtype, self._column, self._separator, self._link = dtype, column, separator, link

    def into(self, target: Path, advance: Advance = unseen) -> Imported:
        made = Imported()
        with staged_directory(target) as making:
            if self.format in raw.SUFFIX:
                dtype = self._link_all(making, made, advance)
            else:
                dtype = dtype_for(self._tokenizer.vocab_size)
                self._rewrite_all(making, made, advance)
            self._finish(making, made, dtype)
        return made

    def _link_all(self, making: Path, made: Imported, advance: Advance) -> str:
        files = [read_raw(self.format, path, self._tokenizer, self._dtype) for path in self.files]
        by_dtype = {file.dtype: file.path for file in files}
        if len(by_dtype) > 1:
            (one, first), (other, second) = list(by_dtype.items())[:2]
            raise UserError(f"{first} holds {one} tokens, {second} {other}", "import them as two datasets")
        for number, file in enumerate(files):
            scan = self._scan(file, advance)
            name = f"{number:05d}"
            how = place(file.path, making / f"{name}.bin", self._link)
            made.placed[how] += 1
            made.remarks += [file.remark] if file.remark else []
            made.without_eos += scan.without_eos
            made.empty += scan.empty + scan.only_eos
            index = index_bytes(file.lengths, DTYPES[file.dtype])
            write_durably(making / f"{name}.idx", index)
            made.shards.append(Shard(name, scan.tokens, scan.documents, 0, scan.sha256, sha256_of(index)))
        return files[0].dtype

    def _scan(self, file: RawFile, advance: Advance) -> Scan:
        tokenizer = self._tokenizer
        scan = scan_tokens(
            file.path, file.dtype, file.lengths, tokenizer.vocab_size, tokenizer.eos_id, advance
        )
        if scan.beyond:
            position, bad = scan.beyond
            document = int(np.searchsorted(np.cumsum(file.lengths), position, side="right"))
            raise _beyond(file.path, f"token {position} (document {document})", bad, tokenizer)
        if scan.doubled is not None:
            document = int(np.searchsorted(np.cumsum(file.lengths), scan.doubled, side="right"))
            raise _doubled(
                file.path, f"document {document} has it at tokens {scan.doubled - 1} and {scan.doubled}"
            )
        if scan.mostly_eos:
            raise _doubled(file.path, f"{scan.only_eos} of {scan.documents} documents hold nothing else")
        return scan

    def _rewrite_all(self, making: Path, made: Imported, advance: Advance) -> None:
        for number, path in enumerate(self.files):
            source = columns.READERS[self.format](path, self._column)
            with ShardWriter(making, f"{number:05d}", self._tokenizer.vocab_size) as writer:
                tokens, size = 0, path.stat().st_size
                for document, ids in enumerate(source):
                    tokens += len(ids)
                    writer.add(self._ended(source, document, ids, made))
                    if document % 256 == 255:
                        advance(size * 256 // source.documents)
                if self.format == "fms-arrow":
                    columns.check_counts(path, source.documents, tokens)
                made.shards.append(writer.close())
            made.placed["copy"] += 1

    def _ended(self, source: ColumnFile, document: int, ids: np.ndarray, made: Imported) -> np.ndarray:
        """The document with its end-of-document token, checked."""
        eos_id, where = self._tokenizer.eos_id, f"document {document}"
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size:
            k = int(np.flatnonzero((ids < 0) | (ids >= self._tokenizer.vocab_size))[0])
            raise _beyond(source.path, f"token {k} of {where}", int(ids[k]), self._tokenizer)
        ends = len(ids) > 0 and ids[-1] == eos_id
        foreign = source.eos not in (EOS_KEPT, EOS_STRIPPED) and self._separator == "add"
        if source.eos == EOS_STRIPPED or (foreign and len(ids) and not ends):
            made.eos_added += 1
            ids, ends = np.append(ids, eos_id), True
        if len(ids) > 1 and ids[-1] == ids[-2] == eos_id:
            raise _doubled(source.path, f"{where} ends with it twice")
        made.empty += len(ids) == 0 or (len(ids) == 1 and bool(ends))
        made.without_eos += len(ids) > 0 and not ends
        return ids

    def _finish(self, making: Path, made: Imported, dtype: str) -> None:
        name = "tokenizer.json"
        write_durably(making / name, read_definition(self._tokenizer.path).encode())
        lines = zip(made.shards, self.files, strict=True)
        rows = "".join(f"{shard.name}\t{path.resolve()}\n" for shard, path in lines)
        write_durably(making / PROVENANCE, rows.encode())
        write_manifest(
            making,
            made.shards,
            tokenizer=name,
            vocab_size=self._tokenizer.vocab_size,
            eos_id=self._tokenizer.eos_id,
            dtype=dtype,
            about={
                "source": f"imported from {self.format}",
                "from": [str(source) for source in self.sources],
                "files": PROVENANCE,
                "placed": dict(made.placed),
                "eos": self._tokenizer.eos,
                "documents_without_eos": made.without_eos,
                HELDOUT_SEED: 1,
            },
        )


def _beyond(path: Path, where: str, bad: int, tokenizer: Tokenizer) -> UserError:
    return UserError(
        f"{path}: {where} has id {bad}, but {tokenizer.path} has {tokenizer.vocab_size} ids",
        "give the tokenizer the file was made with, or copy the file again",
    )


def _doubled(path: Path, where: str) -> UserError:
    return UserError(
        f"{path}: the end-of-document token is doubled, {where}",
        "remove one of the two where the file was made; training on both teaches the model to repeat it",
    )
