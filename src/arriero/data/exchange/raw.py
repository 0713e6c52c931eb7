"""Other systems' files that are already raw tokens: only where documents end has to be found.

megatron   NAME.bin and NAME.idx (v1)
datatrove  NAME.ds, u64 document ends in NAME.ds.index
olmo       NAME.npy without a NumPy header, "start,end,..." lines in NAME.csv.gz
"""

import gzip
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

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

SUFFIX = {"megatron": ".bin", "datatrove": ".ds", "olmo": ".npy"}

_CHUNK_TOKENS = 2**21
_COPY_AGAIN = "copy it again from where it was made"


class RawFile(NamedTuple):
    """`remark` is what the user should know of it, or nothing."""

    path: Path
    dtype: str
    lengths: np.ndarray
    remark: str = ""


def read_raw(format: str, path: Path, tokenizer: Tokenizer, dtype: str | None) -> RawFile:
    """`dtype` overrides what is concluded from the index or, without one, from the vocabulary."""
    if not path.is_file():
        raise UserError(
            f"{path} is missing", f"give files that end with {SUFFIX[format]}, or their directory"
        )
    if format == "megatron":
        found = _read_megatron(path)
    else:
        found = {"datatrove": _read_datatrove, "olmo": _read_olmo}[format](path, tokenizer, dtype)
    if dtype and found.dtype != dtype:
        raise UserError(f"{path} holds {found.dtype} tokens by its index, not {dtype}", "leave out --dtype")
    if found.dtype == "uint16" and tokenizer.vocab_size > 2**16:
        raise UserError(
            f"{path} has 2 bytes a token, but {tokenizer.path} has {tokenizer.vocab_size} ids",
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
    remark = f"{loss.name} is a loss mask, which is left behind" if loss.exists() else ""
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
    widths = {np.dtype(layout.numpy).itemsize: name for name, layout in DTYPES.items()}
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
    layout = np.dtype(DTYPES[dtype].numpy)
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
    remark = f"{path.name}: documents end where {tokenizer.eos} stands, since {why}; tokens taken as {dtype}"
    return RawFile(path, dtype, np.diff(ends), remark)


def write_ds_index(path: Path, lengths: np.ndarray, tokenizer_name: str, itemsize: int) -> None:
    """The files datatrove keeps beside a `.ds`."""
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
    """Files as named, and those of directories in order of path. A name without its suffix is completed."""
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
