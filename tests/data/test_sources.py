import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arriero.data.prepare.planning import divide
from arriero.data.text.readers import BadRecords, read_text_range
from arriero.data.text.sources import find_inputs
from arriero.errors import UserError

TEXTS = [f"document {i} " + "é中🦙"[i % 3] * (i % 7) for i in range(300)]


def jsonl(texts, column="text"):
    return "".join(
        json.dumps({"id": i, column: t}, ensure_ascii=i % 2 == 0) + "\n" for i, t in enumerate(texts)
    )


def write_zst(path, content):
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(content)


def read(*sources, column="text", skip=False, shard_bytes=10**9, bad=None):
    inputs = find_inputs([str(source) for source in sources])
    bad = bad or BadRecords(skip)
    return [
        text
        for shard in divide(inputs, shard_bytes, seed=3)
        for piece in shard
        for batch in read_text_range(
            inputs[piece.first : piece.first + piece.files], piece.begin, piece.end, column, bad
        )
        for text in batch.texts
    ]


def plain(path):
    path.write_text(jsonl(TEXTS))


def packed_gzip(path):
    whole = jsonl(TEXTS).encode()
    path.write_bytes(gzip.compress(whole[:5000]) + gzip.compress(whole[5000:]))


def parquet(path):
    pq.write_table(pa.table({"id": range(300), "text": TEXTS}), path, row_group_size=70)


WRITERS = {
    "a.jsonl": plain,
    "a.jsonl.gz": packed_gzip,
    "a.json.gz": packed_gzip,
    "a.jsonl.zst": lambda path: write_zst(path, jsonl(TEXTS).encode()),
    "a.parquet": parquet,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("shard_bytes", [10**9, 2000])
def test_each_format_yields_every_document_once(tmp_path, name, shard_bytes):
    WRITERS[name](tmp_path / name)
    assert sorted(read(tmp_path / name, shard_bytes=shard_bytes)) == sorted(TEXTS)


def test_a_saved_hugging_face_dataset_is_read_with_any_column(tmp_path):
    datasets.Dataset.from_dict({"body": TEXTS, "n": list(range(300))}).save_to_disk(
        tmp_path / "saved", num_shards=3
    )
    assert sorted(read(tmp_path / "saved", column="body")) == sorted(TEXTS)
    with pytest.raises(UserError, match="no column 'text'; there are 'body', 'n'"):
        read(tmp_path / "saved")


def test_of_several_splits_one_must_be_named(tmp_path):
    one = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": one, "test": one.select(range(3))}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"several splits.*saved/train, .*saved/test"):
        read(tmp_path / "saved")
    assert len(read(tmp_path / "saved" / "train")) == 300


def test_a_folder_of_mixed_files_is_read_in_order_of_path(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "note.txt").write_text("note")
    (tmp_path / "code.py").write_text("code")
    (tmp_path / ".hidden").write_text("hidden")
    write_zst(tmp_path / "z.txt.zst", b"packed")
    (tmp_path / "a.jsonl").write_text(jsonl(["one", "two"]))
    names = [Path(found.path).name for found in find_inputs([str(tmp_path)])]
    assert names == ["a.jsonl", "note.txt", "code.py", "z.txt.zst"]
    assert sorted(read(tmp_path)) == ["code", "note", "one", "packed", "two"]


def test_patterns_reach_into_folders(tmp_path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    for name in ("x/2.jsonl", "x/y/1.jsonl"):
        (tmp_path / name).write_text(jsonl([name]))
    assert read(tmp_path / "**" / "*.jsonl") == read(tmp_path / "x") == ["x/2.jsonl", "x/y/1.jsonl"]


def test_a_file_named_twice_is_rejected(tmp_path):
    plain(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="named twice"):
        find_inputs([str(tmp_path), str(tmp_path / "a.jsonl")])


def test_lines_are_found_whole_wherever_a_file_is_cut(tmp_path):
    rng = random.Random(0)
    texts = ["x" * rng.choice([0, 1, 10, 500]) + str(i) for i in range(200)]
    content = jsonl(texts).rstrip("\n")
    (tmp_path / "a.jsonl").write_text(content)
    inputs = find_inputs([str(tmp_path / "a.jsonl")])
    size = inputs[0].size
    for _ in range(30):
        cuts = sorted({0, size, *rng.sample(range(size), 5)})
        found = [
            text
            for begin, end in pairwise(cuts)
            for batch in read_text_range(inputs, begin, end, "text", BadRecords(False))
            for text in batch.texts
        ]
        assert found == texts


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "a', "line 3: broken JSON"),
        (b'{"body": "a", "n": 1}', "line 3: no column 'text'; there are 'body', 'n'"),
        (b'{"text": 5}', "line 3: 'text' is a number, not a string"),
        (b'{"text": null}', "line 3: 'text' is null, not a string"),
        (b'["text"]', "line 3: a list, not an object"),
        (b"5", "line 3: a number, not an object"),
        (b'{"text": "\xff"}', "line 3: not UTF-8 text"),
        (b'{"text": "\\ud800"}', "line 3: the text has half of a surrogate pair"),
        (b'{"text": ' + b"[" * 100_000 + b"}", "line 3"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, line, complaint, packed):
    content = b'{"text": "one"}\n\n' + line + b'\n{"text": "two", "score": NaN}\n' + line + b"\n"
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(UserError, match=complaint) as caught:
        read(path)
    assert str(path) in str(caught.value)
    bad = BadRecords(skip=True)
    assert read(path, bad=bad) == ["one", "two"]
    assert bad.count == 2
    assert complaint.replace("line 3", "line 5") in bad.examples[1]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_compressed_file_is_named(tmp_path, name, damage):
    texts = [str(random.Random(i).random()) * 50 for i in range(3000)]
    path = tmp_path / name
    content = jsonl(texts).encode()
    path.write_bytes(gzip.compress(content)) if name.endswith("gz") else write_zst(path, content)
    raw = path.read_bytes()
    middle = len(raw) // 2
    path.write_bytes(
        raw[:middle] if damage == "truncated" else raw[:middle] + b"\0" * 64 + raw[middle + 64 :]
    )
    with pytest.raises(UserError, match=rf"{name}.*cannot be decompressed to its end|{name}, line"):
        read(path)
    bad = BadRecords(skip=True)
    assert set(read(path, bad=bad)) < set(texts)
    assert bad.count >= 1


def test_bad_text_files_are_named_or_skipped(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt.gz").write_bytes(gzip.compress(b"x" * 9999)[:-12])
    with pytest.raises(UserError, match=r"latin\.txt, byte 3: not UTF-8"):
        read(tmp_path)
    bad = BadRecords(skip=True)
    assert read(tmp_path, bad=bad) == ["good"]
    assert bad.count == 2


def test_bad_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    parquet(path)
    with pytest.raises(UserError, match="no column 'body'; there are 'id', 'text'"):
        read(path, column="body")
    with pytest.raises(UserError, match="column 'id' holds int64, not strings"):
        read(path, column="id")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="not a Parquet file"):
        read(path)
    pq.write_table(pa.table({"text": ["a", None, "b"]}), path)
    with pytest.raises(UserError, match="row 1: null"):
        read(path)
    bad = BadRecords(skip=True)
    assert (read(path, bad=bad), bad.count) == (["a", "b"], 1)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("none.jsonl", "does not exist"),
        ("builtin:stdlb", "choose builtin:stdlib or builtin:synthetic"),
        ("builtin:synthetic:lots", "builtin:synthetic:50MB"),
        ("hf://nothing-known", "choose one of zyda-2-dclm"),
    ],
)
def test_a_source_that_is_not_there_is_rejected(source, complaint):
    with pytest.raises(UserError, match=complaint):
        find_inputs([source])


