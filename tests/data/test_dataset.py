import json

import pytest
from exchange_corpora import EOS, make_dataset

from arriero.data import dataset as dataset_module
from arriero.data.dataset import Dataset, choose_documents, measure_lengths
from arriero.errors import UserError


@pytest.fixture
def store(tmp_path):
    shards = [[[5, 6, EOS], [], [EOS]], [], [[7, EOS], [*range(1, 100), EOS]]]
    return make_dataset(tmp_path / "set", shards)


def test_lengths_fall_into_powers_of_two(store):
    lengths = measure_lengths(store)
    assert (lengths.documents, lengths.empty, lengths.shortest, lengths.longest) == (5, 1, 0, 100)
    assert [(b.low, b.high, b.documents, b.tokens) for b in lengths.buckets if b.documents] == [
        (0, 0, 1, 0),
        (1, 1, 1, 1),
        (2, 3, 2, 5),
        (64, 127, 1, 100),
    ]


def test_large_datasets_are_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_module, "SAMPLED_SHARDS", 3)
    monkeypatch.setattr(dataset_module, "SAMPLED_DOCUMENTS", 12)
    store = make_dataset(tmp_path / "set", [[[shard + 1] * 4 for _ in range(10)] for shard in range(20)])
    lengths = measure_lengths(store)
    assert lengths.shards == 3
    assert 6 <= lengths.documents <= 12


def test_documents_are_counted_over_all_shards(store):
    dataset = Dataset(store.directory)
    read = [dataset.document(k) for k in range(5)]
    assert [(sample.shard, sample.tokens) for sample in read] == [
        ("00000", 3),
        ("00000", 0),
        ("00000", 1),
        ("00002", 2),
        ("00002", 100),
    ]
    assert read[0].text == "w5 w6 <|end|>"
    assert read[3].text == "w7 <|end|>"
    assert dataset.document(4, 2).text == "w1 w2"
    with pytest.raises(UserError, match="choose one from 0 to 4"):
        dataset.document(5)


def test_a_document_that_cannot_be_read_is_named(store):
    dataset = Dataset(store.directory)
    path = store.directory / "00002.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert dataset.document(3).text == "w7 <|end|>"
    with pytest.raises(UserError, match=r"00002\.bin has no 100 tokens from byte 4 on"):
        dataset.document(4)
    path.unlink()
    with pytest.raises(UserError, match=r"00002\.bin has no"):
        dataset.document(3)


def test_the_seed_chooses_the_samples(tmp_path):
    store = make_dataset(tmp_path / "set", [[[1, EOS]] * 100])
    chosen = [tuple(choose_documents(store, 5, seed)) for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == 5
    assert choose_documents(store, 300, 1) == list(range(100))


def test_inspect_shows_counts_lengths_and_samples(store, arriero):
    result = arriero("data", "inspect", store.directory, "--samples", "5")
    assert result.returncode == 0, result.stderr
    for words in (
        "106",
        "a test",
        "1 without a token",
        "documents by length",
        "64-127",
        "w5 w6 <|end|>",
        "█",
    ):
        assert words in result.stdout
    one = arriero("data", "inspect", store.directory, "--document", "3")
    assert "w7 <|end|>" in one.stdout
    assert "document 3, 2 tokens, shard 00002" in one.stdout


def test_inspect_prints_one_json_object(store, command):
    facts = json.loads(command("data", "inspect", store.directory, "--json", "--samples", 2).stdout)
    assert (facts["tokens"], facts["documents"]) == (store.tokens, store.documents)
    assert sum(bucket["documents"] for bucket in facts["lengths"]["buckets"]) == store.documents
    assert len(facts["samples"]) == 2
    one = json.loads(command("data", "inspect", store.directory, "--document", 3, "--json").stdout)
    assert one["document"]["text"] == "w7 <|end|>"


def test_inspect_reports_sampling(tmp_path, arriero):
    store = make_dataset(tmp_path / "set", [[[1, 2, EOS]] for _ in range(40)])
    result = arriero("data", "inspect", store.directory, "--samples", "0")
    assert "24 of 40 shards" in result.stdout


def test_an_empty_dataset_is_shown_too(tmp_path, arriero):
    store = make_dataset(tmp_path / "set", [[]])
    result = arriero("data", "inspect", store.directory)
    assert result.returncode == 0, result.stderr


def test_documents_are_a_sequence_of_token_arrays(store):
    dataset = Dataset(store.directory)
    assert len(dataset) == 5
    assert [ids.tolist() for ids in dataset][:4] == [[5, 6, EOS], [], [EOS], [7, EOS]]
    assert dataset[-1].tolist() == [*range(1, 100), EOS]
    assert dataset.text(3) == "w7 <|end|>"
    with pytest.raises(IndexError, match="document 5 of 5"):
        dataset[5]


def test_ranks_share_a_batch_and_any_start_gives_the_same_samples(counting_store):
    dataset = Dataset(counting_store.directory)

    def rows(steps, world_size, start=0):
        loaders = [dataset.batches(4, 8, world_size, rank, seed=3, start=start) for rank in range(world_size)]
        try:
            steps = [[next(loader).tokens_BT.tolist() for loader in loaders] for _ in range(steps)]
        finally:
            for loader in loaders:
                loader.close()
        return [row for step in steps for part in step for row in part]

    whole = rows(3, 1)
    assert rows(3, 2) == rows(3, 4) == whole
    assert rows(2, 2, start=4) == whole[4:]
    assert len(whole) == 12


def test_batches_leave_out_what_a_run_holds_out(counting_store):
    with Dataset(counting_store.directory).batches(8, 8, heldout_tokens=500) as loader:
        seen = {token for _ in range(30) for token in next(loader).tokens_BT.flatten().tolist()}
    assert max(seen) <= counting_store.tokens - 500
