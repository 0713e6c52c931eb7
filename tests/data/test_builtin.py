import hashlib
import json
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from arriero.config.load import load_run
from arriero.data.prepare import prepare as preparing
from arriero.data.prepare.builtin import dataset_of, prepare_builtin
from arriero.data.store.store import TokenStore
from arriero.data.text.builtin import stdlib_documents
from arriero.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from arriero.errors import UserError
from arriero.model.presets import expand

STDLIB = "builtin:stdlib"


@pytest.fixture
def small_builtin(monkeypatch, tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    for i in range(20):
        (folder / f"m{i:02d}.py").write_text(f"def f{i}(x):\n    return x * {i}  # <|end|> is text\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(folder))
    return tmp_path / "cache"


def test_the_standard_library_becomes_a_dataset(stdlib_cache):
    store = TokenStore.open(prepare_builtin(STDLIB, stdlib_cache))
    tokenizer = load_tokenizer(store.tokenizer_path)
    texts = {document.text for document in stdlib_documents()}
    assert store.documents == len(stdlib_documents()) > 300
    assert store.text_bytes == sum(len(d.text.encode()) for d in stdlib_documents())
    assert store.vocab_size == tokenizer.vocab_size == 4096
    assert store.text_bytes / store.tokens > 2.5

    ids = store.read(0, store.tokens)
    starts = store.document_starts(0, store.tokens)
    assert (ids[np.append(starts[1:], store.tokens) - 1] == store.eos_id).all()
    assert np.count_nonzero(ids == store.eos_id) == store.documents
    for begin, end in pairwise(starts[:25]):
        assert tokenizer.decode(ids[begin : end - 1].tolist()) in texts


def test_documents_are_shuffled(small_builtin):
    store = TokenStore.open(prepare_builtin(STDLIB, small_builtin))
    text = load_tokenizer(store.tokenizer_path).decode(store.read(0, store.tokens).tolist())
    order = [int(part.split("(")[0]) for part in text.split("def f")[1:]]
    assert sorted(order) == list(range(20)) != order


def test_preparing_again_reuses_what_is_there(stdlib_cache):
    called = []
    before = {path: path.stat().st_mtime_ns for path in stdlib_cache.rglob("*")}
    target = prepare_builtin(STDLIB, stdlib_cache, lambda *call: called.append(call))
    assert {path: path.stat().st_mtime_ns for path in stdlib_cache.rglob("*")} == before
    assert called == []
    assert [path.name for path in stdlib_cache.iterdir()] == [target.name]


def test_preparing_twice_gives_the_same_bytes(small_builtin):
    one, two = (prepare_builtin(STDLIB, small_builtin / name) for name in "ab")
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes()
    assert TokenStore.open(one).fingerprint == TokenStore.open(two).fingerprint


def test_checksums_are_those_of_the_files(small_builtin):
    target = prepare_builtin(STDLIB, small_builtin)
    lines = (target / "checksums.sha256").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["tokenizer.json", "00000.bin", "00000.idx"]
    for line in lines:
        digest, name = line.split("  ")
        assert hashlib.sha256((target / name).read_bytes()).hexdigest() == digest


def test_progress_is_reported_to_the_end(small_builtin):
    calls = []
    prepare_builtin(STDLIB, small_builtin, lambda *call: calls.append(call))
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == [
        "reading",
        "training the tokenizer",
        "tokenising",
    ]
    size = sum(path.stat().st_size for path in small_builtin.parent.glob("lib/*.py"))
    assert calls[-1] == ("tokenising", size, size)


def test_a_prepare_that_dies_is_redone(small_builtin, monkeypatch):
    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing, "write_manifest", die)
        prepare_builtin(STDLIB, small_builtin)
    with pytest.raises(UserError):
        TokenStore.open(next(small_builtin.iterdir()))
    assert TokenStore.open(prepare_builtin(STDLIB, small_builtin)).documents == 20


@pytest.mark.parametrize("name", ["manifest.json", "00000.bin", "00000.idx", "tokenizer.json"])
def test_a_damaged_dataset_is_made_again(small_builtin, name):
    target = prepare_builtin(STDLIB, small_builtin)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    (target / name).unlink()
    assert prepare_builtin(STDLIB, small_builtin) == target
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in small_builtin.iterdir()] == [target.name]


def test_two_preparing_at_once_agree_on_one_dataset(small_builtin):
    start = threading.Barrier(3)

    def one(_):
        start.wait()
        return prepare_builtin(STDLIB, small_builtin)

    with ThreadPoolExecutor(3) as pool:
        targets = set(pool.map(one, range(3)))
    assert [path.name for path in small_builtin.iterdir()] == [target.name for target in targets]
    assert TokenStore.open(targets.pop()).documents == 20


def write_lines(path, texts, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))


