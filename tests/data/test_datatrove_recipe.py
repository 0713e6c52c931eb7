"""The curation recipe as a user runs it: a process of its own, on files, without a network."""

import gzip
import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from peer_python import ask_peer, peer_python

RECIPE = Path(__file__).parents[2] / "recipes" / "datatrove" / "curate.py"
NOUNS = """river mountain farmer market village teacher engine bridge winter garden library letter harbour
doctor island forest window kitchen mirror station"""
VERBS = """carried crossed followed painted repaired remembered described visited measured collected watched
opened"""
KINDS = "old quiet narrow bright heavy distant careful green broken wooden early patient"
ITALIAN = "il di che con una fiume montagna contadino mercato vecchio portava villaggio maestro la e"

TRAIN_LANGUAGE_MODEL = """
import sys, fasttext
model = fasttext.train_supervised(
    sys.argv[1], dim=8, epoch=25, lr=0.5, minn=2, maxn=3, bucket=2000, thread=1, verbose=0
)
model.save_model(sys.argv[2])
print("null")
"""


def sentence(choose: random.Random) -> str:
    noun, kind, verb = (lambda words=words: choose.choice(words.split()) for words in (NOUNS, KINDS, VERBS))
    first = f"The {kind()} {noun()} {verb()} a {kind()} {noun()}"
    return f"{first} and the {noun()} of that {noun()} {verb()} with {kind()} {noun()}s."


def article(choose: random.Random) -> str:
    return "\n".join(" ".join(sentence(choose) for _ in range(3)) for _ in range(9))


def italian(choose: random.Random) -> str:
    return "\n".join(" ".join(choose.choices(ITALIAN.split(), k=30)).capitalize() + "." for _ in range(12))


def write_corpus(folder: Path) -> dict[str, str]:
    """Names tell what should become of each document."""
    choose = random.Random(1)
    texts = {f"good{i}": article(choose) for i in range(10)}
    texts |= {f"exact{i}": texts[f"good{i}"] for i in range(2)}
    texts |= {f"near{i}": texts[f"good{i}"].replace("village", "hamlet", 1) for i in (2, 3)}
    texts |= {"short": "Too short.", "spam": "buy now " * 200}
    texts |= {"lorem": article(choose) + "\nlorem ipsum dolor sit amet."}
    texts |= {"italian": italian(choose)}
    folder.mkdir()
    rows = [json.dumps({"body": text, "id": name}) for name, text in texts.items()]
    with gzip.open(folder / "0.jsonl.gz", "wt") as file:
        file.writelines(row + "\n" for row in rows[::3])
    (folder / "1.jsonl").write_text("".join(row + "\n" for row in rows[1::3]))
    columns = {"body": list(texts.values())[2::3], "id": list(texts)[2::3]}
    pq.write_table(pa.table(columns), folder / "2.parquet")
    return texts


STAND_IN = """
import sys, types
for name in ("datatrove", "datatrove.pipeline", "datatrove.pipeline.readers"):
    sys.modules[name] = types.ModuleType(name)
readers = sys.modules["datatrove.pipeline.readers"]
for name in ("JsonlReader", "ParquetReader"):
    setattr(readers, name, lambda folder, text_key, glob_pattern, name=name: (name, glob_pattern))
sys.path.insert(0, sys.argv[1])
import json, pathlib, curate
print(json.dumps(curate.readers(pathlib.Path(sys.argv[2]), "text")))
"""


def test_every_kind_of_file_that_is_there_gets_a_reader(tmp_path):
    """With datatrove's readers replaced, because it is installed in a separate environment."""
    write_corpus(tmp_path / "raw")
    (tmp_path / "raw" / "3.jsonl.tmp").write_text("unfinished")
    done = subprocess.run(
        [sys.executable, "-c", STAND_IN, str(RECIPE.parent), str(tmp_path / "raw")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["ParquetReader", "**/*.parquet"],
        ["JsonlReader", "**/*.jsonl"],
        ["JsonlReader", "**/*.jsonl.gz"],
    ]


def curate(python: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, str(RECIPE), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def documents(folder: Path) -> list[dict]:
    lines = []
    for path in sorted(folder.rglob("*.gz")):
        lines += gzip.decompress(path.read_bytes()).decode().splitlines()
    return [json.loads(line) for line in lines]


def names(folder: Path) -> set[str]:
    return {document["id"] for document in documents(folder)}


def test_filters_and_minhash_leave_each_good_document_once(tmp_path):
    python = peer_python("datatrove", "xxhash", "spacy", "orjson", "fasttext", "fasteners")
    texts = write_corpus(tmp_path / "raw")
    choose = random.Random(2)
    with (tmp_path / "lid.txt").open("w") as examples:
        for _ in range(300):
            examples.write(f"__label__en {sentence(choose)} {sentence(choose)}\n")
            examples.write(f"__label__it {' '.join(choose.choices(ITALIAN.split(), k=20))}\n")
    ask_peer(python, TRAIN_LANGUAGE_MODEL, tmp_path / "lid.txt", tmp_path / "lid.bin")
    command = [tmp_path / "raw", tmp_path / "out", "--text-key", "body", "--tasks", 2, "--buckets", 5]
    result = curate(python, *command, "--language-model", tmp_path / "lid.bin")
    assert result.returncode == 0, result.stderr
    curated, removed = names(tmp_path / "out" / "curated"), tmp_path / "out" / "removed"
    assert "italian" in names(removed / "language")
    assert {"short", "spam", "lorem", "italian"}.isdisjoint(curated)
    assert names(removed / "c4") == {"lorem"}
    assert len(curated) == 10
    kept = {name.removeprefix("exact").removeprefix("near").removeprefix("good") for name in curated}
    assert kept == {str(i) for i in range(10)}
    for document in documents(tmp_path / "out" / "curated"):
        assert document["text"] == texts[document["id"]]


def test_when_nothing_passes_the_filters_the_recipe_says_so(tmp_path):
    python = peer_python("datatrove", "xxhash", "spacy", "orjson")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "0.jsonl").write_text(json.dumps({"text": "buy now " * 200, "id": "spam"}))
    result = curate(python, tmp_path / "raw", tmp_path / "out")
    assert result.returncode == 1
    assert "error: no document passed the filters" in result.stderr
    assert names(tmp_path / "out" / "removed") == {"spam"}


def test_a_language_model_that_is_not_there_is_named(tmp_path):
    python = peer_python("datatrove", "xxhash", "spacy", "orjson", "fasttext")
    write_corpus(tmp_path / "raw")
    result = curate(python, tmp_path / "raw", tmp_path / "out", "--language-model", tmp_path / "no.bin")
    assert result.returncode == 1
    assert "no.bin does not exist" in result.stderr
    assert not (tmp_path / "out").exists()


def test_without_datatrove_the_recipe_says_what_to_install(tmp_path):
    if find_spec("datatrove"):
        pytest.skip("datatrove is installed beside the tests")
    (tmp_path / "raw").mkdir()
    result = curate(sys.executable, tmp_path / "raw", tmp_path / "out")
    assert result.returncode == 1
    assert "not installed: datatrove" in result.stderr
    assert "pip install -r recipes/datatrove/requirements.txt" in result.stderr
