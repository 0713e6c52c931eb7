import hashlib
import json
import struct

import numpy as np
import pytest
from exchange_corpora import EOS, LARGE, make_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arriero.data.store.shards import DTYPES, index_bytes
from arriero.data.store.store import TokenStore
from arriero.data.store.verify import scan_tokens, verify_dataset

SHARDS = [[[5, 6, EOS], [7, EOS]], [[8, 9, 10, EOS]], [[11, EOS]]]


@pytest.fixture
def store(tmp_path):
    return make_dataset(tmp_path / "set", SHARDS)


def problems(store):
    return [
        tuple(problem) for problem in verify_dataset(TokenStore.open(store.directory), workers=2).problems
    ]


def rewrite(store, name, change):
    path = store.directory / name
    path.write_bytes(change(path.read_bytes()))


def test_a_valid_dataset_has_no_problem_and_is_counted(tmp_path):
    store = make_dataset(tmp_path / "set", [[[], [EOS], [5, EOS], [6, EOS], [7, EOS]], [], [[]]], LARGE)
    seen = []
    found = verify_dataset(store, workers=2, advance=seen.append)
    assert found.problems == found.remarks == []
    assert (found.shards, found.tokens, found.documents, found.empty, found.only_eos) == (3, 7, 6, 2, 1)
    assert sum(seen) == 7 * 4


@pytest.mark.parametrize("name", ["00000.bin", "00001.idx", "tokenizer.json", "checksums.sha256"])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found_in_its_file(tmp_path_factory, name, place, bit):
    store = make_dataset(tmp_path_factory.mktemp("flip") / "set", SHARDS)

    def flip(raw):
        raw = bytearray(raw)
        raw[place % len(raw)] ^= 1 << bit
        return raw

    rewrite(store, name, flip)
    files = {file for file, _ in problems(store)}
    assert name in files
    assert files == {name} or name == "checksums.sha256"


def test_all_problems_are_reported_and_not_only_the_first(store):
    (store.directory / "00000.idx").unlink()
    rewrite(store, "00001.bin", lambda raw: raw[:-2])
    rewrite(store, "00002.bin", lambda _: struct.pack("<2H", 60_000, EOS))
    (store.directory / "tokenizer.json").unlink()
    found = problems(store)
    assert ("00000.idx", "is missing") in found
    assert ("00001.bin", "has 6 bytes, the manifest says 8") in found
    assert ("00002.bin", "token 0 has id 60000, the vocabulary has 1000") in found
    assert ("00002.bin", "its checksum differs: the file was changed") in found
    assert ("tokenizer.json", "No such file or directory") in found


def test_counts_that_differ_from_the_manifest_are_named(store):
    path = store.directory / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"]["documents"][1] = 2
    manifest["shards"]["tokens"][2] = 3
    path.write_text(json.dumps(manifest))
    found = problems(store)
    assert ("00001.idx", "has 1 documents, the manifest says 2") in found
    assert ("00002.idx", "has 2 tokens, the manifest says 3") in found
    assert ("00002.bin", "has 4 bytes, the manifest says 6") in found


def test_an_index_that_would_mislead_a_reader_is_named(store):
    rewrite(store, "00000.idx", lambda raw: raw[:34] + struct.pack("<2i", 2, 3) + raw[42:])
    assert ("00000.idx", "sequence 1 begins at byte 6, the sequences before it end at 4") in problems(store)


def test_an_index_that_is_consistent_but_not_the_written_one_is_found(store):
    index = index_bytes(np.array([2, 3]), DTYPES["uint16"])
    rewrite(store, "00000.idx", lambda _: index)
    assert ("00000.idx", "its checksum differs: the file was changed") in problems(store)


def test_documents_without_an_end_or_with_two_are_found(tmp_path):
    store = make_dataset(tmp_path / "a", [[[5, 6], [7, EOS, EOS]]])
    found = problems(store)
    assert ("00000.bin", "the end-of-document token is doubled at tokens 3 and 4") in found
    assert ("00000.bin", "1 documents do not end with the end token") in found
    store = make_dataset(tmp_path / "b", [[[5, EOS], [EOS], [6, EOS], [EOS]]])
    ((file, what),) = problems(store)
    assert file == "00000.bin"
    assert what.startswith("2 of 4 documents are only the end-of-document token")


