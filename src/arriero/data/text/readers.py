"""Read documents from part of an input: a range of bytes, of row groups, or whole files."""

import io
import json
import zlib
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from arriero.data.text.builtin import markov_text
from arriero.data.text.formats import BadRecord, RecordFormat
from arriero.data.text.sources import DANGLING, Input, names_of
from arriero.errors import UserError
from arriero.units import counted


def open_input(source: Input) -> IO[bytes]:
    if not source.compression:
        return Path(source.path).open("rb", buffering=2**20)
    return io.BufferedReader(open_unbuffered(source), 2**20)


def open_unbuffered(source: Input) -> Any:
    """Open without a read-ahead buffer, so that everything before damage can be read."""
    if not source.compression:
        return Path(source.path).open("rb", buffering=0)
    if source.compression == "gzip":
        return _Gunzip(Path(source.path))
    import pyarrow as pa

    return pa.input_stream(source.path, compression=source.compression)


class _Gunzip(io.RawIOBase):
    """Decompresses concatenated members, zeros allowed after each; an error loses only the current call."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=2**18)
        self._member = zlib.decompressobj(wbits=31)
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._member.eof and not self._next_member():
                return 0
            packed = self._packed or self._file.read(min(2**18, 8 * len(buffer)))
            try:
                unpacked = self._member.decompress(packed, len(buffer))
            except zlib.error as error:
                raise OSError(str(error)) from None
            self._packed = self._member.unconsumed_tail
            if unpacked:
                buffer[: len(unpacked)] = unpacked
                return len(unpacked)
            if not packed and not self._member.eof:
                raise OSError("truncated")

    def _next_member(self) -> bool:
        packed = self._member.unused_data.lstrip(b"\0")
        while not packed and (more := self._file.read(2**18)):
            packed = more.lstrip(b"\0")
        if packed:
            self._packed, self._member = packed, zlib.decompressobj(wbits=31)
        return bool(packed)

    def close(self) -> None:
        self._file.close()
        super().close()


BATCH_BYTES = 2**21
EXAMPLES = 5
SMALL_BLOCK = 8
NO_FILE = 2**62
SAMPLED_FILES = 16  # of each suffix
SAMPLED_BYTES = 2**16
COUNTED_BYTES = 2**26  # a skipped record beyond is named by byte, since counting lines costs a read

_SKIP = "correct it, or pass --skip-bad to skip and count such records"
_CHANGED = "inputs must not change during a prepare: restore the file, or prepare into another directory"


Column = str | RecordFormat


class TextBatch(NamedTuple):
    texts: list[str]
    text_bytes: int
    read_bytes: int


class BadRecords:
    """Counts records that cannot be used; without `skip` the first one raises UserError.

    `kept` counts usable records, `links` those of the bad ones that are broken links.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.kept = 0
        self.count = 0
        self.links = 0
        self.examples: list[str] = []

    def add(self, what: str | Callable[[], str]) -> None:
        if not self.skip or len(self.examples) < EXAMPLES:
            what = what() if callable(what) else what
            if not self.skip:
                raise UserError(what, _SKIP)
            self.examples.append(what)
        self.count += 1


class BadLimit(NamedTuple):
    """The most bad records of a source that --skip-bad may skip: a number or a percentage."""

    amount: float
    percent: bool

    @classmethod
    def parse(cls, text: str) -> "BadLimit":
        try:
            limit = cls(float(text.removesuffix("%")), text.endswith("%"))
        except ValueError:
            limit = cls(-1, False)
        if not 0 <= limit.amount < inf or (limit.percent and limit.amount > 100):
            raise UserError(f"--max-bad {text} is not a limit", "write it like 1% or 500")
        return limit

    def check(self, source: str, kept: int, bad: int, example: str) -> None:
        """Raise UserError if `bad` of the `kept + bad` records of a source are too many."""
        if bad > (self.amount * (kept + bad) / 100 if self.percent else self.amount):
            raise UserError(
                f"{source}: {bad:,} of {counted(kept + bad, 'record')} cannot be used, and --max-bad allows "
                f"{self.amount:g}{'%' if self.percent else ''}; the first: {example}",
                "check the source and --column, or repeat the command with a larger --max-bad",
            )


