import json
import os
import resource
import struct
import threading
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.data.store.manifest import manifest_text, parse_manifest
from arriero.data.store.shards import ShardWriter
from arriero.data.store.store import FILES, TokenStore
from arriero.errors import UserError
from benchmarks.data.reading import write_empty_shards

DOCUMENTS = st.lists(st.lists(st.integers(0, 999), max_size=6), max_size=5)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=st.lists(DOCUMENTS, min_size=1, max_size=4),
    vocab_size=st.sampled_from([1000, 100_000]),
    data=st.data(),
)
def test_any_range_reads_back_across_shards_and_empty_documents(make_store, shards, vocab_size, data):
    store = make_store(shards, vocab_size=vocab_size)
    flat = list(chain.from_iterable(chain.from_iterable(shards)))
    begins, position = set(), 0
    for document in chain.from_iterable(shards):
        if document:
            begins.add(position)
        position += len(document)
    start = data.draw(st.integers(0, len(flat)))
    n = data.draw(st.integers(0, len(flat) - start))

    assert store.tokens == len(flat)
    assert store.documents == sum(len(documents) for documents in shards)
    assert store.read(start, n).tolist() == flat[start : start + n]
    assert store.document_starts(start, n).tolist() == sorted(b for b in begins if start <= b < start + n)
    if start < len(flat):
        assert store.document_start_before(start) == max(b for b in begins if b <= start)


def test_a_crowd_of_empty_documents_hides_no_beginning(make_store):
    store = make_store([[[1], *[[]] * 9, [2], [3]]])
    assert store.document_starts(0, 3).tolist() == [0, 1, 2]
    assert store.document_start_before(1) == 1


def test_any_flipped_bit_in_the_positions_of_an_index_is_an_error(make_store):
    store = make_store([[[1, 2, 3], [4], [5, 6]]])
    path, lengths_before_the_last = store.directory / "00000.idx", range(34, 34 + 4 * 2)
    content = path.read_bytes()
    for at in [*lengths_before_the_last, *range(34 + 4 * 3, 34 + 12 * 3)]:
        for bit in range(8):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            with pytest.raises(UserError, match=r"00000\.idx is damaged"):
                TokenStore.open(store.directory).document_starts(0, 6)


def test_the_index_has_megatrons_bytes(make_store):
    store = make_store([[[1, 2, 3], [4]]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 6) + struct.pack("<3q", 0, 1, 2)
    assert (store.directory / "00000.idx").read_bytes() == expected
    assert (store.directory / "00000.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)


def test_a_large_vocabulary_is_stored_as_int32(make_store):
    store = make_store([[[70_000, 5]]], vocab_size=70_001)
    assert (store.directory / "00000.bin").read_bytes() == struct.pack("<2i", 70_000, 5)
    assert (store.directory / "00000.idx").read_bytes()[17] == 4


def test_a_token_beyond_the_vocabulary_is_rejected_and_leaves_no_shard(tmp_path):
    with pytest.raises(UserError, match="token id 1000"), ShardWriter(tmp_path, "00000", 1000) as writer:
        writer.add(np.array([3, 1000]))
    assert list(tmp_path.iterdir()) == []


def test_opening_reads_nothing_but_the_manifest(make_store):
    store = make_store([[[1, 2]], [[3]]])
    for path in store.directory.iterdir():
        if path.name != "manifest.json":
            path.unlink()
    assert TokenStore.open(store.directory).tokens == 3


def test_opening_a_crowd_of_shards_opens_one_file(tmp_path, python):
    write_empty_shards(tmp_path, 20_000)
    code = """
import sys
from pathlib import Path
from arriero.data.store.store import TokenStore
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
store = TokenStore.open(Path(sys.argv[1]))
print(store.tokens, store.shard_path(19_999).name, *[Path(name).name for name in opened])
"""
    result = python("-c", code, tmp_path)
    assert result.stdout.split() == [str(20_000 * 10**9), "0019999", "manifest.json"]


@settings(max_examples=60, deadline=None)
@given(
    names=st.one_of(
        st.sampled_from([["aaa", "a"], ["a", "aaa"], ["é", "ab"], ["aa", "bb"]]),
        st.lists(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5), max_size=8
        ),
        st.lists(st.text('ab"\\,[ ', min_size=3, max_size=3)),
    ),
    data=st.data(),
)
def test_a_manifest_parsed_by_column_is_the_one_that_was_written(names, data):
    column = st.lists(st.integers(0, 2**62 // 10), min_size=len(names), max_size=len(names))
    shards = {"name": names, **{key: data.draw(column) for key in ("tokens", "documents", "text_bytes")}}
    about = {"shards": {"name": [1]}, "note": '"shards": {"name": ['}
    manifest, columns = parse_manifest(manifest_text({"version": 1, "about": about, "shards": shards}))
    assert manifest == {"version": 1, "about": about}
    assert [columns.name(i) for i in range(len(names))] == names
    assert columns.tokens.tolist() == shards["tokens"]
    assert columns.documents.tolist() == shards["documents"]
    assert columns.text_bytes == sum(shards["text_bytes"])


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def keep_open():
    yield FILES.limit
    FILES.limit(None)


def test_few_files_stay_open(make_store, keep_open):
    keep_open(3)
    store = make_store([[[i]] for i in range(40)])
    before = open_files()
    assert store.read(0, 40).tolist() == list(range(40))
    assert open_files() - before <= 3
    store.close()
    assert open_files() <= before


def test_files_are_opened_once_where_as_many_may_stay_open(make_store, monkeypatch, keep_open):
    keep_open(None)
    stores = [make_store([[[i] * 3, [i] * 2] for i in range(60)]) for _ in range(2)]
    opened = []
    original = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: opened.append(path) or original(path, *more))
    for _ in range(3):
        for store in stores:
            assert store.read(0, 300).tolist() == [i for i in range(60) for _ in range(5)]
            assert len(store.document_starts(0, 300)) == 120
    assert len(opened) == len(set(opened)) == 2 * 2 * 60
    keep_open(30)
    opened.clear()
    for store in stores:
        store.document_starts(0, 300)
    assert opened == []


def test_a_process_out_of_files_keeps_fewer_open(make_store, keep_open):
    keep_open(10**6)
    store = make_store([[[i]] for i in range(200)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 50, hard))
    try:
        for _ in range(2):
            assert store.read(0, 200).tolist() == list(range(200))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_out_of_files_closes_shards_to_read_an_index(make_store, keep_open):
    keep_open(10**6)
    store = make_store([[[i]] for i in range(8)])
    store.read(0, 8)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 20, hard))
    others = []
    try:
        with suppress(OSError):
            while True:
                others.append(os.open("/dev/null", os.O_RDONLY))
        assert store.document_starts(0, 8).tolist() == list(range(8))
    finally:
        for other in others:
            os.close(other)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_files_of_a_store_that_is_gone_are_closed(make_store, keep_open):
    keep_open(1000)
    store, other = (make_store([[[i]] for i in range(40)]) for _ in range(2))
    other.read(0, 1)
    before = open_files()
    store.read(0, 40)
    assert open_files() == before + 40
    del store
    other.read(0, 1)
    assert open_files() <= before


