import gzip
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exchange_corpora import (
    EOS,
    LARGE,
    SMALL,
    corpora,
    documents_of,
    make_dataset,
    tokenizer_file,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.data.exchange import FORMATS, Import, export_dataset
from arriero.data.store.loss_mask import attach_loss_masks
from arriero.data.store.store import TokenStore
from arriero.data.store.verify import verify_dataset
from arriero.data.tokens.tokenizer import load_tokenizer
from arriero.errors import UserError

RAW = ("megatron", "datatrove", "olmo")
COLUMNS = ("fms-arrow", "hf-parquet")
SHARDS = [[[5, 6, EOS], [7, EOS]], [[8, 9, 10, EOS]]]


def read_in(format, sources, target, vocab_size=SMALL, **options) -> TokenStore:
    tokenizer = load_tokenizer(tokenizer_file(target.parent, vocab_size))
    Import(format, sources, tokenizer, **options).into(target)
    return TokenStore.open(target)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(vocab_size=st.sampled_from([SMALL, LARGE]), data=st.data())
def test_any_corpus_comes_back_the_same(tmp_path_factory, format, vocab_size, data):
    shards = data.draw(corpora(vocab_size))
    here = tmp_path_factory.mktemp("round")
    store = make_dataset(here / "set", shards, vocab_size)
    export_dataset(store, format, here / "out")
    back = read_in(format, [here / "out"], here / "back", vocab_size)
    assert documents_of(back) == documents_of(store) == shards
    assert back.dtype == store.dtype
    assert verify_dataset(back).problems == []


@pytest.mark.parametrize("format", RAW)
def test_raw_tokens_are_linked_and_not_copied(tmp_path, format):
    store = make_dataset(tmp_path / "set", SHARDS)
    made = export_dataset(store, format, tmp_path / "out")
    back = read_in(format, [tmp_path / "out"], tmp_path / "back")
    assert dict(made.placed) == {"hard link": 2}
    for name in ("00000", "00001"):
        assert (back.directory / f"{name}.bin").samefile(store.directory / f"{name}.bin")
        assert not (back.directory / f"{name}.idx").samefile(store.directory / f"{name}.idx")


@pytest.mark.parametrize(("link", "symbolic"), [("symbolic", True), ("copy", False)])
def test_the_user_decides_how_files_are_placed(tmp_path, link, symbolic):
    store = make_dataset(tmp_path / "set", SHARDS)
    back = read_in("megatron", [store.directory], tmp_path / "back", link=link)
    placed = back.directory / "00000.bin"
    assert placed.is_symlink() == symbolic
    assert placed.samefile(store.directory / "00000.bin") == symbolic
    assert documents_of(back) == SHARDS


@pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK) or Path("/dev/shm").stat().st_dev == Path("/tmp").stat().st_dev,
    reason="no second filesystem to write to",
)
def test_on_another_filesystem_the_link_is_symbolic(tmp_path):
    store = make_dataset(tmp_path / "set", SHARDS)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        elsewhere = Path(name)
        back = read_in("megatron", [store.directory], elsewhere / "back")
        assert (back.directory / "00000.bin").is_symlink()
        assert documents_of(back) == SHARDS
        with pytest.raises(UserError, match="--link symbolic or --link copy"):
            read_in("megatron", [store.directory], elsewhere / "hard", link="hard")
        assert sorted(path.name for path in elsewhere.iterdir()) == ["back", "tokenizer-1000.json"]


def test_wide_tokens_of_a_small_vocabulary_keep_their_width(tmp_path):
    tokens = np.array([5, 6, EOS, 7, EOS], dtype="<u4")
    (tmp_path / "a.ds").write_bytes(tokens.tobytes())
    (tmp_path / "a.ds.index").write_bytes(struct.pack("<2Q", 3, 5))
    store = read_in("datatrove", [tmp_path / "a.ds"], tmp_path / "back")
    assert store.dtype == np.int32
    assert documents_of(store) == [[[5, 6, EOS], [7, EOS]]]
    for format in FORMATS:
        export_dataset(store, format, tmp_path / format)
        assert documents_of(
            read_in(format, [tmp_path / format], tmp_path / f"{format}-back")
        ) == documents_of(store)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_olmo_tokens_without_a_table_are_cut_after_each_eos(tmp_path, dtype):
    np.array([5, 6, EOS, 7, EOS, 8], dtype=dtype).tofile(tmp_path / "part.npy")
    chosen = "uint16" if dtype == "<u2" else "int32"
    store = read_in("olmo", [tmp_path], tmp_path / "back", dtype=chosen)
    assert documents_of(store) == [[[5, 6, EOS], [7, EOS], [8]]]
    assert store.about["documents_without_eos"] == 1


def test_the_columns_of_olmos_table_after_start_and_end_do_not_matter(tmp_path):
    np.array([5, EOS, 6, 7, EOS], dtype="<u2").tofile(tmp_path / "part.npy")
    table = "0,2,id-a,src.json.gz,1\n2,5,id-b,src.json.gz,2\n"
    (tmp_path / "part.csv.gz").write_bytes(gzip.compress(table.encode()))
    assert documents_of(read_in("olmo", [tmp_path], tmp_path / "back")) == [[[5, EOS], [6, 7, EOS]]]


