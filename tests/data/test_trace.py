"""`arriero data trace` and what it computes: where the batches of a run really hold a document."""

import json
import shutil

import numpy as np
import pytest

import arriero
from arriero.data.order.documents import documents_of, readings_of
from arriero.data.order.loader import Loader
from arriero.data.order.order import Change, Stream
from arriero.data.order.packing import Packing, TokenSource
from arriero.data.order.shuffle import HELDOUT_SEED, move_heldout_last, split_heldout

SAMPLES = 90
SETTINGS = {
    "run.name": "run",
    "run.device": "cpu",
    "model.preset": "llama-test",
    "model.vocab_size": 4096,
    "data.seq_len": 64,
    "train.batch": "512 tok",
    "train.horizon": "4 steps",
    "checkpoint.every": "2 steps",
    "checkpoint.keep": 5,
    "eval.heldout": "4k tok",
    "observe.tensorboard": False,
}


@pytest.fixture(scope="module")
def stores(dataset_writer, tmp_path_factory):
    """Two datasets in which every token is a different one; documents have 0 to 40 tokens."""
    lengths = np.random.default_rng(5).integers(0, 41, (2, 24))
    made, token = [], 0
    for i, row in enumerate(lengths.tolist()):
        ends = token + np.cumsum(row)
        documents = [range(end - length, end) for end, length in zip(ends, row, strict=True)]
        token = int(ends[-1])
        shards = [documents[:9], documents[9:]]
        made.append(dataset_writer(tmp_path_factory.mktemp("trace") / str(i), shards, vocab_size=3000))
    return made


def read_by_the_loader(stream):
    """Return (sample, place in the sequence, token) of every input."""
    found = []
    with Loader(stream, 1) as loader:
        for sample in range(SAMPLES):
            batch = next(loader)
            row = batch.tokens_BT[0, : batch.real_tokens].tolist()
            found += [(sample, place, token) for place, token in enumerate(row)]
    return found


def streams(stores, cache):
    one, two = (TokenSource(store, weight=weight) for store, weight in zip(stores, (2.0, 1.0), strict=True))
    yield "concat, a mixture over several epochs", Stream([one, two], 16, 3)
    changes = [Change(20, seq_len=8), Change(50, [two, one], 24)]
    yield "concat, changes of length and mixture", Stream([one, two], 16, 3, changes=changes)
    for kind, long in (("bestfit", "split"), ("bestfit", "truncate"), ("none", "split"), ("none", "drop")):
        yield f"{kind}, {long}", Stream([one, two], 16, 3, Packing(kind, long, cache))
    prompted = TokenSource(stores[0], prompt=(2990, 2991))
    yield "prompts", Stream([prompted, two], 16, 3, Packing("bestfit", "split", cache))
    stores[1].about[HELDOUT_SEED] = 7
    store = move_heldout_last(stores[1], 100)
    del stores[1].about[HELDOUT_SEED]
    held = TokenSource(store, split_heldout(store, 100)[0])
    yield "held-out documents of an imported dataset", Stream([one, held], 16, 3)


def test_a_document_is_found_exactly_where_the_loader_reads_it(stores, tmp_path):
    for what, stream in streams(stores, tmp_path):
        repeated, read = 0, read_by_the_loader(stream)
        for number, source in enumerate(stream.sources):
            for document in range(source.store.documents):
                start, length = source.store.document_span(document)
                first = start + (stores[0].tokens if number else 0)
                found = [
                    (each.sample, each.offset + i, first + each.first + i)
                    for each in readings_of(stream, number, document, SAMPLES)
                    for i in range(each.end - each.first)
                ]
                expected = [each for each in read if first <= each[2] < first + length]
                assert found == expected, (what, number, document)
                repeated += len(found) > length
        assert repeated, what


