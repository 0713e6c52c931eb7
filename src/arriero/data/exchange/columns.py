"""Tokens in Arrow and Parquet columns: another layout of bytes, so these are rewritten.

fms-arrow   one record batch per document, column `tokens` of uint32; `meta/*counts*.csv` beside the folders
hf-parquet  one row per document with a column of list<int32>, usually `input_ids`
"""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from arriero.errors import UserError

SUFFIX = {"fms-arrow": ".arrow", "hf-parquet": ".parquet"}
EOS_KEY = b"arriero.eos"
EOS_KEPT, EOS_STRIPPED = b"kept", b"stripped"
FMS_COLUMN, HF_COLUMN = "tokens", "input_ids"

_USUAL_COLUMNS = (HF_COLUMN, FMS_COLUMN, "token_ids", "ids")
_ROWS_PER_READ = 1024
_TOKENS_PER_ROW_GROUP = 2**20


class ColumnFile(ABC):
    """Documents of one file, in order. `eos` is what an exporting Arriero noted in it, if one did."""

    kind: str

    def __init__(self, path: Path, column: str | None) -> None:
        self.path = path
        try:
            schema = self._open(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise self._damaged(error) from None
        self.eos: bytes | None = (schema.metadata or {}).get(EOS_KEY)
        self._column = self._choose(schema, column)

    def __iter__(self) -> Iterator[np.ndarray]:
        try:
            yield from self._read()
        except (OSError, pa.ArrowInvalid) as error:
            raise self._damaged(error) from None

    @property
    @abstractmethod
    def documents(self) -> int: ...

    @abstractmethod
    def _open(self, path: Path) -> pa.Schema: ...

    @abstractmethod
    def _read(self) -> Iterator[np.ndarray]: ...

    @abstractmethod
    def _holds_ids(self, kind: pa.DataType) -> bool: ...

    def _choose(self, schema: pa.Schema, column: str | None) -> str:
        fit = [field.name for field in schema if self._holds_ids(field.type)]
        wanted = (column,) if column else _USUAL_COLUMNS
        for name in wanted:
            if name in fit:
                return name
        if not column and len(fit) == 1:
            return fit[0]
        raise UserError(
            f"{self.path} has no column {' or '.join(wanted)} of {self.kind}; it has "
            + ", ".join(f"{field.name} ({field.type})" for field in schema),
            "name the column of token ids with --column",
        )

    def _null(self, number: int) -> UserError:
        return UserError(f"{self.path}: document {number} has a null in '{self._column}'", "remove it there")

    def _damaged(self, error: Exception) -> UserError:
        reason = str(error).splitlines()[0]
        return UserError(f"{self.path} cannot be read ({reason})", "copy it again from where it was made")


class ArrowBatches(ColumnFile):
    kind = "integers"

    def _open(self, path: Path) -> pa.Schema:
        self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        return self._file.schema

    @property
    def documents(self) -> int:
        return self._file.num_record_batches

    def _read(self) -> Iterator[np.ndarray]:
        for number in range(self.documents):
            ids = self._file.get_batch(number).column(self._column)
            if ids.null_count:
                raise self._null(number)
            yield ids.to_numpy(zero_copy_only=False)

    def _holds_ids(self, kind: pa.DataType) -> bool:
        return pa.types.is_integer(kind)


class ParquetRows(ColumnFile):
    kind = "lists of integers"

    def _open(self, path: Path) -> pa.Schema:
        self._file = pq.ParquetFile(path)
        return self._file.schema_arrow

    @property
    def documents(self) -> int:
        return self._file.metadata.num_rows

    def _read(self) -> Iterator[np.ndarray]:
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

    def _holds_ids(self, kind: pa.DataType) -> bool:
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        return is_list and pa.types.is_integer(kind.value_type)


READERS: dict[str, type[ColumnFile]] = {"fms-arrow": ArrowBatches, "hf-parquet": ParquetRows}


def _first_null(rows: Any) -> int:
    for i, row in enumerate(rows):
        if not row.is_valid or row.values.null_count:
            return i
    return 0


def check_counts(file: Path, documents: int, tokens: int) -> None:
    """Against ROOT/meta/*counts*.csv, where there is one, for ROOT/DATASET/FILE."""
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
                    "copy the file again, or count anew",
                )


def write_arrow(path: Path, ids: np.ndarray, lengths: np.ndarray, strip: bool) -> int:
    """One record batch per document; returns how many tokens were written."""
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
