import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from arriero.data.exchange import export_dataset
from arriero.data.prepare.planning import PrepareRequest, draft
from arriero.data.prepare.prepare import PrepareWatcher, prepare
from arriero.data.store.store import TokenStore
from arriero.data.tokens.tokenizer import load_tokenizer, train_tokenizer
from arriero.errors import UserError

END = "<|end_of_text|>"


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def in_one_sentence(done, words):
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert words in " ".join(done.stderr.split())


@pytest.mark.parametrize("output", ["/proc/foo", "afile", "afile/x"])
def test_a_place_that_cannot_hold_a_dataset_is_rejected(tmp_path, tokenizer_file, output):
    (tmp_path / "afile").write_text("mine")
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    target = tmp_path / output
    with pytest.raises(UserError, match=r"is a file|cannot be written"):
        prepare(PrepareRequest((str(source),), target, tokenizer_file), 1, PrepareWatcher())
    assert (tmp_path / "afile").read_text() == "mine"


@pytest.mark.parametrize("size", ["0B", "1B", "999999B"])
def test_a_shard_smaller_than_a_megabyte_is_rejected(tmp_path, tokenizer_file, arriero, size):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    command = ["data", "prepare", "a.jsonl", "-o", "set", "--tokenizer", tokenizer_file]
    in_one_sentence(arriero(*command, "--shard-size", size), f"--shard-size {size} is too small; give 1MB")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    "content",
    [b'{"text": "a"}\n', b"\x0e{abc", b"\x0b\x0c", b"\x0a\x02\x08\x05", b"\x0a\x02\x12\x00"],
    ids=["JSONL", "group", "end", "number for text", "no text"],
)
def test_a_file_that_is_no_tokenizer_is_rejected(tmp_path, content):
    (tmp_path / "c.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"c\.jsonl is not a tokenizer|cannot use tokenizer .*c\.jsonl"):
        load_tokenizer(tmp_path / "c.jsonl")


def test_a_tokenizer_json_by_another_name_is_read(tmp_path, tokenizer_file):
    (tmp_path / "tokenizer.backup").write_bytes(tokenizer_file.read_bytes())
    assert load_tokenizer(tmp_path / "tokenizer.backup").sha256 == load_tokenizer(tokenizer_file).sha256


def test_places_that_cannot_be_written_are_rejected_by_export_and_training(tmp_path, counting_store, arriero):
    exported = arriero("data", "export", counting_store.directory, "megatron", "/proc/x")
    in_one_sentence(exported, "cannot write /proc/x (No such file or directory)")
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    trained = arriero("data", "train-tokenizer", "a.jsonl", "-o", "/proc/t2.json", "--vocab-size", 300)
    in_one_sentence(trained, "cannot write /proc/t2.json (No such file or directory)")


def test_an_unwritable_place_is_noticed_before_the_learning(tmp_path):
    def texts():
        raise AssertionError("the text was read")
        yield ""

    for place in (tmp_path, tmp_path / "none" / "t.json"):
        with pytest.raises(UserError, match="cannot write"):
            train_tokenizer(texts(), 300, place)


def only_empty(folder):
    write_jsonl(folder / "a.jsonl", ["", ""])


def empty_parquet(folder):
    with pq.ParquetWriter(folder / "a.parquet", pa.schema({"text": pa.string()})) as writer:
        writer.write_batch(pa.record_batch({"text": pa.array([], pa.string())}))


def all_bad(folder):
    (folder / "a.jsonl").write_text('{"text": 1}\n[]\n')


@pytest.mark.parametrize("write", [only_empty, empty_parquet, all_bad])
def test_no_tokens_at_all_are_no_dataset(tmp_path, tokenizer_file, write):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    asked = PrepareRequest((str(tmp_path / "in"),), tmp_path / "set", tokenizer_file, skip_bad=True)
    with pytest.raises(UserError, match="the sources hold no text"):
        prepare(asked, 1, PrepareWatcher())
    assert not (tmp_path / "set").exists()


def test_no_text_is_nothing_to_learn_from(tmp_path, arriero):
    only_empty(tmp_path)
    done = arriero("data", "train-tokenizer", "a.jsonl", "-o", "t.json", "--vocab-size", 300)
    in_one_sentence(done, "there is no text to train a tokenizer on")
    assert not (tmp_path / "t.json").exists()


def test_end_tokens_spelled_out_late_in_the_corpus_are_counted_and_shown(tmp_path, tokenizer_file, arriero):
    inner = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    inner.add_special_tokens(["<s>"])
    inner.save(str(tmp_path / "t.json"))
    texts = ["word " * 1000] * 300 + [f"late {END}\n"] * 7 + ["<s> begun"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    command = ["data", "prepare", "a.jsonl", "-o", "set", "--tokenizer", "t.json", "--bos", "<s>"]
    done = arriero(*command, "--shard-size", "1MB")
    assert done.returncode == 0, done.stderr
    assert TokenStore.open(tmp_path / "set").about["spelled_out"] == {"bos": 1, "eos": 7}
    assert f"7 documents end with the text {END}" in done.stdout
    assert "1 document begins with the text <s>" in done.stdout


def test_half_of_the_texts_ending_with_the_end_token_are_enough_to_reject(tmp_path, tokenizer_file):
    source = write_jsonl(tmp_path / "a.jsonl", [f"a{END}", "b"])
    with pytest.raises(UserError, match="1 of the first 2 documents end with"):
        prepare(PrepareRequest((str(source),), tmp_path / "set", tokenizer_file), 1, PrepareWatcher())


@pytest.mark.parametrize("content", ['{"settings": {', "{}", "[]", '{"settings": {}, "inputs": [1]}'])
def test_a_damaged_plan_of_an_interrupted_prepare_is_reported(tmp_path, tokenizer_file, content):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "set/.prepare").mkdir(parents=True)
    (tmp_path / "set/.prepare/plan.json").write_text(content)
    with pytest.raises(UserError, match=r"plan\.json is damaged"):
        prepare(
            PrepareRequest((str(tmp_path / "a.txt"),), tmp_path / "set", tokenizer_file), 1, PrepareWatcher()
        )


@pytest.mark.parametrize(
    ("shards", "first", "last"),
    [(1, "00000", "00000"), (100_000, "00000", "99999"), (100_001, "000000", "100000")],
)
def test_shard_names_have_one_width(tmp_path, tokenizer_file, shards, first, last):
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    planned = draft(PrepareRequest((str(source),), tmp_path / "set", tokenizer_file))
    many = replace(planned, shards=planned.shards * shards)
    assert (many.shard_name(0), many.shard_name(shards - 1)) == (first, last)


def test_one_is_written_in_the_singular(tmp_path, tokenizer_file, arriero):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ""}\n{"text": 1}\n')
    command = ["data", "prepare", "a.jsonl", "-o", "set", "--tokenizer", tokenizer_file, "--skip-bad"]
    done = arriero(*command)
    assert done.returncode == 0, done.stderr
    for words in ("1 file,", "1 bad record ", "1 empty one skipped"):
        assert words in done.stdout


