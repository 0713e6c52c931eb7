"""The measurements run and count what was done; how fast a machine is, no test can say."""

import json
from importlib.util import find_spec

import pytest
from exchange_corpora import EOS, make_dataset, tokenizer_file
from peer_python import peer_python

from benchmarks.data.peers import (
    PeerAbsent,
    read_fms_path,
    read_hf_datasets,
    text_megabytes,
    tokenize_datasets_map,
    tokenize_datatrove,
)


@pytest.fixture
def store(tmp_path):
    return make_dataset(tmp_path / "set", [[[*range(1, 40), EOS]] * 30] * 2)


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "text.jsonl"
    texts = ["w5 w6 w7 " * 20, "w8 é"] * 10
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_the_path_of_fms_fsdp_is_timed_over_the_rows_it_made(store):
    measured = read_fms_path(store, seq_len=64, rows=20)
    assert measured.amount == 20 * 64 / 1e6
    assert measured.cpu_s > 0
    assert measured.rate == measured.amount / measured.cpu_s
    assert read_fms_path(store, seq_len=64, rows=10**6).amount == (2400 - 1) // 64 * 64 / 1e6


def test_datasets_is_timed_where_it_is_installed(store, jsonl, tmp_path):
    if not (find_spec("datasets") and find_spec("transformers")):
        pytest.skip("'datasets' is not installed")
    assert read_hf_datasets(store, seq_len=64, rows=20).amount == 20 * 64 / 1e6
    measured = tokenize_datasets_map(jsonl, tokenizer_file(tmp_path))
    assert measured.amount == text_megabytes(jsonl) == (180 + 5) * 10 / 1e6


def test_datatrove_is_timed_in_the_interpreter_that_has_it(jsonl, tmp_path, monkeypatch):
    monkeypatch.setenv("ARRIERO_PEERS_PYTHON", peer_python("datatrove", "tokenizers", "orjson"))
    measured = tokenize_datatrove(jsonl, tokenizer_file(tmp_path))
    assert (measured.peer, measured.unit, measured.amount) == ("datatrove", "MB", text_megabytes(jsonl))


def test_a_missing_peer_is_reported_with_the_variable_to_set(jsonl, tmp_path, monkeypatch):
    if find_spec("datatrove"):
        pytest.skip("datatrove is installed beside the tests")
    monkeypatch.delenv("ARRIERO_PEERS_PYTHON", raising=False)
    with pytest.raises(PeerAbsent, match="ARRIERO_PEERS_PYTHON"):
        tokenize_datatrove(jsonl, tokenizer_file(tmp_path))
