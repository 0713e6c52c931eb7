import hashlib
import os
from itertools import pairwise

import numpy as np
import pytest

from arriero.data.prepare import builtin
from arriero.data.prepare.builtin import prepare_builtin
from arriero.data.store.store import TokenStore
from arriero.data.text.sources import stdlib_documents
from arriero.data.tokens.tokenizer import load_tokenizer
from arriero.data.tokens.training import train_tokenizer
from arriero.errors import UserError

STDLIB = "builtin:stdlib"


@pytest.fixture
def small_builtin(monkeypatch, tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    for i in range(20):
        (folder / f"m{i:02d}.py").write_text(f"def f{i}(x):\n    return x * {i}  # <|end|> is text\n")
    monkeypatch.setitem(builtin.BUILTINS, STDLIB, lambda: stdlib_documents(folder))
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
    assert calls[-1] == ("tokenising", 20, 20)


def test_a_prepare_that_dies_leaves_no_dataset_and_is_redone(small_builtin, monkeypatch):
    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(builtin, "write_manifest", die)
        prepare_builtin(STDLIB, small_builtin)
    assert list(small_builtin.iterdir()) == []
    assert TokenStore.open(prepare_builtin(STDLIB, small_builtin)).documents == 20


def test_leftovers_of_a_killed_prepare_are_swept_but_not_those_of_a_living_one(small_builtin):
    target = prepare_builtin(STDLIB, small_builtin)
    old, fresh = (small_builtin / f".{target.name}.{name}.making" for name in ("old", "fresh"))
    old.mkdir()
    fresh.mkdir()
    os.utime(old, (1, 1))
    (target / "manifest.json").unlink()
    prepare_builtin(STDLIB, small_builtin)
    assert sorted(path.name for path in small_builtin.iterdir()) == sorted([fresh.name, target.name])


@pytest.mark.parametrize("name", ["manifest.json", "00000.bin", "00000.idx", "tokenizer.json"])
def test_a_damaged_dataset_is_made_again(small_builtin, name):
    target = prepare_builtin(STDLIB, small_builtin)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    (target / name).unlink()
    assert prepare_builtin(STDLIB, small_builtin) == target
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in small_builtin.iterdir()] == [target.name]


def test_two_preparing_at_once_agree_on_one_dataset(small_builtin, monkeypatch):
    manifest_of = builtin.write_manifest
    others = []

    def overtaken(*args, **kwargs):
        manifest_of(*args, **kwargs)
        if not others:
            others.append(None)
            others[0] = prepare_builtin(STDLIB, small_builtin)

    monkeypatch.setattr(builtin, "write_manifest", overtaken)
    target = prepare_builtin(STDLIB, small_builtin)
    assert others == [target]
    assert [path.name for path in small_builtin.iterdir()] == [target.name]
    assert TokenStore.open(target).documents == 20


def test_an_unknown_builtin_is_refused_with_the_known_ones(tmp_path):
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


def test_a_stripped_standard_library_is_refused(tmp_path):
    (tmp_path / "os.pyc").write_bytes(b"")
    with pytest.raises(UserError, match="no source files"):
        stdlib_documents(tmp_path)


def test_special_strings_in_text_stay_text(tmp_path):
    tokenizer = train_tokenizer(["a <|end|> b"] * 3, 300, tmp_path / "tokenizer.json")
    for text in ("a <|end|> b", "<|end|>", "<|end|><|end|>\x00 é 中 🦙\r\n\t"):
        for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0]):
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