def test_megatron_sequences_are_joined_to_their_documents(tmp_path):
    origin = tmp_path / "from"
    origin.mkdir()
    np.array([5, 6, 7, EOS, 8, EOS], dtype="<u2").tofile(origin / "a.bin")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3)
    tables = struct.pack("<3i", 2, 2, 2) + struct.pack("<3q", 0, 4, 8) + struct.pack("<3q", 0, 2, 3)
    (origin / "a.idx").write_bytes(header + tables)
    for n, source in enumerate(("a", "a.bin", "a.idx", ".")):
        store = read_in("megatron", [origin / source], tmp_path / f"back{n}")
        assert documents_of(store) == [[[5, 6, 7, EOS], [8, EOS]]]


def test_foreign_columns_get_their_missing_separators(tmp_path):
    rows = [[5, 6], [7, EOS], []]
    pq.write_table(
        pa.table({"id": [1, 2, 3], "ids": pa.array(rows, pa.list_(pa.int64()))}), tmp_path / "a.parquet"
    )
    added = read_in("hf-parquet", [tmp_path / "a.parquet"], tmp_path / "added")
    kept = read_in("hf-parquet", [tmp_path / "a.parquet"], tmp_path / "kept", separator="keep")
    assert documents_of(added) == [[[5, 6, EOS], [7, EOS], []]]
    assert documents_of(kept) == [rows]


def test_fms_files_leave_out_the_separator_its_loader_adds(tmp_path):
    store = make_dataset(tmp_path / "web", SHARDS)
    export_dataset(store, "fms-arrow", tmp_path / "out")
    reader = pa.ipc.open_file(str(tmp_path / "out" / "web" / "00000.arrow"))
    assert reader.schema.field("tokens").type == pa.uint32()
    batches = [reader.get_batch(i)["tokens"].to_pylist() for i in range(reader.num_record_batches)]
    assert batches == [[5, 6], [7]]
    (counts,) = (tmp_path / "out" / "meta").glob("*counts*.csv")
    assert counts.read_text() == (
        "dataset/filename,documents,tokens\n/web/00000.arrow,2,3\n/web/00001.arrow,1,3\n"
    )


def test_a_file_for_hugging_face_opens_in_datasets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the 'datasets' package is not installed")
    store = make_dataset(tmp_path / "set", SHARDS)
    export_dataset(store, "hf-parquet", tmp_path / "out", column="input_ids")
    table = datasets.Dataset.from_parquet(
        [str(p) for p in sorted((tmp_path / "out").iterdir())], cache_dir=str(tmp_path / "cache")
    )
    assert table["input_ids"][:] == [document for shard in SHARDS for document in shard]


def test_a_user_exports_and_imports_with_two_commands(tmp_path, arriero):
    store = make_dataset(tmp_path / "set", SHARDS)
    out = arriero("data", "export", "set", "datatrove", "out")
    assert out.returncode == 0, out.stderr
    assert "2 datatrove files (2 by hard link)" in out.stdout
    command = ("data", "import", "datatrove", "out", "-o", "back", "--tokenizer", "set/tokenizer.json")
    back = arriero(*command)
    assert back.returncode == 0, back.stderr
    assert "9 tokens in 3 documents -> back: 2 shards, 2 by hard link" in back.stdout
    assert documents_of(TokenStore.open(tmp_path / "back")) == documents_of(store)
    again = arriero(*command)
    assert again.returncode == 2
    assert "error: back exists already" in again.stderr


def test_export_warns_of_documents_a_peer_stumbles_over(tmp_path, arriero):
    make_dataset(tmp_path / "set", [[[5, EOS], []]])
    assert "1 document without a token" in arriero("data", "export", "set", "olmo", "out").stdout
    assert "without a token" not in arriero("data", "export", "set", "megatron", "out2").stdout


def test_export_warns_that_a_loss_mask_is_left_out(tmp_path, arriero):
    store = make_dataset(tmp_path / "set", [[[5, 6, EOS]]])
    assert "loss mask" not in arriero("data", "export", "set", "megatron", "out").stdout
    attach_loss_masks(store.directory, [[False, True, True]])
    assert "the loss mask is not exported" in arriero("data", "export", "set", "megatron", "out2").stdout


def test_import_says_what_it_added_and_what_is_missing(tmp_path, arriero):
    tokenizer = tokenizer_file(tmp_path)
    rows = pa.array([[5], [6, EOS], []], pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet")
    command = ("data", "import", "hf-parquet", "a.parquet", "--tokenizer", tokenizer, "-o")
    added = arriero(*command, "added")
    assert "an end-of-document token was added to 1 document" in added.stdout
    assert "1 document is empty" in added.stdout
    kept = arriero(*command, "kept", "--separator", "keep")
    assert "1 document does not end with the end-of-document token" in kept.stdout


def test_import_remembers_where_each_shard_came_from(tmp_path):
    store = make_dataset(tmp_path / "set", SHARDS)
    back = read_in("megatron", [store.directory], tmp_path / "back")
    lines = (back.directory / "imported.tsv").read_text().splitlines()
    assert lines == [f"{name}\t{store.directory}/{name}.bin" for name in ("00000", "00001")]
    assert back.about["from"] == [str(store.directory)]
