"""Files that are damaged, linked or oddly written."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arriero.data.prepare.planning import divide
from arriero.data.text.readers import BadRecords, read_text_range
from arriero.data.text.sources import find_inputs
from arriero.errors import UserError

TEXTS = [f"{i} {i * 7919 % 1009} " * 3 for i in range(60_000)]
CONTENT = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def read(*sources, skip=False, shard_bytes=10**9):
    inputs = find_inputs([str(source) for source in sources], skip)
    bad = BadRecords(skip)
    texts = [
        text
        for shard in divide(inputs, shard_bytes, seed=3)
        for piece in shard
        for batch in read_text_range(
            inputs[piece.first : piece.first + piece.files], piece.begin, piece.end, "text", bad
        )
        for text in batch.texts
    ]
    return texts, bad


def packed(name, content=CONTENT):
    if name.endswith(".gz"):
        return gzip.compress(content)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("share", [0.2, 0.9])
def test_what_lies_before_the_damage_is_kept_and_the_damage_counted_once(tmp_path, name, share):
    whole = packed(name)
    (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match="cannot be decompressed to its end") as caught:
        read(tmp_path / name)
    assert "kept" not in str(caught.value)
    texts, bad = read(tmp_path / name, skip=True)
    assert texts == TEXTS[: len(texts)]
    assert len(texts) > (share - 0.15) * len(TEXTS)
    assert bad.count == 1
    assert f"{len(texts):,} documents before the damage kept, the rest of the file is lost" in bad.examples[0]


def test_no_whole_line_before_the_cut_is_lost(tmp_path):
    """Stored, not packed, so that the cut is known to the byte."""
    content = b"".join(b'{"text":"%d"}\n' % (i % 10) for i in range(2000))
    raw = gzip.compress(content, compresslevel=0, mtime=0)
    begun = raw.index(b'{"text"')
    for cut in (13 * 1000, 13 * 1000 + 1, 13 * 1001 - 1):
        (tmp_path / "a.jsonl.gz").write_bytes(raw[: begun + cut])
        texts, bad = read(tmp_path / "a.jsonl.gz", skip=True)
        assert (len(texts), bad.count) == (1000, 1)


@pytest.mark.parametrize("name", ["a.json.gz", "a.json.zst"])
def test_a_bad_line_before_the_damage_is_named_by_its_line(tmp_path, name):
    whole = packed(name, CONTENT[: CONTENT.index(b"\n") + 1] + b"{}\n" + CONTENT)
    (tmp_path / name).write_bytes(whole[: int(0.3 * len(whole))])
    texts, bad = read(tmp_path / name, skip=True)
    assert len(texts) > 1000
    assert bad.count == 2
    assert "line 2: no column 'text'" in bad.examples[0]


def test_a_wrong_checksum_at_the_end_costs_no_document(tmp_path):
    raw = gzip.compress(CONTENT)
    (tmp_path / "a.jsonl.gz").write_bytes(raw[:-8] + b"\1\2\3\4" + raw[-4:])
    texts, bad = read(tmp_path / "a.jsonl.gz", skip=True)
    assert len(texts) >= len(TEXTS) - 1
    assert bad.count == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_zeros_after_a_gzip_member_are_no_damage(tmp_path, name):
    half = CONTENT.index(b"\n", len(CONTENT) // 2) + 1
    parts = gzip.compress(CONTENT[:half]), gzip.compress(CONTENT[half:])
    (tmp_path / name).write_bytes(parts[0] + bytes(600) + parts[1] + bytes(2**19))
    texts, _ = read(tmp_path / name)
    assert texts == (TEXTS if name == "a.jsonl.gz" else [CONTENT.decode()])


def test_a_file_with_several_names_is_read_once(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.txt").write_text("a")
    (folder / "b.txt").symlink_to(folder / "sub" / "a.txt")
    (folder / "c.txt").hardlink_to(folder / "sub" / "a.txt")
    (folder / "again").symlink_to(folder / "sub")
    (folder / "around").symlink_to(folder)
    assert read(folder)[0] == ["a"]
    assert read(folder / "*.txt")[0] == ["a"]
    with pytest.raises(UserError, match=r"a\.txt and .*c\.txt are one file: it is named twice"):
        find_inputs([str(folder / "sub"), str(folder / "c.txt")])


def test_linked_folders_are_read(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.txt").write_text("a")
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far")
    assert read(tmp_path / "near")[0] == ["a"]


@pytest.mark.parametrize("named", ["", "lost.jsonl", "*"])
def test_a_link_to_nothing_is_named_or_counted(tmp_path, named):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "good.txt").write_text("good")
    (tmp_path / "in" / "lost.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(UserError, match=r"lost\.jsonl is a broken link"):
        read(tmp_path / "in" / named)
    texts, bad = read(tmp_path / "in" / named, skip=True)
    assert texts == (["good"] if named != "lost.jsonl" else [])
    assert bad.count == 1
    assert "lost.jsonl is a broken link" in bad.examples[0]


def test_two_synthetic_sources_are_rejected():
    with pytest.raises(UserError, match="begin with the same documents"):
        find_inputs(["builtin:synthetic:1MB", "builtin:synthetic:2MB"])


def test_strings_kept_in_a_dictionary_are_read(tmp_path):
    column = pa.array(["a", "b", "a", None]).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    texts, bad = read(tmp_path / "a.parquet", skip=True)
    assert (texts, bad.count) == (["a", "b", "a"], 1)
    numbers = pa.table({"text": pa.array([1, 2]).dictionary_encode()})
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pa.ipc.new_file(file, numbers.schema) as writer:
        writer.write_table(numbers)
    with pytest.raises(UserError, match="holds int64, not strings"):
        read(tmp_path / "b.arrow")


def test_a_bad_row_is_named_by_its_number_in_the_file(tmp_path):
    texts = [f"{i}" * 100 for i in range(900)]
    pq.write_table(
        pa.table({"text": [*texts[:777], None, *texts[778:]]}), tmp_path / "a.parquet", row_group_size=100
    )
    with pytest.raises(UserError, match=r"a\.parquet, row 777: null"):
        read(tmp_path / "a.parquet", shard_bytes=20_000)


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfword")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "line"}\n')
    assert sorted(read(tmp_path)[0]) == ["line", "word"]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_json_array_is_called_so(tmp_path, indent, name):
    content = json.dumps([{"text": "a"}, {"text": "b"}], indent=indent).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(UserError, match=f"{name}: a JSON array, not one object per line"):
        read(tmp_path / name)
