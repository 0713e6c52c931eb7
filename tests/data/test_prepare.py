import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, processors

from arriero.data.prepare import prepare as preparing
from arriero.data.prepare.planning import PrepareRequest
from arriero.data.prepare.prepare import PrepareWatcher, prepare
from arriero.data.store.store import TokenStore
from arriero.data.tokens.tokenizer import load_tokenizer, tokenizer_of
from arriero.errors import UserError

END = "<|end_of_text|>"
SOURCE = Path(__file__).parents[2] / "src"


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, real_texts):
    """Three JSONL files of real text, every document different, with empty and tiny ones among them."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"{i} {text[:3000]}" for i, text in enumerate(real_texts * 6)]
    texts += ["", "x", "", END, "é中🦙", "long" * 20_000]
    for i in range(3):
        write_jsonl(folder / f"{i}.jsonl", texts[i::3])
    return folder, texts


def request(corpus, directory, tokenizer_file, **more):
    more.setdefault("shard_bytes", 150_000)
    return PrepareRequest((str(corpus[0]),), directory, tokenizer_file, **more)


def documents_of(store):
    ids = store.read(0, store.tokens)
    starts = store.document_starts(0, store.tokens)
    return [part.tolist() for part in np.split(ids, starts[1:])]


def bytes_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_every_document_is_there_once_and_ends_once(corpus, tokenizer_file, tmp_path):
    store = prepare(request(corpus, tmp_path / "set", tokenizer_file), 1, PrepareWatcher())
    tokenizer = load_tokenizer(tokenizer_file)
    wanted = sorted([*tokenizer.encode(text), tokenizer.eos_id] for text in corpus[1] if text)
    assert sorted(documents_of(store)) == wanted
    assert store.shards > 3
    assert store.text_bytes == sum(len(text.encode()) for text in corpus[1])
    assert store.about["empty_documents"] == 2
    assert store.about["backend"]["used"] == "gigatoken"
    assert store.about["separators"] == {"bos": None, "eos": {"token": END, "id": tokenizer.eos_id}}
    inputs = [json.loads(line) for line in (tmp_path / "set" / "inputs.jsonl").read_text().splitlines()]
    assert [Path(each["path"]).name for each in inputs] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert not (tmp_path / "set" / ".prepare").exists()


def test_documents_are_shuffled_within_a_shard(tokenizer_file, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [str(i) for i in range(200)])
    store = prepare(
        PrepareRequest((str(tmp_path / "a.jsonl"),), tmp_path / "set", tokenizer_file), 1, PrepareWatcher()
    )
    decode = load_tokenizer(tokenizer_file).decode
    numbers = [int(decode(ids[:-1])) for ids in documents_of(store)]
    assert sorted(numbers) == list(range(200))
    assert abs(np.corrcoef(numbers, range(200))[0, 1]) < 0.2


def test_inputs_are_interleaved(corpus, tokenizer_file, tmp_path):
    store = prepare(request(corpus, tmp_path / "set", tokenizer_file), 1, PrepareWatcher())
    decode = load_tokenizer(tokenizer_file).decode
    numbers = [decode(ids).split(" ")[0] for ids in documents_of(store)[:60]]
    assert {int(number) % 3 for number in numbers if number.isdecimal()} == {0, 1, 2}


def test_the_bytes_do_not_depend_on_the_number_of_workers(corpus, tokenizer_file, tmp_path):
    for workers in (1, 3):
        prepare(request(corpus, tmp_path / str(workers), tokenizer_file), workers, PrepareWatcher())
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "3")
    prepare(request(corpus, tmp_path / "seed", tokenizer_file, seed=2), 1, PrepareWatcher())
    assert bytes_of(tmp_path / "1")["00000.bin"] != bytes_of(tmp_path / "seed")["00000.bin"]


def test_checksums_hold_and_megatron_would_find_the_index(corpus, tokenizer_file, tmp_path):
    prepare(request(corpus, tmp_path / "set", tokenizer_file), 1, PrepareWatcher())
    for line in (tmp_path / "set" / "checksums.sha256").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((tmp_path / "set" / name).read_bytes()).hexdigest() == digest
    assert (tmp_path / "set" / "00000.idx").read_bytes()[:9] == b"MMIDIDX\0\0"


KILLER = """
import os, signal, sys
from pathlib import Path
from arriero.data.prepare import planning as preparation
from arriero.data.prepare import prepare as preparing
from arriero.data.prepare import shard

left = int(sys.argv[1])

def dying(original):
    def step(*arguments, **more):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **more)
    return step

