"""Which files are read and as what, how many records may be bad, and where the output may lie."""

import json
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from arriero.data.prepare import prepare as preparing
from arriero.data.prepare.builtin import dataset_of
from arriero.data.prepare.planning import PrepareRequest, begin_or_resume
from arriero.data.prepare.prepare import PrepareWatcher, prepare
from arriero.data.store.store import TokenStore
from arriero.data.text import readers
from arriero.data.text.readers import BadRecords, read_text_range
from arriero.data.text.sources import Select, TextSources, find_inputs
from arriero.errors import UserError


def write_jsonl(path, texts, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


def prepared(sources, directory, tokenizer_file, **more):
    request = PrepareRequest(tuple(map(str, sources)), directory, tokenizer_file, **more)
    return prepare(request, 1, PrepareWatcher())


def names(folder, **select):
    return [
        each.path.rpartition("/")[2] for each in TextSources((str(folder),), select=Select(**select)).find()
    ]


def test_the_work_for_bad_lines_grows_with_their_number_and_not_its_square(tmp_path, monkeypatch):
    """Only the examples look back at the lines before them."""
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n' * 20_000)
    inputs = find_inputs([str(tmp_path / "a.jsonl")])
    looked_back = []
    line_problem = readers._line_problem
    monkeypatch.setattr(
        readers, "_line_problem", lambda *about: looked_back.append(about) or line_problem(*about)
    )
    bad, lengths = BadRecords(skip=True), []
    monkeypatch.setattr(readers, "sum", lambda of: lengths.append(1) or sum(of), raising=False)
    list(read_text_range(inputs, 0, inputs[0].size, "text", bad))
    assert bad.count == 20_000
    assert len(looked_back) == readers.EXAMPLES
    assert len(lengths) <= 2 * readers.EXAMPLES


def test_bad_records_are_counted_by_source(tmp_path, tokenizer_file):
    a = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three", 4])
    b = write_jsonl(tmp_path / "b" / "b.jsonl", ["x", "y"])
    store = prepared([a, b.parent], tmp_path / "set", tokenizer_file, skip_bad=True)
    counts = [(each["source"], each["documents"], each["skipped"]) for each in store.about["per_source"]]
    assert counts == [(str(a), 3, 1), (str(b.parent), 2, 0)]
    assert "line 4" in store.about["per_source"][0]["skipped_examples"][0]


def test_a_source_of_which_nearly_all_is_bad_fails_by_name(tmp_path, tokenizer_file, arriero):
    write_jsonl(tmp_path / "good.jsonl", ["text"] * 20)
    write_jsonl(tmp_path / "wrong.jsonl", [*range(15), "kept"])
    command = ["data", "prepare", "good.jsonl", "wrong.jsonl", "-o", "set", "--tokenizer", tokenizer_file]
    failed = arriero(*command, "--skip-bad")
    assert failed.returncode == 2, failed.stdout
    assert "wrong.jsonl: 15 of 16 records cannot be used, and --max-bad allows 50%" in failed.stderr
    assert not (tmp_path / "set" / "manifest.json").exists()
    done = arriero(*command, "--max-bad", "95%")
    assert done.returncode == 0, done.stderr
    assert "15 bad records of 16 in wrong.jsonl" in done.stdout


@pytest.mark.parametrize(("limit", "passes"), [("2", True), ("1", False), ("20%", True), ("19.9%", False)])
def test_the_limit_on_bad_records_is_a_number_or_a_percentage(tmp_path, tokenizer_file, limit, passes):
    source = write_jsonl(tmp_path / "a.jsonl", ["a", 1, "b", 2, *"cdefgh"])
    if passes:
        store = prepared([source], tmp_path / "set", tokenizer_file, skip_bad=True, max_bad=limit)
        assert store.about["skipped_records"] == 2
        return
    with pytest.raises(UserError, match=rf"a\.jsonl: 2 of 10 records .* --max-bad allows {limit}"):
        prepared([source], tmp_path / "set", tokenizer_file, skip_bad=True, max_bad=limit)


def test_a_source_without_a_usable_record_is_rejected_before_the_work(tmp_path, tokenizer_file):
    write_jsonl(tmp_path / "good.jsonl", ["text"])
    write_jsonl(tmp_path / "wrong.jsonl", ["x"] * 2000, column="body")
    with pytest.raises(UserError, match=r"wrong\.jsonl: .* no column 'text'"):
        prepared(sorted(tmp_path.glob("*.jsonl")), tmp_path / "set", tokenizer_file, skip_bad=True)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("limit", ["x", "-1", "101%", "nan", "inf", ""])
def test_an_invalid_limit_is_rejected(limit):
    with pytest.raises(UserError, match=f"--max-bad {limit} is not a limit"):
        readers.BadLimit.parse(limit)


def test_each_source_may_have_its_own_column(tmp_path, tokenizer_file, monkeypatch, arriero):
    write_jsonl(tmp_path / "corpus" / "a" / "1.jsonl", ["a"] * 3)
    write_jsonl(tmp_path / "corpus" / "b" / "1.jsonl", ["b"] * 4, column="content")
    command = ["data", "prepare", "corpus/a", "corpus/b/", "-o", "set", "--tokenizer", tokenizer_file]
    done = arriero(*command, "--column", "text", "--column", "corpus/b=content")
    assert done.returncode == 0, done.stderr
    assert TokenStore.open(tmp_path / "set").documents == 7
    monkeypatch.chdir(tmp_path)
    for number, source in enumerate(("corpus", "corpus/*/*.jsonl")):
        by_source = (("corpus/b", "content"),)
        assert prepared([source], tmp_path / str(number), tokenizer_file, columns=by_source).documents == 7
    with pytest.raises(UserError, match="--column corpus/c=content matches no input"):
        prepared(["corpus"], tmp_path / "x", tokenizer_file, columns=(("corpus/c", "content"),))


def test_a_folder_that_mixes_records_and_other_files_asks_for_a_choice(tmp_path, tokenizer_file, arriero):
    write_jsonl(tmp_path / "corpus" / "a.jsonl", ["one", "two"])
    (tmp_path / "corpus" / "README.md").write_text("about the corpus")
    with pytest.raises(UserError, match=r"mixes record files \(a\.jsonl\) with other files \(README\.md\)"):
        prepared([tmp_path / "corpus"], tmp_path / "set", tokenizer_file)
    assert not (tmp_path / "set").exists()
    assert names(tmp_path / "corpus", include=("*.jsonl",)) == ["a.jsonl"]
    assert names(tmp_path / "corpus", exclude=("*.md",)) == ["a.jsonl"]
    everything = prepared(
        [tmp_path / "corpus"], tmp_path / "text", tokenizer_file, select=Select(read_as="text")
    )
    assert everything.documents == 2
    command = ["data", "prepare", "corpus", "--tokenizer", tokenizer_file, "-o", "set", "--as", "mixed"]
    done = arriero(*command)
    assert done.returncode == 0, done.stderr
    assert TokenStore.open(tmp_path / "set").documents == 3
    assert "text: one document per file (1 .md)" in done.stdout
    assert "JSON lines: one document per line, column 'text'" in done.stdout


@pytest.mark.parametrize(
    "name", ["a.csv", "a.jsonl.tmp", "a.jsonl.gz.part", "a.parquet.crc", "A.TSV", "a.txt~"]
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_suffix_that_does_not_say_how_to_read_the_file_asks_for_a_choice(tmp_path, name, whole):
    (tmp_path / name).write_text("a,b\n")
    with pytest.raises(UserError, match=rf"the suffix does not say how to read {name}"):
        names(tmp_path if whole else tmp_path / name)
    assert names(tmp_path, read_as="mixed") == [name]


def test_a_folder_of_source_code_needs_no_option(tmp_path, tokenizer_file):
    for name in ("README.md", "src/a.py", "src/b.c", "Makefile", "docs/index.rst", "data.txt"):
        (tmp_path / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / name).write_text(f"text of {name}")
    store = prepared([tmp_path / "repo"], tmp_path / "set", tokenizer_file)
    assert store.documents == 6


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\x00\x00", b"caf\xe9 " * 50, "wide".encode("utf-16")])
def test_files_that_are_not_text_are_rejected_by_name_before_the_work(tmp_path, tokenizer_file, content):
    (tmp_path / "in").mkdir()
    for i in range(40):
        (tmp_path / "in" / f"{i:02d}.py").write_text(f"x = {i}  # é" * 9000)
    (tmp_path / "in" / "logo.png").write_bytes(content)
    with pytest.raises(UserError, match=r"not UTF-8 text: logo\.png"):
        prepared([tmp_path / "in"], tmp_path / "set", tokenizer_file)
    assert not (tmp_path / "set").exists()
    store = prepared([tmp_path / "in"], tmp_path / "set", tokenizer_file, skip_bad=True)
    assert (store.documents, store.about["skipped_records"]) == (40, 1)


def test_include_and_exclude_match_names_and_paths(tmp_path):
    for name in ("a.py", "sub/b.py", "sub/c.md", "sub/deep/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert names(tmp_path, include=("*.py",)) == ["a.py", "b.py", "d.py"]
    assert names(tmp_path, include=("sub/*",), exclude=("*.md",)) == ["b.py", "d.py"]
    assert names(tmp_path / "*", include=("*.md",)) == ["c.md"]
    with pytest.raises(UserError, match=r"no file in .* matches --include"):
        names(tmp_path, include=("*.jsonl",))


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("in", "in/out"),
        ("in", "in"),
        ("in", "in/.hidden/out"),
        (".", "out"),
        ("in/**", "in/out"),
        ("in/*", "in/out"),
        ("in/*/*.jsonl", "in/out"),
        ("link", "in/out"),
    ],
)
def test_an_output_inside_a_source_is_always_rejected(tmp_path, tokenizer_file, monkeypatch, source, output):
    write_jsonl(tmp_path / "in" / "sub" / "a.jsonl", ["text"])
    (tmp_path / "link").symlink_to("in")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match=r"the output .* lies in the source"):
            prepared([source], tmp_path / output, tokenizer_file)
        (tmp_path / output).mkdir(parents=True, exist_ok=True)


