"""Downloads through the real `datasets` and `huggingface_hub`, from a local server of the hub's API."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hub_server import hub_of
from safetensors.torch import load_file

from arriero.checkpoint.convert import convert
from arriero.checkpoint.formats.model_reader import ModelReader
from arriero.data.store.store import TokenStore
from arriero.model.family import build_model
from arriero.model.name_maps import own_tensors
from arriero.model.spec import ModelSpec

MODEL = {"vocab_size": 400, "dim": 32, "layers": 1, "heads": 4, "ffn": 48, "max_seq_len": 1024}
TEXTS = [f"document {i}" for i in range(7)]


def put(path, write):
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)


def parquet(path):
    pq.write_table(pa.table({"text": TEXTS}), path)


def packed(path):
    path.write_bytes(gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode()))


@pytest.fixture(scope="module")
def hub(tmp_path_factory, tokenizer_file):
    folder = tmp_path_factory.mktemp("hub")
    sets = folder / "datasets"
    put(sets / "owner" / "set" / "main" / "data" / "train-00000-of-00001.parquet", parquet)
    books = sets / "bookcorpus" / "bookcorpus" / "refs%2Fconvert%2Fparquet"
    put(books / "plain_text" / "train" / "0000.parquet", parquet)
    italian = sets / "gsarti" / "clean_mc4_it" / "main"
    put(italian / "clean_mc4_it.py", lambda path: path.write_text("raise SystemExit('a script was run')"))
    put(italian / "clean-mc4-it" / "c4-it.tfrecord-00000-of-01024.json.gz", packed)
    put(italian / "clean-mc4-it" / "c4-it-validation.tfrecord-00000-of-00008.json.gz", packed)
    model = folder / "models" / "owner" / "model" / "main"
    put(model / "tokenizer.json", lambda path: path.write_bytes(tokenizer_file.read_bytes()))
    for name in ("pytorch_model.bin", "consolidated.safetensors"):
        put(model / name, lambda path: path.write_bytes(b"not fetched"))
    spec = ModelSpec.from_dict(MODEL)
    state = build_model(spec).state_dict()
    convert(
        ModelReader("memory", "memory", spec, own_tensors(spec), state.__getitem__, {}), folder / "made", "hf"
    )
    for path in (folder / "made").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    pickled, config = model.parents[1] / "pickled" / "main", folder / "made" / "config.json"
    put(pickled / "config.json", lambda path: path.write_bytes(config.read_bytes()))
    torch.save(load_file(folder / "made" / "model.safetensors"), pickled / "pytorch_model.bin")
    mistral = replace(spec, family="mistral")
    source = ModelReader("memory", "memory", mistral, own_tensors(mistral), state.__getitem__, {})
    convert(source, folder / "mistrals", "meta")
    for name in ("params.json", "consolidated.safetensors"):
        content = (folder / "mistrals" / name).read_bytes()
        put(
            pickled.parents[1] / "mistrals" / "main" / name,
            lambda path, content=content: path.write_bytes(content),
        )
    with hub_of(folder) as environment:
        yield environment


@pytest.fixture
def arriero_of(start_arriero, hub, tmp_path):
    # huggingface_hub reads its environment when it is imported, which the started process does itself
    return lambda *arguments: start_arriero(*arguments, cwd=tmp_path, **hub).wait()


def test_corpora_and_a_tokenizer_of_the_hub_are_downloaded_and_prepared(arriero_of, hub, tmp_path):
    sources = ["hf://owner/set", "hf://bookcorpus", "hf://clean-mc4-it"]
    done = arriero_of("data", "prepare", *sources, "--tokenizer", "hf://owner/model", "-o", "set")
    assert done.returncode == 0, done.stderr
    store = TokenStore.open(tmp_path / "set")
    assert [each["documents"] for each in store.about["per_source"]] == [len(TEXTS)] * 3
    fetched = {path.name for path in Path(hub["HF_HOME"]).rglob("*")}
    assert "tokenizer.json" in fetched
    assert not {"pytorch_model.bin", "model.safetensors"} & fetched


def test_a_name_the_hub_does_not_know_is_rejected_in_a_sentence(arriero_of):
    done = arriero_of(
        "data", "prepare", "builtin:synthetic:1MB", "--tokenizer", "hf://owner/absent", "-o", "set"
    )
    assert done.returncode == 2
    assert "cannot load hf://owner/absent" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_of_the_hub_is_converted_and_gives_a_run_its_dimensions(arriero_of, hub, tmp_path):
    done = arriero_of("ckpt", "convert", "hf://owner/model", tmp_path / "torch", "--to", "torch")
    assert done.returncode == 0, done.stderr
    assert not list(Path(hub["HF_HOME"]).rglob("consolidated.safetensors"))
    shown = arriero_of("config", "show", "--set", "checkpoint.start_from=hf://owner/model")
    assert shown.returncode == 0, shown.stderr
    assert f"dim = {MODEL['dim']}" in shown.stdout and "checkpoint.start_from" in shown.stdout


@pytest.mark.parametrize("other", ["pickled", "mistrals"])
def test_a_model_without_model_safetensors_is_downloaded_in_its_other_form(other, arriero_of, tmp_path):
    for name in ("model", other):
        done = arriero_of("ckpt", "convert", f"hf://owner/{name}", tmp_path / name, "--to", "torch")
        assert done.returncode == 0, done.stderr
    expected, found = (torch.load(tmp_path / name / "model.pt") for name in ("model", other))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