os.fsync, Path.replace, Path.mkdir = dying(os.fsync), dying(Path.replace), dying(Path.mkdir)
shard.ShardEncoding.encode = dying(shard.ShardEncoding.encode)
preparing.shutil.rmtree = dying(preparing.shutil.rmtree)
corpus, directory, tokenizer = map(Path, sys.argv[2:])
preparing.prepare(
    preparation.PrepareRequest((str(corpus),), directory, tokenizer, shard_bytes=150_000),
    1,
    preparing.PrepareWatcher(),
)
print(int(sys.argv[1]) - left)
"""


def test_killed_at_any_instant_it_resumes_to_the_same_bytes(corpus, tokenizer_file, tmp_path, start_arriero):
    """Killed before its n-th step towards the disk, n at random, and once more on the way back."""
    rng = random.Random(5)

    def run(directory, kill_before):
        arguments = (kill_before, corpus[0], tmp_path / directory, tokenizer_file)
        return start_arriero(*arguments, cwd=tmp_path, code=KILLER).wait()

    steps = int(run("whole", 10**9).stdout)
    for sixth in range(6):
        first = rng.randint(1 + sixth * steps // 6, (sixth + 1) * steps // 6)
        assert run(f"killed{sixth}", first).returncode == -signal.SIGKILL
        second = run(f"killed{sixth}", rng.randint(1, max(1, steps - first)))
        assert second.returncode in (0, -signal.SIGKILL), second.stderr
        last = run(f"killed{sixth}", 10**9)
        assert last.returncode == 0, last.stderr
        assert bytes_of(tmp_path / f"killed{sixth}") == bytes_of(tmp_path / "whole")


def environment():
    return {**os.environ, "PYTHONPATH": str(SOURCE)}


def test_finished_shards_are_not_made_again(corpus, tokenizer_file, tmp_path, monkeypatch):
    made = []
    make_shard = preparing.make_shard

    def dying(preparation, number, report):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(number)
        make_shard(preparation, number, report)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing, "make_shard", dying)
        prepare(request(corpus, tmp_path / "set", tokenizer_file), 1, PrepareWatcher())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").glob("*.bin")}
    assert len(before) == 3
    prepare(request(corpus, tmp_path / "set", tokenizer_file), 1, PrepareWatcher())
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_when_the_command_is_killed_its_workers_end_and_the_rest_is_resumed(corpus, tokenizer_file, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"{i} {text}" for i in range(5) for text in corpus[1]])
    asked = PrepareRequest(
        (str(tmp_path / "a.jsonl"),), tmp_path / "whole", tokenizer_file, shard_bytes=10**6
    )
    assert prepare(asked, 1, PrepareWatcher()).shards >= 3
    command = [
        sys.executable,
        "-m",
        "arriero",
        "data",
        "prepare",
        str(tmp_path / "a.jsonl"),
        "-o",
        str(tmp_path / "set"),
    ]
    command += ["--tokenizer", str(tokenizer_file), "--shard-size", "1MB", "--workers", "2"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "%" in line:
            break
    process.kill()
    process.wait()
    process.stdout.read()  # ends when the last worker has let go of it
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    ours, whole = bytes_of(tmp_path / "set"), bytes_of(tmp_path / "whole")
    assert ours == whole


def test_a_finished_prepare_is_found_again(corpus, tokenizer_file, tmp_path, monkeypatch):
    first = prepare(request(corpus, tmp_path / "set", tokenizer_file), 1, PrepareWatcher())
    before = bytes_of(tmp_path / "set")
    monkeypatch.setattr(preparing, "make_shard", None)
    again = prepare(request(corpus, tmp_path / "set", tokenizer_file), 1, PrepareWatcher())
    assert again.fingerprint == first.fingerprint
    assert bytes_of(tmp_path / "set") == before


@pytest.mark.parametrize("finished", [False, True])
def test_other_settings_or_inputs_in_the_same_directory_are_rejected(
    corpus, tokenizer_file, tmp_path, monkeypatch, finished
):
    def interrupted(*_):
        raise KeyboardInterrupt

    copy = tmp_path / "copy"
    copy.mkdir()
    for path in corpus[0].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    first = request((copy,), tmp_path / "set", tokenizer_file)
    if finished:
        prepare(first, 1, PrepareWatcher())
    else:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(preparing, "make_shard", interrupted)
            prepare(first, 1, PrepareWatcher())
    for changed, complaint in (
        ({"seed": 2}, "begun with seed 1, now it is 2"),
        ({"shard_bytes": 99_000}, "begun with shard_bytes"),
        ({"column": "body"}, "begun with column 'text', now it is 'body'"),
        ({"eos": "none"}, "begun with eos"),
    ):
        with pytest.raises(UserError, match=complaint):
            prepare(request((copy,), tmp_path / "set", tokenizer_file, **changed), 1, PrepareWatcher())
    write_jsonl(copy / "1.jsonl", ["changed"])
    with pytest.raises(UserError, match="other input files"):
        prepare(first, 1, PrepareWatcher())


def test_a_directory_with_other_files_is_left_alone(corpus, tokenizer_file, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        prepare(request(corpus, tmp_path, tokenizer_file), 1, PrepareWatcher())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_rejected_prepare_leaves_no_directory(tokenizer_file, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(UserError, match="not a string"):
        prepare(
            PrepareRequest((str(tmp_path / "bad.jsonl"),), tmp_path / "set", tokenizer_file),
            1,
            PrepareWatcher(),
        )
    assert not (tmp_path / "set").exists()


def test_an_input_that_changes_during_the_work_is_noticed(corpus, tokenizer_file, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", corpus[1])
    asked = PrepareRequest(
        (str(tmp_path / "a.jsonl"),), tmp_path / "set", tokenizer_file, shard_bytes=150_000
    )
    plan = preparing.begin_or_resume(asked)
    write_jsonl(tmp_path / "a.jsonl", [*corpus[1], "more"])
    with pytest.raises(UserError, match="has changed since this prepare began"):
        preparing.make_shards(plan, [0], 1, PrepareWatcher())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_record_late_in_the_corpus_stops_the_work_and_skipping_resumes_it(
    corpus, tokenizer_file, tmp_path, workers
):
    texts = [text for text in corpus[1] if text]
    write_jsonl(tmp_path / "a.jsonl", texts)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "cut')
    asked = {"directory": tmp_path / "set", "tokenizer": tokenizer_file, "shard_bytes": 300_000}
    with pytest.raises(UserError, match=rf"line {len(texts) + 1}: broken JSON"):
        prepare(PrepareRequest((str(tmp_path / "a.jsonl"),), **asked), workers, PrepareWatcher())
    store = prepare(
        PrepareRequest((str(tmp_path / "a.jsonl"),), skip_bad=True, **asked), workers, PrepareWatcher()
    )
    assert store.documents == len(texts)
    assert store.about["skipped_records"] == 1
    assert "broken JSON" in store.about["skipped_examples"][0]


@pytest.mark.parametrize(
    "texts", [["a"], ["", "", "a"], ["word " * 400_000]], ids=["one token", "last", "gigantic"]
)
def test_tiny_and_gigantic_documents(tokenizer_file, tmp_path, texts):
    write_jsonl(tmp_path / "a.jsonl", texts)
    store = prepare(
        PrepareRequest((str(tmp_path / "a.jsonl"),), tmp_path / "set", tokenizer_file), 1, PrepareWatcher()
    )
    kept = [text for text in texts if text]
    tokenizer = load_tokenizer(tokenizer_file)
    wanted = [[*tokenizer.encode(text), store.eos_id] for text in kept]
    assert store.tokens == sum(map(len, wanted))
    assert store.documents == len(kept)
    assert documents_of(store) == wanted


def test_an_empty_file_is_rejected(tokenizer_file, tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(UserError, match="no text"):
        prepare(
            PrepareRequest((str(tmp_path / "a.jsonl"),), tmp_path / "set", tokenizer_file),
            1,
            PrepareWatcher(),
        )


def test_separators_are_as_asked(tokenizer_file, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    inner = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    inner.add_special_tokens(["<s>", "<fin>"])
    inner.save(str(tmp_path / "t.json"))
    a, b, bos, fin, end = (inner.token_to_id(token) for token in ("a", "b", "<s>", "<fin>", END))
    cases = [
        ({"bos": "auto", "eos": "<fin>"}, [[bos, a, fin], [bos, b, fin]], fin),
        ({"bos": "<s>", "eos": "none"}, [[bos, a], [bos, b]], end),
        ({"eos": "none"}, [[a], [b]], end),
    ]
    for number, (marks, wanted, eos_id) in enumerate(cases):
        asked = PrepareRequest(
            (str(tmp_path / "a.jsonl"),), tmp_path / str(number), tmp_path / "t.json", **marks
        )
        store = prepare(asked, 1, PrepareWatcher())
        assert sorted(documents_of(store)) == sorted(wanted)
        assert store.eos_id == eos_id
        assert tokenizer_of(store).eos_id == eos_id


@pytest.mark.parametrize("marks", [{"bos": "auto"}, {"bos": "<nope>"}, {"eos": "<nope>"}])
def test_a_separator_the_tokenizer_lacks_is_rejected(corpus, tokenizer_file, tmp_path, marks):
    with pytest.raises(UserError, match="the tokenizer has no token"):
        prepare(request(corpus, tmp_path / "set", tokenizer_file, **marks), 1, PrepareWatcher())


def test_the_tokenizers_own_template_does_not_double_the_separators(tokenizer_file, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    end = inner.token_to_id(END)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{END} $A {END}", special_tokens=[(END, end)]
    )
    inner.save(str(tmp_path / "t.json"))
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    store = prepare(
        PrepareRequest((str(tmp_path / "a.jsonl"),), tmp_path / "set", tmp_path / "t.json"),
        1,
        PrepareWatcher(),
    )
    assert documents_of(store) == [[inner.token_to_id("a"), end]]


def test_texts_that_already_end_with_the_end_token_are_rejected(tokenizer_file, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"some text{END}\n", f"more {END}", "other"])
    asked = {"sources": (str(tmp_path / "a.jsonl"),), "tokenizer": tokenizer_file}
    with pytest.raises(UserError, match=r"2 of the first 3 documents end with the text <\|end_of_text\|>"):
        prepare(PrepareRequest(directory=tmp_path / "set", **asked), 1, PrepareWatcher())
    store = prepare(
        PrepareRequest(directory=tmp_path / "set", literal_eos=True, **asked), 1, PrepareWatcher()
    )
    assert np.count_nonzero(store.read(0, store.tokens) == store.eos_id) == 3


def test_ids_that_already_end_with_the_separator_are_rejected(tmp_path):
    """A vocabulary in which plain text becomes the separator's id."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "stop": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "t.json"))
    write_jsonl(tmp_path / "a.jsonl", ["a a", "a stop", "a"])
    asked = PrepareRequest((str(tmp_path / "a.jsonl"),), tmp_path / "set", tmp_path / "t.json", eos="stop")
    with pytest.raises(UserError, match=r"documents already end with stop \(id 1\)"):
        prepare(asked, 1, PrepareWatcher())


