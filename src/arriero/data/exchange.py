"""Import token files of other systems and export datasets to them; raw tokens are linked, not copied."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from arriero.data import token_formats as formats
from arriero.data.order.shuffle import HELDOUT_SEED
from arriero.data.store.manifest import write_manifest
from arriero.data.store.shards import (
    DTYPES,
    Shard,
    ShardWriter,
    dtype_for,
    index_bytes,
    index_problems,
    read_index,
)
from arriero.data.store.store import TokenStore
from arriero.data.store.verify import Scan, scan_tokens
from arriero.data.token_formats import EOS_KEPT, EOS_STRIPPED, ColumnFile, RawFile, find_files, read_raw
from arriero.data.tokens.tokenizer import Tokenizer, read_definition
from arriero.errors import UserError
from arriero.files import (
    Advance,
    LinkKind,
    link_or_copy,
    no_progress,
    publish_file,
    sha256_of,
    space_for,
    staged_directory,
)

FORMATS = (*formats.RAW_SUFFIX, *formats.COLUMN_SUFFIX)
PROVENANCE = "imported.tsv"

Separator = Literal["add", "keep"]


@dataclass
class Imported:
    """The result of an import."""

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
    """One import. `files` and `total_bytes` are known before it starts, for a progress bar."""

    def __init__(
        self,
        format: str,
        sources: Sequence[Path],
        tokenizer: Tokenizer,
        *,
        dtype: str | None = None,
        column: str | None = None,
        separator: Separator = "add",
        link: LinkKind = "auto",
    ) -> None:
        self.format = format
        self.sources = list(sources)
        self.files = find_files(self.sources, _suffix(format))
        self.total_bytes = sum(path.stat().st_size for path in self.files if path.is_file())
        self._tokenizer = tokenizer
        self._dtype, self._column, self._separator, self._link = dtype, column, separator, link

    def into(self, target: Path, advance: Advance = no_progress) -> Imported:
        made = Imported()
        with staged_directory(target) as making:
            if self.format in formats.RAW_SUFFIX:
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
            how = link_or_copy(file.path, making / f"{name}.bin", self._link)
            made.placed[how] += 1
            made.remarks += [file.remark] if file.remark else []
            made.without_eos += scan.without_eos
            made.empty += scan.empty + scan.only_eos
            index = index_bytes(file.lengths, DTYPES[file.dtype])
            publish_file(making / f"{name}.idx", index)
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
            source = ColumnFile(self.format, path, self._column)
            with ShardWriter(making, f"{number:05d}", self._tokenizer.vocab_size) as writer:
                tokens, size = 0, path.stat().st_size
                for document, ids in enumerate(source):
                    tokens += len(ids)
                    writer.add(self._ended(source, document, ids, made))
                    if document % 256 == 255:
                        advance(size * 256 // source.documents)
                if self.format == "fms-arrow":
                    formats.check_counts(path, source.documents, tokens)
                made.shards.append(writer.close())
            made.placed["copy"] += 1

    def _ended(self, source: ColumnFile, document: int, ids: np.ndarray, made: Imported) -> np.ndarray:
        """Check a document and add its end-of-document token."""
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
        publish_file(making / name, read_definition(self._tokenizer.path).encode())
        lines = zip(made.shards, self.files, strict=True)
        rows = "".join(f"{shard.name}\t{path.resolve()}\n" for shard, path in lines)
        publish_file(making / PROVENANCE, rows.encode())
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


def _suffix(format: str) -> str:
    if format not in FORMATS:
        raise UserError(f"'{format}' is not a format of token files", f"choose one of {', '.join(FORMATS)}")
    return (formats.RAW_SUFFIX | formats.COLUMN_SUFFIX)[format]


def _beyond(path: Path, where: str, bad: int, tokenizer: Tokenizer) -> UserError:
    return UserError(
        f"{path}: {where} has id {bad}, but {tokenizer.path} has {tokenizer.vocab_size} ids",
        "give the tokenizer the file was made with, or copy the file again",
    )


def _doubled(path: Path, where: str) -> UserError:
    return UserError(
        f"{path}: the end-of-document token is doubled, {where}",
        "remove one of the two at its origin, or the model learns to repeat it",
    )


@dataclass
class Exported:
    """The result of an export. `kept_eos` counts fms-arrow files whose separators were not removed."""

    placed: Counter[str] = field(default_factory=Counter)
    kept_eos: int = 0
    empty: int = 0


def export_dataset(
    store: TokenStore,
    format: str,
    target: Path,
    *,
    column: str = formats.HF_COLUMN,
    link: LinkKind = "auto",
    advance: Advance = no_progress,
) -> Exported:
    _suffix(format)
    made = Exported()
    counts = ["dataset/filename,documents,tokens"]
    rewritten = format not in formats.RAW_SUFFIX or link == "copy"
    least = store.tokens * store.dtype.itemsize // 2 if rewritten else 0
    with space_for(target, least), staged_directory(target) as making:
        folder = making / _fms_folder(store.directory) if format == "fms-arrow" else making
        folder.mkdir(exist_ok=True)
        for number in range(store.shards):
            shard = _Shard(store, number)
            made.empty += int((shard.lengths == 0).sum())
            if format in formats.RAW_SUFFIX:
                made.placed[_link_raw(shard, format, folder, link)] += 1
            elif format == "hf-parquet":
                path = folder / f"data-{number:05d}-of-{store.shards:05d}.parquet"
                formats.write_parquet(path, shard.ids, shard.lengths, column)
            else:
                strip = shard.all_end_with(store.eos_id)
                made.kept_eos += not strip
                tokens = formats.write_arrow(folder / f"{shard.name}.arrow", shard.ids, shard.lengths, strip)
                counts.append(f"/{folder.name}/{shard.name}.arrow,{len(shard.lengths)},{tokens}")
            advance(shard.bin.stat().st_size)
        if format == "fms-arrow":
            (making / "meta").mkdir()
            (making / "meta" / f"{folder.name}_counts.csv").write_text("\n".join(counts) + "\n")
    return made


def _fms_folder(directory: Path) -> str:
    """Return the folder name of an fms-arrow export; fms-fsdp ignores folders with "meta" in their name."""
    name = directory.resolve().name
    return "tokens" if "meta" in name else name


class _Shard:
    def __init__(self, store: TokenStore, number: int) -> None:
        self.store = store
        self.name = store.shard_path(number).name
        self.bin, self.idx = store.shard_path(number, ".bin"), store.shard_path(number, ".idx")
        index = read_index(self.idx)
        tokens = store.shard_tokens(number)
        problems = index_problems(index)
        if not self.bin.is_file() or self.bin.stat().st_size != tokens * store.dtype.itemsize:
            problems.append(f"{self.bin.name} does not have {tokens} tokens")
        if index.tokens != tokens or len(index.lengths) != store.shard_documents(number):
            problems.append("the manifest counts other tokens or documents")
        if problems:
            raise UserError(f"{self.idx}: {problems[0]}", f"see `arriero data verify {store.directory}`")
        self.lengths = np.asarray(index.lengths)
        self.ids = np.memmap(self.bin, dtype=store.dtype, mode="r") if tokens else np.empty(0, store.dtype)

    def all_end_with(self, eos_id: int) -> bool:
        last = np.cumsum(self.lengths, dtype=np.int64) - 1
        return bool((self.lengths > 0).all() and (self.ids[last] == eos_id).all()) if len(last) else True


def _link_raw(shard: _Shard, format: str, folder: Path, link: LinkKind) -> str:
    target = folder / f"{shard.name}{formats.RAW_SUFFIX[format]}"
    how = link_or_copy(shard.bin, target, link)
    if format == "megatron":
        link_or_copy(shard.idx, target.with_suffix(".idx"), link)
    elif format == "datatrove":
        formats.write_ds_index(
            target, shard.lengths, str(shard.store.tokenizer_path), shard.store.dtype.itemsize
        )
    else:
        formats.write_csv_index(target, shard.lengths)
    return how
