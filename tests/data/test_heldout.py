import json

import numpy as np
import pytest
from exchange_corpora import EOS, make_dataset, tokenizer_file

from arriero.data.exchange import Import
from arriero.data.order import packing_plan as bestfit
from arriero.data.order.packing import Packing, TokenSource
from arriero.data.order.packing_plan import make_plan
from arriero.data.order.shuffle import HELDOUT_SEED, move_heldout_last, split_heldout
from arriero.data.store.manifest import MANIFEST, manifest_text
from arriero.data.store.store import TokenStore
from arriero.data.tokens.tokenizer import load_tokenizer
from arriero.data.workers import no_progress


@pytest.fixture
def unshuffled(make_store):
    """Token k of the dataset is k, in documents of 0 to 12 tokens over three shards."""
    lengths = np.random.default_rng(2).integers(0, 13, (3, 100))
    token, shards = 0, []
    for row in lengths.tolist():
        shards.append([])
        for length in row:
            shards[-1].append(range(token, token + length))
            token += length
    store = make_store(shards, vocab_size=4000)
    return store, [list(document) for shard in shards for document in shard]


def with_seed(store, seed):
    path = store.directory / MANIFEST
    manifest = json.loads(path.read_bytes())
    manifest["about"][HELDOUT_SEED] = seed
    path.write_bytes(manifest_text(manifest))
    return TokenStore.open(store.directory)


def documents(store, span):
    ids = store.read(span.start, len(span))
    starts = store.document_starts(span.start, len(span)) - span.start
    return [part.tolist() for part in np.split(ids, starts[1:])]


def test_imported_datasets_hold_out_documents_from_everywhere(unshuffled):
    plain, whole = unshuffled
    store = move_heldout_last(with_seed(plain, 1), 150)
    training, held = split_heldout(store, 150)
    trained, chosen = documents(store, training), documents(store, held)
    assert sorted(trained + chosen) == sorted(filter(None, whole))
    assert 150 <= sum(map(len, chosen)) < 150 + 13
    places = np.array([document[0] for document in chosen]) / plain.tokens
    assert places.min() < 0.2
    assert places.max() > 0.8
    assert trained == sorted(trained)
    for start in range(0, store.tokens - 40, 37):
        inside = store.document_start_before(start + 20)
        assert store.read(inside, 1)[0] in {document[0] for document in whole if document}


def test_places_are_found_without_sorting_each_time(unshuffled, monkeypatch):
    plain, _ = unshuffled
    store, sorts, argsort = move_heldout_last(with_seed(plain, 1), 150), [], np.argsort
    monkeypatch.setattr(np, "argsort", lambda *given: sorts.append(1) or argsort(*given))
    assert [int(store.read(store.place_of(token), 1)[0]) for token in range(50)] == list(range(50))
    assert len(sorts) == 1


def test_rows_of_whole_documents_are_packed_from_the_moved_ones(unshuffled, tmp_path, monkeypatch):
    monkeypatch.setattr(bestfit, "UNITS_AT_ONCE", 1)
    plain, whole = unshuffled
    store = move_heldout_last(with_seed(plain, 1), 150)
    for part, span in enumerate(split_heldout(store, 150)):
        request = Packing("bestfit").request(TokenSource(store, span), 20)
        plan = make_plan(tmp_path / "plans", request, 2 - part, no_progress)
        segments = [segment for row in range(plan.rows) for segment in plan.segments(row)]
        found = [store.read(int(start), int(slots)).tolist() for start, slots, _ in segments]
        assert sorted(found) == sorted(documents(store, span))
        assert all(each in whole for each in found)


def test_the_held_out_documents_depend_on_the_seed_and_the_number_alone(unshuffled):
    plain, _ = unshuffled

    def chosen(seed, tokens=150):
        store = move_heldout_last(with_seed(plain, seed), tokens)
        return {
            document[0] for document in documents(store, split_heldout(store, tokens)[1])
        }, store.fingerprint

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    assert len(chosen(1)[0] & chosen(1, 300)[0]) >= len(chosen(1)[0]) - 2


def test_datasets_without_a_seed_keep_their_tail(unshuffled):
    plain, _ = unshuffled
    assert move_heldout_last(plain, 150) is plain
    assert move_heldout_last(with_seed(plain, 1), 0).fingerprint == plain.fingerprint


def test_an_import_asks_for_held_out_documents_from_everywhere(tmp_path):
    made = make_dataset(tmp_path / "made", [[[1, 2, EOS]] * 20])
    Import("megatron", [made.directory], load_tokenizer(tokenizer_file(tmp_path))).into(tmp_path / "imported")
    store = TokenStore.open(tmp_path / "imported")
    assert store.about[HELDOUT_SEED] == 1
    assert move_heldout_last(store, 10).fingerprint != store.fingerprint