def test_documents_known_to_lack_their_end_are_only_remarked_on(tmp_path):
    store = make_dataset(tmp_path / "a", [[[5, 6], [7, EOS]]])
    store.about["documents_without_eos"] = 1
    found = verify_dataset(store)
    assert found.problems == []
    assert [remark.file for remark in found.remarks] == ["00000.bin"]


def test_a_dataset_made_without_ends_is_valid(tmp_path):
    store = make_dataset(tmp_path / "set", [[[5, 6], [7]]])
    assert len(verify_dataset(store).problems) == 1
    store.about["separators"] = {"bos": None, "eos": None}
    assert verify_dataset(store).problems == []


def test_a_separator_after_an_empty_document_is_not_a_doubled_one(tmp_path):
    assert problems(make_dataset(tmp_path / "a", [[[5, EOS], [EOS], [6, EOS], [7, EOS]]])) == []


def test_files_beside_the_shards_are_checked_if_they_are_listed(store):
    manifest_path, sums_path = (store.directory / name for name in ("manifest.json", "checksums.sha256"))
    (store.directory / "00000.plen").write_bytes(b"1234")
    digest = hashlib.sha256(b"1234").hexdigest()
    before = hashlib.sha256(sums_path.read_bytes()).hexdigest()
    sums_path.write_text(sums_path.read_text() + f"{digest}  00000.plen\n")
    after = hashlib.sha256(sums_path.read_bytes()).hexdigest()
    manifest_path.write_text(manifest_path.read_text().replace(before, after))
    assert problems(store) == []
    (store.directory / "00000.plen").write_bytes(b"1235")
    assert problems(store) == [("00000.plen", "its checksum differs: the file was changed")]
    (store.directory / "00000.plen").unlink()
    assert problems(store) == [("00000.plen", "No such file or directory")]


def test_files_that_do_not_belong_are_remarked_on(store):
    (store.directory / "00009.bin").write_bytes(b"")
    found = verify_dataset(store)
    assert found.problems == []
    assert [tuple(r) for r in found.remarks] == [("00009.bin", "is not part of the dataset")]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(documents=st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8), chunk=st.integers(1, 9))
def test_a_scan_sees_the_same_in_chunks_of_any_size(tmp_path_factory, monkeypatch, documents, chunk):
    store = make_dataset(tmp_path_factory.mktemp("scan") / "set", [documents])
    monkeypatch.setattr("arriero.data.store.verify.CHUNK_BYTES", 2 * chunk)
    lengths = np.array([len(d) for d in documents], dtype=int)
    scan = scan_tokens(store.directory / "00000.bin", "uint16", lengths, 3, EOS)
    flat = [token for document in documents for token in document]
    ends = [d[-1] for d in documents if d]
    pairs = [
        sum(map(len, documents[:i])) + k
        for i, d in enumerate(documents)
        for k in range(1, len(d))
        if d[k] == d[k - 1] == EOS
    ]
    assert scan.tokens == len(flat)
    assert scan.beyond == ((flat.index(3), 3) if 3 in flat else None)
    assert scan.doubled == (pairs[0] if pairs else None)
    assert scan.empty == documents.count([])
    assert scan.only_eos == documents.count([EOS])
    assert scan.without_eos == sum(end != EOS for end in ends)
    assert scan.inner_eos == flat.count(EOS) - ends.count(EOS)


def test_verify_exits_with_1_and_names_the_file(store, arriero):
    valid = arriero("data", "verify", store.directory)
    assert valid.returncode == 0, valid.stderr
    assert "valid" in valid.stdout
    rewrite(store, "00001.bin", lambda raw: bytes(reversed(raw)))
    bad = arriero("data", "verify", store.directory, "--workers", "2")
    assert bad.returncode == 1
    assert "00001.bin: its checksum differs" in bad.stdout
    assert "00000.bin" not in bad.stdout


def test_verify_prints_one_json_object(store, command):
    facts = json.loads(command("data", "verify", store.directory, "--json").stdout)
    assert (facts["valid"], facts["problems"], facts["tokens"]) == (True, [], store.tokens)
    rewrite(store, "00001.bin", lambda raw: bytes(reversed(raw)))
    bad = command("data", "verify", store.directory, "--json")
    assert bad.returncode == 1
    assert json.loads(bad.stdout)["problems"][0]["file"] == "00001.bin"
