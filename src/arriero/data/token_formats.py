"""Token files of other systems: their layouts, readers and writers.

megatron   NAME.bin and NAME.idx (v1)
datatrove  NAME.ds, u64 document ends in NAME.ds.index
olmo       NAME.npy without a NumPy header, "start,end,..." lines in NAME.csv.gz
fms-arrow  one record batch per document, column `tokens` of uint32; `meta/*counts*.csv` beside the folders
hf-parquet one row per document with a column of list<int32>, usually `input_ids`

The first three are raw tokens, which Arriero reads as they are; the other two are rewritten.
"""

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from arriero.data.store.shards import (
    DTYPES,
    LONGEST_DOCUMENT,
    document_lengths,
    dtype_for,
    index_problems,
    read_index,
)
from arriero.data.tokens.tokenizer import Tokenizer
from arriero.errors import UserError

RAW_SUFFIX = {"megatron": ".bin", "datatrove": ".ds", "olmo": ".npy"}

_CHUNK_TOKENS = 2**21
_COPY_AGAIN = "copy it again from where it was made"


class RawFile(NamedTuple):
    """A file of raw tokens, the lengths of its documents and, if there is one, a remark for the user."""

    path: Path
    dtype: str
    lengths: np.ndarray
    remark: str = ""


def read_raw(format: str, path: Path, tokenizer: Tokenizer, dtype: str | None) -> RawFile:
    """Read where documents end. `dtype` replaces the type derived from the index or the vocabulary."""
    if not path.is_file():
        raise UserError(
            f"{path} is missing", f"give files that end with {RAW_SUFFIX[format]}, or their directory"
        )
    if format == "megatron":
        found = _read_megatron(path)
    else:
        found = {"datatrove": _read_datatrove, "olmo": _read_olmo}[format](path, tokenizer, dtype)
    if dtype and found.dtype != dtype:
        raise UserError(f"{path} holds {found.dtype} tokens by its index, not {dtype}", "leave out --dtype")
    if found.dtype == "uint16" and tokenizer.vocab_size > 2**16:
        raise UserError(
            f"{path} has 2 bytes per token, but {tokenizer.path} has {tokenizer.vocab_size} ids",
            "give the tokenizer the file was made with",
        )
    if (longest := found.lengths.max(initial=0)) > LONGEST_DOCUMENT:
        document = int(found.lengths.argmax())
        raise UserError(
            f"{path}: document {document} has {longest} tokens", "cut it: an index holds 2^31 - 1"
        )
    return found


def _read_megatron(path: Path) -> RawFile:
    idx = path.with_suffix(".idx")
    index = read_index(idx)
    for problem in index_problems(index):
        raise UserError(f"{idx} does not fit together: {problem}", _COPY_AGAIN)
    size = path.stat().st_size
    if size != index.tokens * index.itemsize:
        raise UserError(
            f"{path} has {size} bytes, its index {idx.name} says {index.tokens * index.itemsize}", _COPY_AGAIN
        )
    lengths = document_lengths(index)
    joined = len(index.lengths) - len(lengths)
    remark = f"{path.name}: {len(index.lengths)} sequences form {len(lengths)} documents" if joined else ""
    return RawFile(path, index.dtype, lengths, remark)


def _read_datatrove(path: Path, tokenizer: Tokenizer, dtype: str | None) -> RawFile:
    loss = path.with_name(path.name + ".loss")
    remark = f"{loss.name} is a loss mask, which is not imported" if loss.exists() else ""
    index = path.with_name(path.name + ".index")
    if not index.exists():
        return _split_at_eos(path, tokenizer, dtype, f"{index.name} is absent")._replace(remark=remark)
    if index.stat().st_size % 8:
        raise UserError(f"{index} has {index.stat().st_size} bytes, not a multiple of 8", _COPY_AGAIN)
    ends = np.fromfile(index, dtype="<u8").astype(np.int64)
    return _from_ends(path, index, ends, tokenizer, remark)


def _read_olmo(path: Path, tokenizer: Tokenizer, dtype: str | None) -> RawFile:
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise UserError(
                f"{path} has a NumPy header; OLMo's .npy is bare tokens", "write it with tofile()"
            )
    table = path.with_suffix(".csv.gz")
    if not table.exists():
        return _split_at_eos(path, tokenizer, dtype, f"{table.name} is absent")
    return _from_ends(path, table, _csv_ends(table), tokenizer, "")


def _csv_ends(table: Path) -> np.ndarray:
    ends, before = [], 0
    number = 0
    try:
        with gzip.open(table, "rt") as lines:
            for number, line in enumerate(lines, start=1):
                start, end = (int(field) for field in line.split(",", 2)[:2])
                if start != before or end < start:
                    raise UserError(
                        f"{table}, line {number}: tokens {start} to {end} do not follow on {before}",
                        "documents must lie one after another without gaps",
                    )
                ends.append(end)
                before = end
    except ValueError:
        raise UserError(f"{table}, line {number}: not 'start,end,...'", _COPY_AGAIN) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{table} is damaged after line {number} ({error})", _COPY_AGAIN) from None
    return np.array(ends, dtype=np.int64)