def test_an_output_beside_the_files_a_pattern_names_is_accepted(tmp_path, tokenizer_file):
    write_jsonl(tmp_path / "a.jsonl", ["text"])
    for _ in range(2):
        assert prepared([tmp_path / "*.jsonl"], tmp_path / "out", tokenizer_file).documents == 1


def test_prepares_at_once_into_one_directory_finish_or_are_rejected(tmp_path, tokenizer_file):
    source = write_jsonl(tmp_path / "a.jsonl", ["text"] * 5)
    start = threading.Barrier(6)

    def one(_, directory):
        start.wait()
        try:
            return prepared([source], directory, tokenizer_file).documents
        except UserError as error:
            return str(error)

    for number in range(12):
        directory = tmp_path / "sets" / str(number)
        with ThreadPoolExecutor(6) as pool:
            outcomes = list(pool.map(one, range(6), [directory] * 6))
        assert 5 in outcomes
        assert all(each == 5 or "is in use by process" in each for each in outcomes), outcomes
        assert sorted(path.name for path in directory.parent.iterdir()) == sorted(map(str, range(number + 1)))
        assert not (directory / ".prepare").exists()


def test_leftovers_of_killed_prepares_are_removed_by_the_next(tmp_path, tokenizer_file, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", ["text " * 50] * 100)
    seen = []

    def look(preparation, *_):
        seen.append(sorted(path.name for path in preparation.work.iterdir() if path.is_dir()))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing, "make_shard", look)
        prepared([source], tmp_path / "set", tokenizer_file, shard_bytes=5000)
    for name in ("00001.making", "00003.making"):
        (tmp_path / "set" / ".prepare" / name).mkdir()
        (tmp_path / "set" / ".prepare" / name / "unshuffled").write_bytes(bytes(1000))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing, "make_shard", look)
        prepared([source], tmp_path / "set", tokenizer_file, shard_bytes=5000)
    assert seen == [[], []]