def test_threads_share_a_store_whose_files_come_and_go(make_store, keep_open):
    keep_open(1)
    store = make_store([[[i] * 50] for i in range(8)])
    wrong = []

    def read(seed):
        for k in np.random.default_rng(seed).integers(0, 8, 400):
            got = store.read(int(k) * 50, 50)
            if not (got == k).all():
                wrong.append(got)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_fingerprint_follows_the_content_and_not_the_place_or_time(make_store):
    one, same, other = make_store([[[1, 2]]]), make_store([[[1, 2]]]), make_store([[[1, 3]]])
    os.utime(same.directory / "manifest.json", (1, 1))
    assert one.fingerprint == TokenStore.open(same.directory).fingerprint != other.fingerprint
    assert make_store([[[1, 2]]], tokenizer="{ }").fingerprint != one.fingerprint
    assert make_store([[[1], [2]]]).fingerprint != one.fingerprint


def test_a_manifest_that_cannot_be_used_is_named(make_store, tmp_path):
    with pytest.raises(UserError, match=r"nowhere/manifest\.json does not exist"):
        TokenStore.open(tmp_path / "nowhere")
    path = make_store([[[1]]]).directory / "manifest.json"
    good = json.loads(path.read_text())

    def complaint(text):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            TokenStore.open(path.parent)
        assert str(path) in caught.value.what
        return caught.value.what

    assert "not valid JSON" in complaint(path.read_text()[:-20])
    assert "version 2" in complaint(json.dumps(good | {"version": 2}))
    assert "version None" in complaint("[]")
    assert "damaged" in complaint(json.dumps({k: v for k, v in good.items() if k != "eos_id"}))
    assert "damaged" in complaint(json.dumps(good | {"shards": good["shards"] | {"tokens": [1, 2]}}))
    assert "damaged" in complaint(json.dumps(good | {"shards": good["shards"] | {"tokens": [-1]}}))
    assert "damaged" in complaint(json.dumps(good | {"dtype": "float32"}))


def test_a_missing_cut_or_foreign_shard_file_is_named(make_store):
    missing, cut, no_index, foreign = (make_store([[[1, 2, 3]]]) for _ in range(4))
    (missing.directory / "00000.bin").unlink()
    with pytest.raises(UserError, match=r"00000\.bin is missing"):
        missing.read(0, 1)
    (cut.directory / "00000.bin").write_bytes(b"1234")
    with pytest.raises(UserError, match=r"00000\.bin has 4 bytes, the manifest says 6"):
        cut.read(0, 1)
    (no_index.directory / "00000.idx").unlink()
    with pytest.raises(UserError, match=r"00000\.idx is missing"):
        no_index.document_starts(0, 3)
    size = (foreign.directory / "00000.idx").stat().st_size
    (foreign.directory / "00000.idx").write_bytes(b"x" * size)
    with pytest.raises(UserError, match=r"00000\.idx is not the index"):
        foreign.document_starts(0, 3)


def test_an_index_for_another_token_width_is_rejected(make_store):
    store = make_store([[[1, 2, 3]]])
    index = bytearray((store.directory / "00000.idx").read_bytes())
    index[17] = 4
    (store.directory / "00000.idx").write_bytes(index)
    with pytest.raises(UserError, match=r"00000\.idx is not the index"):
        store.document_starts(0, 3)