def _from_ends(path: Path, index: Path, ends: np.ndarray, tokenizer: Tokenizer, remark: str) -> RawFile:
    size, tokens = path.stat().st_size, int(ends[-1]) if len(ends) else 0
    widths = {layout.numpy.itemsize: name for name, layout in DTYPES.items()}
    lengths = np.diff(ends, prepend=0)
    if (bad := np.flatnonzero(lengths < 0)).size:
        raise UserError(f"{index}: document {bad[0]} ends before the one before it", _COPY_AGAIN)
    if size == tokens == 0:
        return RawFile(path, dtype_for(tokenizer.vocab_size), lengths, remark)
    width = size // tokens if tokens and size % tokens == 0 else 0
    if width not in widths:
        raise UserError(
            f"{path} has {size} bytes, but {index.name} ends at token {tokens}: neither 2 nor 4 bytes each",
            _COPY_AGAIN,
        )
    return RawFile(path, widths[width], lengths, remark)


def _split_at_eos(path: Path, tokenizer: Tokenizer, dtype: str | None, why: str) -> RawFile:
    dtype = dtype or dtype_for(tokenizer.vocab_size)
    layout = DTYPES[dtype].numpy
    size = path.stat().st_size
    if size % layout.itemsize:
        raise UserError(f"{path} has {size} bytes, not a whole number of {dtype} tokens", _COPY_AGAIN)
    tokens = size // layout.itemsize
    found = [np.zeros(1, dtype=np.int64)]
    with path.open("rb") as file:
        for begin in range(0, tokens, _CHUNK_TOKENS):
            ids = np.fromfile(file, dtype=layout, count=_CHUNK_TOKENS)
            found.append(np.flatnonzero(ids == tokenizer.eos_id) + begin + 1)
    ends = np.concatenate(found)
    if ends[-1] != tokens:
        ends = np.append(ends, tokens)
    remark = f"{path.name}: documents end at {tokenizer.eos}, because {why}; tokens are read as {dtype}"
    return RawFile(path, dtype, np.diff(ends), remark)


def write_ds_index(path: Path, lengths: np.ndarray, tokenizer_name: str, itemsize: int) -> None:
    """Write the files that datatrove stores beside a `.ds`."""
    ends = np.cumsum(lengths, dtype=np.int64).astype("<u8")
    path.with_name(path.name + ".index").write_bytes(ends.tobytes())
    tokens = int(ends[-1]) if len(ends) else 0
    words = f"{tokenizer_name}|{itemsize}\n{tokens}\n{tokens / 1e9:.3f} GT"
    path.with_name(path.name + ".metadata").write_text(words)


def write_csv_index(path: Path, lengths: np.ndarray) -> None:
    ends = np.cumsum(lengths, dtype=np.int64)
    rows = pairwise([0, *ends.tolist()])
    text = "".join(f"{start},{end}\n" for start, end in rows)
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))


def find_files(sources: Sequence[Path], suffix: str) -> list[Path]:
    """List named files and the files of directories in order of path. A missing suffix is added."""
    found: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sorted(path for path in source.rglob(f"*{suffix}") if path.is_file())
            if not inside:
                raise UserError(
                    f"{source} has no file that ends with {suffix}", "give another directory or format"
                )
            found += inside
        elif not source.exists() and source.with_name(source.name + suffix).exists():
            found.append(source.with_name(source.name + suffix))
        elif suffix == ".bin" and source.suffix == ".idx":
            found.append(source.with_suffix(".bin"))
        elif not source.exists():
            raise UserError(
                f"{source} does not exist", f"give files that end with {suffix}, or their directory"
            )
        else:
            found.append(source)
    return found


COLUMN_SUFFIX = {"fms-arrow": ".arrow", "hf-parquet": ".parquet"}
EOS_KEY = b"arriero.eos"
EOS_KEPT, EOS_STRIPPED = b"kept", b"stripped"
FMS_COLUMN, HF_COLUMN = "tokens", "input_ids"

_USUAL_COLUMNS = (HF_COLUMN, FMS_COLUMN, "token_ids", "ids")
_ROWS_PER_READ = 1024
_TOKENS_PER_ROW_GROUP = 2**20