def test_workers_that_have_no_shard_to_make_are_reported(tmp_path, tokenizer_file, arriero):
    write_jsonl(tmp_path / "a.jsonl", ["text " * 1000] * 1000)
    done = arriero("data", "prepare", "a.jsonl", "-o", "set", "--tokenizer", tokenizer_file, "--workers", 4)
    assert done.returncode == 0, done.stderr
    assert "1 of 4 used" in done.stdout
    assert "--shard-size 1MB in a new directory gives work to all" in done.stdout


def test_a_negative_seed_and_an_endless_vocabulary_are_rejected(tmp_path, tokenizer_file, arriero):
    write_jsonl(tmp_path / "a.jsonl", ["text"])
    for command in (
        ["prepare", "a.jsonl", "-o", "set", "--tokenizer", tokenizer_file, "--seed", -1],
        ["train-tokenizer", "a.jsonl", "-o", "t.json", "--vocab-size", 10**12],
    ):
        done = arriero("data", *command)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr


def test_named_files_that_the_patterns_exclude_are_listed(tmp_path, tokenizer_file, command):
    for name in ("a.jsonl", "b.json", "c.json"):
        write_jsonl(tmp_path / name, ["text"])
    done = command(
        *("data", "prepare", "a.jsonl", "b.json", "c.json", "--include", "*.jsonl"),
        *("-o", "set", "--tokenizer", tokenizer_file),
    )
    assert done.returncode == 0, done.stderr
    assert "2 named files" in done.stdout
    assert "by your patterns: b.json, c.json" in done.stdout


def test_a_cache_inside_a_source_is_named(tmp_path, tokenizer_file):
    write_jsonl(tmp_path / "in" / "a.jsonl", ["text"])
    with pytest.raises(UserError, match=r"data\.cache .*in/cache lies in the source .*set data\.cache"):
        dataset_of(str(tmp_path / "in"), str(tokenizer_file), None, tmp_path / "in" / "cache")


def test_an_unfinished_dataset_is_answered_with_the_command_that_finishes_it(
    tmp_path, tokenizer_file, command
):
    source = write_jsonl(tmp_path / "my text" / "a.jsonl", ["text"])
    begin_or_resume(PrepareRequest((str(source),), tmp_path / "set", tokenizer_file))
    with pytest.raises(UserError, match="set is not finished") as caught:
        dataset_of(str(tmp_path / "set"), None, None, tmp_path / "cache")
    with pytest.raises(UserError, match="set is not finished"):
        TokenStore.open(tmp_path / "set")
    words = shlex.split(caught.value.todo.removeprefix("resume it with "))
    assert words[:3] == ["arriero", "data", "prepare"]
    assert command(*words[1:]).returncode == 0
    assert dataset_of(str(tmp_path / "set"), None, None, tmp_path / "cache") == tmp_path / "set"