def test_text_named_in_a_run_file_is_prepared_once_and_again_when_it_changes(tmp_path, tokenizer_file):
    write_lines(tmp_path / "corpus" / "a.jsonl", ["one", "two"])
    calls = []

    def dataset(path="corpus/*.jsonl", column=None):
        calls.clear()
        return dataset_of(
            str(tmp_path / path),
            str(tokenizer_file),
            column,
            tmp_path / "cache",
            lambda *call: calls.append(call[0]),
        )

    first = dataset()
    assert "tokenising" in calls
    assert TokenStore.open(first).documents == 2
    assert dataset() == first
    assert "tokenising" not in calls
    write_lines(tmp_path / "corpus" / "b.jsonl", ["three"])
    second = dataset()
    assert TokenStore.open(second).documents == 3
    assert second != first
    write_lines(tmp_path / "other" / "c.jsonl", ["four"], column="body")
    other = dataset("other", "body")
    assert TokenStore.open(other).documents == 1
    assert {path.parent for path in (first, second, other)} == {tmp_path / "cache" / "text"}


def test_a_killed_preparation_of_text_in_a_run_file_is_resumed(tmp_path, tokenizer_file, monkeypatch):
    write_lines(tmp_path / "a.jsonl", ["one", "two"])

    def die(*_, **__):
        raise KeyboardInterrupt

    about = (str(tmp_path / "a.jsonl"), str(tokenizer_file), None, tmp_path / "cache")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing, "write_manifest", die)
        dataset_of(*about)
    monkeypatch.setattr(preparing, "make_shard", die)
    assert TokenStore.open(dataset_of(*about)).documents == 2


def test_text_without_a_tokenizer_is_rejected_with_the_way_to_one(tmp_path, tokenizer_file, counting_store):
    write_lines(tmp_path / "a.jsonl", ["one"])
    for path in (tmp_path, tmp_path / "a.jsonl", tmp_path / "*.jsonl"):
        with pytest.raises(UserError, match=r"as text it needs a tokenizer; .*arriero data train-tokenizer"):
            dataset_of(str(path), None, None, tmp_path / "cache")
    dataset = str(counting_store.directory)
    assert dataset_of(dataset, None, None, tmp_path) == counting_store.directory
    with pytest.raises(UserError, match="remove tokenizer, column, template and chat"):
        dataset_of(dataset, str(tokenizer_file), None, tmp_path)


@pytest.mark.parametrize(
    ("given", "paths"),
    [("data/mine", ["data/mine"]), ("['a', 'b']", ["a", "b"]), ("[{path = 'a'}, 'b']", ["a", "b"])],
)
def test_sources_may_be_given_as_plain_paths(given, paths):
    config = load_run(None, [f"data.sources={given}"], expand).config
    assert [source.path for source in config.data.sources] == paths


def test_a_first_run_on_own_text_needs_one_command(tmp_path, tokenizer_file, arriero):
    write_lines(tmp_path / "corpus" / "a.jsonl", [f"line {i} of the corpus" for i in range(200)])
    (tmp_path / "run.toml").write_text(
        f"""
        [run]
        name = "own"
        [model]
        dim = 16
        layers = 1
        heads = 2
        kv_heads = 2
        ffn = 32
        vocab_size = 1500
        max_seq_len = 16
        [data]
        seq_len = 16
        sources = [{{ path = "corpus/*.jsonl", tokenizer = "{tokenizer_file}" }}]
        [train]
        batch = "64 tok"
        horizon = "2 steps"
        [checkpoint]
        export = false
        """
    )
    done = arriero("train", "run.toml", "--nproc", 2)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "data" / "text").glob("*/manifest.json"))) == 1


def test_an_unknown_builtin_is_rejected_with_the_known_ones(tmp_path):
    with pytest.raises(UserError, match="builtin:stdlib"):
        prepare_builtin("builtin:stdlb", tmp_path)


def test_the_standard_library_is_read_without_packages_tests_or_undecodable_files(tmp_path):
    wanted = {"b.py": "b", "a/x.py": "x", "a/latin.py": None, "empty.py": ""}
    unwanted = {
        f"{folder}/y.py": "y"
        for folder in ("site-packages", "dist-packages", "test", "a/tests", "__pycache__")
    }
    for name, text in {**wanted, **unwanted, "c.txt": "c"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(b"# \xe9" if text is None else text.encode())
    assert stdlib_documents(tmp_path) == [("a/x.py", "x"), ("b.py", "b")]


def test_a_stripped_standard_library_is_rejected(tmp_path):
    (tmp_path / "os.pyc").write_bytes(b"")
    with pytest.raises(UserError, match="no source files"):
        stdlib_documents(tmp_path)


def test_special_strings_in_text_stay_text(tmp_path):
    tokenizer = train_tokenizer(["a <|end|> b"] * 3, 300, tmp_path / "tokenizer.json")
    for text in ("a <|end|> b", "<|end|>", "<|end|><|end|>\x00 é 中 🦙\r\n\t"):
        ids = tokenizer.encode(text)
        assert tokenizer.eos_id not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eos_id]) == "<|end|>"


def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read tokenizer .*none\.json"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"bad\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "bad.json")
    train_tokenizer(["text"], 300, tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="no end-of-document token <fin>"):
        load_tokenizer(tmp_path / "tokenizer.json", eos="<fin>")


def test_text_of_a_run_file_that_needs_an_option_is_rejected_with_the_command(tmp_path, tokenizer_file):
    write_lines(tmp_path / "corpus" / "a.jsonl", ["one", "two"])
    (tmp_path / "corpus" / "README.md").write_text("about")
    with pytest.raises(UserError, match=r"--include .*: an option of `arriero data prepare`"):
        dataset_of(str(tmp_path / "corpus"), str(tokenizer_file), None, tmp_path / "cache")