class ColumnFile:
    """The documents of an Arrow file (one per record batch) or Parquet file (one per row), in order.

    `eos` is the note of an Arriero export about separators.
    """

    def __init__(self, format: str, path: Path, column: str | None) -> None:
        self.path, self._is_arrow = path, format == "fms-arrow"
        try:
            if self._is_arrow:
                self._file: Any = pa.ipc.open_file(pa.memory_map(str(path)))
                schema, self.documents = self._file.schema, self._file.num_record_batches
            else:
                self._file = pq.ParquetFile(path)
                schema, self.documents = self._file.schema_arrow, self._file.metadata.num_rows
        except (OSError, pa.ArrowInvalid) as error:
            raise self._damaged(error) from None
        self.eos: bytes | None = (schema.metadata or {}).get(EOS_KEY)
        self._column = self._choose(schema, column)

    def __iter__(self) -> Iterator[np.ndarray]:
        try:
            yield from self._record_batches() if self._is_arrow else self._rows()
        except (OSError, pa.ArrowInvalid) as error:
            raise self._damaged(error) from None

    def _choose(self, schema: pa.Schema, column: str | None) -> str:
        fit = [field.name for field in schema if self._holds_ids(field.type)]
        wanted = (column,) if column else _USUAL_COLUMNS
        for name in wanted:
            if name in fit:
                return name
        if not column and len(fit) == 1:
            return fit[0]
        kind = "integers" if self._is_arrow else "lists of integers"
        raise UserError(
            f"{self.path} has no column {' or '.join(wanted)} of {kind}; it has "
            + ", ".join(f"{field.name} ({field.type})" for field in schema),
            "name the column of token ids with --column",
        )

    def _holds_ids(self, kind: pa.DataType) -> bool:
        if self._is_arrow:
            return pa.types.is_integer(kind)
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        return is_list and pa.types.is_integer(kind.value_type)

    def _null(self, number: int) -> UserError:
        return UserError(f"{self.path}: document {number} has a null in '{self._column}'", "remove it there")

    def _damaged(self, error: Exception) -> UserError:
        return UserError(f"{self.path} cannot be read ({str(error).splitlines()[0]})", _COPY_AGAIN)

    def _record_batches(self) -> Iterator[np.ndarray]:
        for number in range(self.documents):
            ids = self._file.get_batch(number).column(self._column)
            if ids.null_count:
                raise self._null(number)
            yield ids.to_numpy(zero_copy_only=False)

    def _rows(self) -> Iterator[np.ndarray]:
        number = 0
        for batch in self._file.iter_batches(batch_size=_ROWS_PER_READ, columns=[self._column]):
            rows = batch.column(0)
            values = rows.flatten()
            if rows.null_count or values.null_count:
                raise self._null(number + _first_null(rows))
            values = values.to_numpy(zero_copy_only=False)
            ends = np.cumsum(rows.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
            for start, end in pairwise([0, *ends.tolist()]):
                yield values[start:end]
            number += len(rows)


def _first_null(rows: Any) -> int:
    for i, row in enumerate(rows):
        if not row.is_valid or row.values.null_count:
            return i
    return 0


def check_counts(file: Path, documents: int, tokens: int) -> None:
    """Compare the counts of ROOT/DATASET/FILE with ROOT/meta/*counts*.csv, if that exists."""
    file = file.resolve()
    name = f"/{file.parent.name}/{file.name}"
    for table in sorted((file.parent.parent / "meta").glob("*counts*.csv")):
        with table.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        for line, row in enumerate(rows, start=2):
            found = (row.get("documents"), row.get("tokens"))
            if (row.get("dataset/filename") or "").endswith(name) and found != (str(documents), str(tokens)):
                raise UserError(
                    f"{table}, line {line}: {found[0]} documents and {found[1]} tokens, "
                    f"but {file} has {documents} and {tokens}",
                    "copy the file again, or correct the counts",
                )


def write_arrow(path: Path, ids: np.ndarray, lengths: np.ndarray, strip: bool) -> int:
    """Write one record batch per document; return the number of tokens written."""
    note = {EOS_KEY: EOS_STRIPPED if strip else EOS_KEPT}
    schema = pa.schema([pa.field(FMS_COLUMN, pa.uint32())], metadata=note)
    start = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for length in lengths.tolist():
            tokens = ids[start : start + length - strip].astype(np.uint32)
            writer.write_batch(pa.record_batch([pa.array(tokens)], schema=schema))
            start += length
    return start - strip * len(lengths)


def write_parquet(path: Path, ids: np.ndarray, lengths: np.ndarray, column: str) -> None:
    schema = pa.schema([pa.field(column, pa.list_(pa.int32()))], metadata={EOS_KEY: EOS_KEPT})
    ends = np.cumsum(lengths, dtype=np.int64)
    first, begin = 0, 0
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        while first < len(lengths):
            last = max(first + 1, int(np.searchsorted(ends, begin + _TOKENS_PER_ROW_GROUP, side="right")))
            end = int(ends[last - 1])
            offsets = np.concatenate(([0], ends[first:last] - begin)).astype(np.int32)
            rows = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids[begin:end].astype(np.int32)))
            writer.write_table(pa.table([rows], schema=schema))
            first, begin = last, end