MAX_BAD = "50%"


def read_text_range(
    inputs: list[Input], begin: int, end: int, column: Column, bad: BadRecords
) -> Iterator[TextBatch]:
    """Read the texts of a range, in batches. `column` is that of the text, or makes a text of several.

    `begin` and `end` are bytes of a JSONL file, row groups of Parquet, or numbers of synthetic documents.
    """
    first = inputs[0]
    if first.kind == "synthetic":
        return _in_batches((text, len(text)) for text in markov_text().documents(begin, end))
    for each in inputs:
        if each.kind != DANGLING:
            check_unchanged(each)
    if first.kind == "jsonl":
        return _read_jsonl(first, begin, end, column, bad)
    if first.kind == "parquet":
        return _read_columns(first, _parquet_columns(first, begin, end, column), column, bad)
    if first.kind == "arrow":
        return _read_columns(first, _arrow_columns(first, column), column, bad)
    return _in_batches(_text_files(inputs, column, bad))


def check_unchanged(source: Input) -> None:
    try:
        about = Path(source.path).stat()
    except OSError as error:
        raise UserError(f"cannot read {source.path} ({error.strerror})", _CHANGED) from None
    if (about.st_size, about.st_mtime_ns) != (source.size, source.mtime_ns):
        raise UserError(f"{source.path} has changed since this prepare began", _CHANGED)


def _read_jsonl(source: Input, begin: int, end: int, column: Column, bad: BadRecords) -> Iterator[TextBatch]:
    """Read the lines that begin in the range."""
    kept = 0
    with open_input(source) as file:
        at = begin
        if begin and not source.compression:
            file.seek(begin - 1)
            at += len(file.readline()) - 1
        while at < end:
            damage = None
            try:
                lines = _lines(file, min(BATCH_BYTES, end - at))
            except OSError as error:
                damage = error
                lines = _lines_before_damage(source, at) if bad.skip and source.compression else []
            if lines:
                texts, text_bytes = _texts_of(lines, source, at, column, bad)
                read = sum(map(len, lines))
                at += read
                kept += len(texts)
                yield TextBatch(texts, text_bytes, read)
            if damage is not None:
                what = f"{source.path} cannot be decompressed to its end ({damage})"
                lost = f": {counted(kept, 'document')} before the damage kept, the rest of the file is lost"
                bad.add(what + (lost if bad.skip else ""))
            if damage is not None or not lines:
                return


def _lines_before_damage(source: Input, at: int) -> list[bytes]:
    """Read the complete lines from `at` to the damage, in blocks too small to lose a line with the last."""
    found = bytearray()
    with open_unbuffered(source) as file:
        try:
            while at > 0 and (skipped := file.read(min(at, 2**20))):
                at -= len(skipped)
            while block := file.read(SMALL_BLOCK):
                found += block
        except OSError:
            del found[found.rfind(b"\n") + 1 :]
    return io.BytesIO(found).readlines()


def _lines(file: IO[bytes], size: int) -> list[bytes]:
    """Read the lines that begin within the next `size` bytes."""
    if size == 1:
        return [line] if (line := file.readline()) else []
    return file.readlines(size - 1)


def _texts_of(
    lines: list[bytes], source: Input, at: int, column: Column, bad: BadRecords
) -> tuple[list[str], int]:
    texts, text_bytes = [], 0
    for number, line in enumerate(lines):
        try:
            text = _of_record(orjson.loads(line), column)
            size = len(text) if text.isascii() else len(text.encode())
        except _UNUSABLE:
            if not line.strip():
                continue
            try:  # json accepts more: NaN, and half of a surrogate pair outside of the text
                text = _of_record(json.loads(line), column)
                size = len(text.encode())
            except _UNUSABLE as error:
                bad.add(partial(_line_problem, source, at, lines, number, column, error, bad.skip))
                continue
        texts.append(text)
        text_bytes += size
    return texts, text_bytes


_UNUSABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _of_record(record: Any, column: Column) -> str:
    return record[column] if isinstance(column, str) else column.text(record)


def _line_problem(
    source: Input, at: int, lines: list[bytes], number: int, column: Column, error: Exception, skip: bool
) -> str:
    """Describe what is wrong with line `number` of `lines`, the first of which begins at byte `at`."""
    if ".json" in Path(source.path).suffixes[-2:]:
        with open_unbuffered(source) as file:
            if file.read(1) == b"[":
                return f"{source.path}: a JSON array, not one object per line"
    line = lines[number]
    at += sum(map(len, lines[:number]))
    place = f"byte {at}" if skip and at > COUNTED_BYTES else f"line {_line_number(source, at)}"
    where = f"{source.path}, {place}"
    if isinstance(error, UnicodeDecodeError):
        return f"{where}: not UTF-8 text"
    if isinstance(error, UnicodeEncodeError):
        return f"{where}: the text has half of a surrogate pair, which UTF-8 cannot encode"
    if isinstance(error, RecursionError):
        return f"{where}: nested too deeply"
    if isinstance(error, BadRecord):
        return f"{where}: {error}"
    if isinstance(error, ValueError):
        return f"{where}: broken JSON ({error})"
    record = json.loads(line)
    if not isinstance(record, dict):
        return f"{where}: {_json_type(record)}, not an object with a '{column}'"
    if column not in record:
        there = ", ".join(map(repr, record)) or "none"
        return f"{where}: no column '{column}'; there are {there} (choose with --column)"
    return f"{where}: '{column}' is {_json_type(record[column])}, not a string"