def test_an_end_token_not_marked_special_stays_text_all_the_same(tokenizer_file, tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    inner.add_tokens([AddedToken("<fin>", special=False)])
    inner.save(str(tmp_path / "t.json"))
    write_jsonl(tmp_path / "a.jsonl", ["a <fin> b", "c"])
    asked = PrepareRequest((str(tmp_path / "a.jsonl"),), tmp_path / "set", tmp_path / "t.json", eos="<fin>")
    store = prepare(asked, 1, PrepareWatcher())
    assert np.count_nonzero(store.read(0, store.tokens) == store.eos_id) == 2


def test_two_prepares_in_one_directory_do_not_meet(corpus, tokenizer_file, tmp_path, monkeypatch):
    asked = request(corpus, tmp_path / "set", tokenizer_file)

    def second(*_):
        prepare(asked, 1, PrepareWatcher())

    monkeypatch.setattr(preparing, "make_shard", second)
    with pytest.raises(UserError, match="is in use by process"):
        prepare(asked, 1, PrepareWatcher())


def test_the_command_line_end_to_end(corpus, tmp_path, arriero):
    done = arriero(
        "data", "train-tokenizer", corpus[0], "-o", "t.json", "--vocab-size", 600, "--sample", "1MB"
    )
    assert done.returncode == 0, done.stderr
    done = arriero("data", "prepare", corpus[0], "-o", "set", "--tokenizer", "t.json", "--shard-size", "1MB")
    assert done.returncode == 0, done.stderr
    assert "gigatoken" in done.stdout
    assert "2 empty ones skipped" in done.stdout
    store = TokenStore.open(tmp_path / "set")
    assert store.vocab_size == 600
    assert store.documents == sum(map(bool, corpus[1]))
    missing = arriero("data", "prepare", corpus[0], "-o", "b", "--tokenizer", "t.json", "--column", "body")
    assert missing.returncode == 2
    assert "no column 'body'; there are 'text'" in missing.stderr
    assert not (tmp_path / "b").exists()


def test_the_builtin_sources_are_prepared_like_any_other(tokenizer_file, tmp_path):
    sources = ("builtin:stdlib", "builtin:synthetic:100kB")
    store = prepare(PrepareRequest(sources, tmp_path / "set", tokenizer_file), 1, PrepareWatcher())
    assert store.documents > 400
    assert store.text_bytes > 5_000_000