def test_an_empty_folder_is_rejected(tmp_path):
    with pytest.raises(UserError, match="no files"):
        find_inputs([str(tmp_path)])


def test_the_hub_is_asked_only_by_name_and_says_what_is_missing():
    """The suite runs off-line, as compute nodes do."""
    with pytest.raises(UserError, match="cannot load hf://openwebmath"):
        find_inputs(["hf://openwebmath"])


def test_known_corpora_have_a_dataset_and_a_column():
    from arriero.data.text.hub import hub_corpora, hub_corpus

    known = hub_corpora()
    assert {"python-edu", "openwebmath", "clean-mc4-it", "mc4-cs", "bookcorpus", "zyda-2-dclm"} <= set(known)
    assert all(corpus.column == "text" and corpus.split == "train" for corpus in known.values())
    assert hub_corpus("owner/set:part@dev")[:3] == ("owner/set", "part", "dev")


def test_each_shard_mixes_the_inputs_and_all_are_near_one_size(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.jsonl").write_text(jsonl(["x" * 100] * 1000))
    shards = divide(find_inputs([str(tmp_path)]), 100_000, seed=1)
    assert len(shards) == 5
    sizes = [sum(piece.bytes for piece in shard) for shard in shards]
    assert max(sizes) < 1.3 * min(sizes)
    assert all(len({piece.first for piece in shard}) >= 3 for shard in shards)
    assert shards == divide(find_inputs([str(tmp_path)]), 100_000, seed=1)
    assert shards != divide(find_inputs([str(tmp_path)]), 100_000, seed=2)