def test_a_step_and_its_documents_agree(stores, tmp_path):
    for what, stream in streams(stores, tmp_path):
        read = set()
        for number, source in enumerate(stream.sources):
            for document in range(source.store.documents):
                if any(10 <= each.sample < 20 for each in readings_of(stream, number, document, SAMPLES)):
                    read.add((source.name, document))
        listed = {(e["source"], d) for e in documents_of(stream, range(10, 20)) for d in e["documents"]}
        # a document without tokens lies inside of samples, and nothing of it is read
        assert {each for each in listed - read if tokens_of(stream, *each)} == set(), what
        assert read <= listed, what


def tokens_of(stream, name, document):
    return next(s for s in stream.sources if s.name == name).store.document_span(document)[1]


@pytest.fixture(scope="module")
def trained(corpus_cache, tmp_path_factory):
    own = {"run.dir": str(tmp_path_factory.mktemp("traced")), "data.cache": str(corpus_cache)}
    return arriero.run(arriero.load_config(None, SETTINGS | own), nproc=1).run_dir


def traced(command, *arguments):
    result = command("data", "trace", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_run_a_checkpoint_and_a_copied_model_tell_when_a_document_was_read(command, trained, tmp_path):
    document = traced(command, trained, "--step", "3")["sources"][0]["documents"][0]
    in_run = traced(command, trained, "--document", document)["documents"][0]
    assert 3 in [each["step"] for each in in_run["readings"]]
    model = shutil.copytree(trained / "model", tmp_path / "elsewhere")
    assert traced(command, model, "--document", document)["documents"][0] == in_run
    early = traced(command, trained / "checkpoints" / "step-00000002", "--document", document)["documents"][0]
    assert early["readings"] == [each for each in in_run["readings"] if each["step"] <= 2]
    shown = command("data", "trace", trained, "--document", document).stdout
    assert f"document {document} of " in shown


def test_a_text_is_found_and_held_out_documents_were_never_read(command, trained, corpus_cache):
    from arriero.data.dataset import Dataset

    dataset = Dataset(next(corpus_cache.glob("stdlib*")))
    last = len(dataset) - 1
    found = traced(command, trained, "--text", dataset.text(last)[:300])["documents"]
    assert [(each["document"], each["held_out"], each["readings"]) for each in found] == [(last, True, [])]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "one of --document, --text and --step"),
        (("--document", "999999"), "has no document 999999"),
        (("--step", "5"), "step 5 was not trained"),
        (("--document", "1", "--source", "songs"), "is not a source of the run"),
        (("--document", "1", "--set", "run.seed=9"), "the order of samples has changed"),
    ],
)
def test_a_wrong_question_is_explained(command, trained, options, words):
    result = command("data", "trace", trained, *options)
    assert result.returncode == 2
    assert words in result.stderr


def test_a_name_of_two_sources_is_not_guessed(command, corpus_cache, tmp_path):
    made = [str(tmp_path / part / "set") for part in "ab"]
    shutil.copytree(next(corpus_cache.glob("stdlib*")), made[0])
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{i} llamas walk"}}\n' for i in range(3000)))
    tokenizer = ["--tokenizer", f"{made[0]}/tokenizer.json", "--workers", "1"]
    result = command("data", "prepare", tmp_path / "text.jsonl", "-o", made[1], *tokenizer)
    assert result.returncode == 0, result.stderr
    changes = {"data.sources": [{"path": f"{each}/"} for each in made], "train.horizon": "1 step"}
    own = {"run.dir": str(tmp_path), "data.cache": str(corpus_cache), "checkpoint.export": False}
    run = arriero.run(arriero.load_config(None, SETTINGS | own | changes), nproc=1).run_dir
    result = command("data", "trace", run, "--document", "1", "--source", "set")
    assert result.returncode == 2 and all(each in result.stderr for each in made)
    for each in made:
        (found,) = traced(command, run, "--document", "1", "--source", f"{each}/")["documents"]
        assert found["source"] == each


def test_a_directory_without_a_record_is_rejected(command, trained, tmp_path):
    model = shutil.copytree(trained / "model", tmp_path / "m")
    (model / "training.json").write_text('{"data": 1}')
    assert "is damaged" in command("data", "trace", model, "--step", "1").stderr
    (model / "training.json").unlink()
    assert "has no record of its training" in command("data", "trace", model, "--step", "1").stderr