def _line_number(source: Input, at: int) -> int:
    newlines = 0
    with open_unbuffered(source) as file:
        while at > 0 and (block := file.read(min(at, 2**20))):
            newlines += block.count(b"\n")
            at -= len(block)
    return newlines + 1


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _parquet_columns(source: Input, begin: int, end: int, column: Column) -> Iterator[tuple[int, Any]]:
    """Yield slices of the column, each with the row of the file at which it begins."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(source.path) as file:
        _check_column(source, file.schema_arrow, column)
        groups = range(begin, min(end, file.num_row_groups))
        row = sum(file.metadata.row_group(group).num_rows for group in range(begin))
        names = list(_names_of_columns(column))
        for batch in file.iter_batches(batch_size=256, row_groups=list(groups), columns=names):
            yield row, _values(batch, column)
            row += batch.num_rows


def _arrow_columns(source: Input, column: Column) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa

    with pa.memory_map(source.path) as file:
        if file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            file.seek(0)
            batches = reader = pa.ipc.open_stream(file)
        _check_column(source, reader.schema, column)
        row = 0
        for batch in batches:
            whole = _values(batch, column)
            for begin in range(0, len(whole), 256):
                yield row + begin, whole[begin : begin + 256]
            row += len(whole)


def _names_of_columns(column: Column) -> tuple[str, ...]:
    return (column,) if isinstance(column, str) else column.columns


def _values(batch: Any, column: Column) -> Any:
    """Return the values of a column, or records with the columns of a format."""
    if isinstance(column, str):
        return batch.column(batch.schema.get_field_index(column))
    return batch.select(list(column.columns)).to_struct_array()


def _check_column(source: Input, schema: Any, column: Column) -> None:
    import pyarrow as pa

    for name in _names_of_columns(column):
        if name not in schema.names:
            there = ", ".join(map(repr, schema.names))
            todo = "choose one with --column" if isinstance(column, str) else "correct the template"
            raise UserError(f"{source.path} has no column '{name}'; there are {there}", todo)
    if not isinstance(column, str):
        return
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(
            f"{source.path}: column '{column}' holds {kind}, not strings", "choose another with --column"
        )


def _read_columns(
    source: Input, columns: Iterator[tuple[int, Any]], column: Column, bad: BadRecords
) -> Iterator[TextBatch]:
    import pyarrow as pa

    def rows() -> Iterator[tuple[str, int]]:
        try:
            for begin, values in columns:
                decoded = values.dictionary_decode() if isinstance(values, pa.DictionaryArray) else values
                for row, value in enumerate(decoded, begin):
                    text = _row_text(source, row, value, column, bad)
                    if text is not None:
                        yield text, len(text)
        except (OSError, pa.ArrowException) as error:
            bad.add(f"{source.path} cannot be read to its end ({str(error).splitlines()[0]})")

    return _in_batches(rows())


def _row_text(source: Input, row: int, value: Any, column: Column, bad: BadRecords) -> str | None:
    try:
        text = value.as_py()
        if not isinstance(column, str):
            return column.text(text)
    except BadRecord as error:
        bad.add(f"{source.path}, row {row}: {error}")
        return None
    except UnicodeDecodeError:
        bad.add(f"{source.path}, row {row}: not UTF-8 text")
        return None
    if text is None:
        bad.add(f"{source.path}, row {row}: null, not a string")
    return text


def _text_files(inputs: list[Input], column: Column, bad: BadRecords) -> Iterator[tuple[str, int]]:
    for source in inputs:
        if source.kind == DANGLING:
            bad.add(f"{source.path} is a broken link")
            bad.links += 1
            continue
        try:
            with open_input(source) as file:
                text = file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            bad.add(f"{source.path}, byte {error.start}: not UTF-8 text")
        except OSError as error:
            bad.add(f"{source.path} cannot be read to its end ({error})")
        else:
            if "\0" in text:
                bad.add(f"{source.path} is not text: it holds NUL bytes")
                continue
            try:
                text = text if isinstance(column, str) else column.text({"text": text})
            except BadRecord as error:
                bad.add(f"{source.path}: {error}")
                continue
            yield text, source.size


def check_utf8(inputs: Sequence[Input]) -> None:
    """Raise UserError if a sample of the files that become one document each is not UTF-8 text."""
    groups: dict[tuple[int, str], list[Input]] = {}
    for each in inputs:
        if each.kind == "text":
            groups.setdefault((each.source, Path(each.path).suffix.lower()), []).append(each)
    for group in groups.values():
        step = -(-len(group) // SAMPLED_FILES)
        binary = [each.path for each in group[::step] if not _begins_as_text(each)]
        if binary:
            more = " (and perhaps more)" if step > 1 else ""
            raise UserError(
                f"not UTF-8 text: {names_of(binary)}{more}, in {Path(binary[0]).parent}",
                "exclude such files with --include or --exclude, or pass --skip-bad to skip and count them",
            )


def _begins_as_text(source: Input) -> bool:
    try:
        with open_input(source) as file:
            some = file.read(SAMPLED_BYTES)
        getincrementaldecoder("utf-8")().decode(some)
    except UnicodeDecodeError:
        return False
    except OSError:
        return True  # damage is reported where the file is read
    return b"\0" not in some


def _in_batches(documents: Iterator[tuple[str, int]]) -> Iterator[TextBatch]:
    texts: list[str] = []
    text_bytes = read = 0
    for text, size in documents:
        texts.append(text)
        text_bytes += len(text) if text.isascii() else len(text.encode())
        read += size
        if text_bytes >= BATCH_BYTES:
            yield TextBatch(texts, text_bytes, read)
            texts, text_bytes, read = [], 0, 0
    if texts:
        yield TextBatch(texts, text_bytes, read)