def on_a_disk_with(small_disk, kilobytes):
    with (small_disk / "filler").open("wb", buffering=0) as file:
        file.write(bytes(2**20 - 1024 * kilobytes))


@pytest.mark.parametrize(("kilobytes", "workers"), [(16, 1), (150, 1), (150, 2)])
def test_a_disk_that_is_full_or_fills_up_ends_a_prepare_with_one_sentence(
    small_disk, tmp_path, tokenizer_file, kilobytes, workers
):
    source = write_jsonl(tmp_path / "a.jsonl", [f"{i} a b c d e f g " * 40 for i in range(600)])
    on_a_disk_with(small_disk, kilobytes)
    request = PrepareRequest((str(source),), small_disk / "set", tokenizer_file, shard_bytes=50_000)
    complaint = "needs at least" if kilobytes == 16 else "no space left for .*; free some space, then repeat"
    with pytest.raises(UserError, match=complaint):
        prepare(request, workers, PrepareWatcher())
    (small_disk / "filler").unlink()
    if kilobytes == 16:
        assert not (small_disk / "set").exists()
    assert prepare(request, 1, PrepareWatcher()).documents == 600


def test_a_full_disk_ends_training_a_tokenizer_and_an_export_with_one_sentence(
    small_disk, tmp_path, tokenizer_file
):
    source = write_jsonl(tmp_path / "a.jsonl", [f"{i} a b c d e f g " * 40 for i in range(1000)])
    store = prepare(PrepareRequest((str(source),), tmp_path / "set", tokenizer_file), 1, PrepareWatcher())
    on_a_disk_with(small_disk, 8)
    with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
        train_tokenizer(["some text"], 300, small_disk / "tokenizer.json")
    for format in ("fms-arrow", "hf-parquet"):
        with pytest.raises(UserError, match="needs at least"):
            export_dataset(store, format, small_disk / "out")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
