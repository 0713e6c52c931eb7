"""Errors name the file and the place, and no output stays behind."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exchange_corpora import EOS, LARGE, SMALL, make_dataset, tokenizer_file

from arriero.data.exchange import FORMATS, Import, export_dataset
from arriero.data.tokens.tokenizer import load_tokenizer
from arriero.errors import UserError

SHARDS = [[[5, 6, EOS], [7, EOS]], [[8, 9, 10, EOS]]]


def refusal(tmp_path, format, source, vocab_size=SMALL, **options) -> str:
    tokenizer = load_tokenizer(tokenizer_file(tmp_path, vocab_size))
    before = set(tmp_path.iterdir())
    with pytest.raises(UserError) as caught:
        Import(format, [source], tokenizer, **options).into(tmp_path / "back")
    assert set(tmp_path.iterdir()) == before
    return str(caught.value)


def exported(tmp_path, format, shards=SHARDS, vocab_size=SMALL) -> Path:
    export_dataset(make_dataset(tmp_path / "set", shards, vocab_size), format, tmp_path / "out", link="copy")
    return tmp_path / "out"


def edit(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("format", FORMATS)
def test_an_id_beyond_the_vocabulary_is_named_with_its_file_and_place(tmp_path, format):
    source = exported(tmp_path, format, [[[5, EOS]], [[5, 6, EOS], [7, 1000, EOS]]], vocab_size=1001)
    message = refusal(tmp_path, format, source)
    assert "id 1000" in message
    assert "has 1000 ids" in message
    assert "document 1" in message
    assert ("token 4 " if format in ("megatron", "datatrove", "olmo") else "token 1 of") in message
    assert ("00001" in message) and str(source) in message


@pytest.mark.parametrize("format", ["datatrove", "olmo"])
def test_an_id_of_2_to_the_31_or_more_is_beyond_any_vocabulary(tmp_path, format):
    source = exported(tmp_path, format, [[[5, EOS]]], vocab_size=LARGE)
    (path,) = [p for p in source.iterdir() if p.suffix in (".ds", ".npy")]
    path.write_bytes(struct.pack("<2I", 2**31 + 3, EOS))
    assert f"id {2**31 + 3}" in refusal(tmp_path, format, source, LARGE)


@pytest.mark.parametrize(
    ("format", "file", "words"),
    [
        ("megatron", "00001.bin", "00001.bin has 7 bytes, its index 00001.idx says 8"),
        ("megatron", "00001.idx", "00001.idx is cut off"),
        ("datatrove", "00001.ds", "00001.ds has 7 bytes, but 00001.ds.index ends at token 4"),
        ("datatrove", "00001.ds.index", "00001.ds.index has 7 bytes"),
        ("olmo", "00001.npy", "00001.npy has 7 bytes, but 00001.csv.gz ends at token 4"),
        ("olmo", "00001.csv.gz", "00001.csv.gz is damaged"),
        ("fms-arrow", "set/00001.arrow", "00001.arrow cannot be read"),
        ("hf-parquet", "data-00001-of-00002.parquet", "data-00001-of-00002.parquet cannot be read"),
    ],
)
def test_a_truncated_file_is_named(tmp_path, format, file, words):
    source = exported(tmp_path, format)
    edit(source / file, lambda raw: raw[:-1])
    assert words in refusal(tmp_path, format, source)


@pytest.mark.parametrize(
    ("format", "file", "change", "words"),
    [
        ("megatron", "00000.idx", lambda raw: b"x" + raw[1:], "does not begin with MMIDIDX"),
        ("megatron", "00000.idx", lambda raw: raw[:17] + b"\x05" + raw[18:], "declares int64 tokens"),
        (
            "megatron",
            "00000.idx",
            lambda raw: raw[:34] + struct.pack("<2i", 2, 3) + raw[42:],
            "sequence 1 begins at byte 6, the sequences before it end at 4",
        ),
        (
            "megatron",
            "00000.idx",
            lambda raw: raw[:-8] + struct.pack("<q", 1),
            "document table does not lead from sequence 0 to 2",
        ),
        (
            "datatrove",
            "00000.ds.index",
            lambda _: struct.pack("<2Q", 6, 5),
            "document 1 ends before the one before it",
        ),
        (
            "olmo",
            "00000.csv.gz",
            lambda _: gzip.compress(b"0,3\n4,5\n"),
            "line 2: tokens 4 to 5 do not follow on 3",
        ),
        ("olmo", "00000.csv.gz", lambda _: gzip.compress(b"0,3\nx\n"), "line 2: not 'start,end"),
        (
            "fms-arrow",
            "meta/set_counts.csv",
            lambda raw: raw.replace(b"00001.arrow,1,3", b"00001.arrow,2,3"),
            "line 3: 2 documents and 3 tokens",
        ),
    ],
)
def test_an_index_that_does_not_fit_the_data_is_named(tmp_path, format, file, change, words):
    source = exported(tmp_path, format)
    edit(source / file, change)
    message = refusal(tmp_path, format, source)
    assert words in message
    assert str(source / file) in message


@pytest.mark.parametrize("format", FORMATS)
def test_a_doubled_separator_is_rejected(tmp_path, format):
    source = exported(tmp_path, format, [[[5, EOS], [6, 7, EOS, EOS]]])
    message = refusal(tmp_path, format, source)
    assert "end-of-document token is doubled" in message
    assert "document 1" in message


def test_a_doubled_separator_is_seen_where_only_separators_part_documents(tmp_path):
    np.array([5, EOS, EOS, 6, EOS, EOS], dtype="<u2").tofile(tmp_path / "part.npy")
    message = refusal(tmp_path, "olmo", tmp_path / "part.npy")
    assert "doubled, 2 of 4 documents hold nothing else" in message


def test_a_numpy_header_is_not_taken_for_tokens(tmp_path):
    np.save(tmp_path / "part.npy", np.array([5, EOS], dtype="<u2"))
    assert "has a NumPy header" in refusal(tmp_path, "olmo", tmp_path / "part.npy")


def test_two_byte_tokens_do_not_belong_to_a_large_vocabulary(tmp_path):
    source = exported(tmp_path, "megatron")
    assert "2 bytes per token, but" in refusal(tmp_path, "megatron", source, LARGE)


def test_widths_are_not_mixed_in_one_dataset(tmp_path):
    np.array([5, EOS], dtype="<u2").tofile(tmp_path / "a.ds")
    np.array([5, EOS], dtype="<u4").tofile(tmp_path / "b.ds")
    for name in "ab":
        (tmp_path / f"{name}.ds.index").write_bytes(struct.pack("<Q", 2))
    assert "import them as two datasets" in refusal(tmp_path, "datatrove", tmp_path)
    message = refusal(tmp_path, "datatrove", tmp_path / "a.ds", dtype="int32")
    assert "holds uint16 tokens by its index, not int32" in message


def test_missing_columns_are_answered_with_those_there_are(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "a": [[1]], "b": [[2]]}), tmp_path / "a.parquet")
    message = refusal(tmp_path, "hf-parquet", tmp_path / "a.parquet")
    assert "it has text (string), a (list<element: int64>), b (list<element: int64>)" in message
    message = refusal(tmp_path, "hf-parquet", tmp_path / "a.parquet", column="text")
    assert "no column text of lists of integers" in message


def test_a_null_document_is_named(tmp_path):
    rows = pa.array([[1], [2, None]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet")
    assert "document 1 has a null in 'input_ids'" in refusal(tmp_path, "hf-parquet", tmp_path / "a.parquet")


def test_sources_that_are_not_there_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no file that ends with .ds" in refusal(tmp_path, "datatrove", tmp_path / "empty")
    assert "none does not exist" in refusal(tmp_path, "datatrove", tmp_path / "none")
    (tmp_path / "a.bin").write_bytes(b"")
    assert "a.idx is missing" in refusal(tmp_path, "megatron", tmp_path / "a.bin")


def test_a_place_that_is_taken_is_left_alone(tmp_path):
    store = make_dataset(tmp_path / "set", SHARDS)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    with pytest.raises(UserError, match="taken exists already"):
        export_dataset(store, "megatron", tmp_path / "taken")
    assert [p.name for p in (tmp_path / "taken").iterdir()] == ["mine"]


def test_a_damaged_dataset_is_not_exported(tmp_path):
    store = make_dataset(tmp_path / "set", SHARDS)
    edit(store.directory / "00001.bin", lambda raw: raw[:-2])
    with pytest.raises(UserError, match="arriero data verify"):
        export_dataset(store, "olmo", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
