"""Check that a damaged file ends every verb with exit code 0, 1 or 2, never with a traceback or a hang."""

import copy
import json
import os
import random
import shutil
import tomllib

import pytest
from typer.testing import CliRunner

from arriero.checkpoint.formats.dcp_directory import SafeDcpReader
from arriero.cli import app
from arriero.config.fields import toml_value
from arriero.data.order.ledger import read_ledger
from arriero.data.store.manifest import manifest_text
from arriero.data.store.store import TokenStore
from arriero.errors import UserError
from arriero.model.spec import ModelSpec
from checkpoint.running import Runs

pytestmark = pytest.mark.slow
ABSURD = (None, -1, 10**30, "x", [], {}, 1.5, True)
TRIED = 8


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a dataset, a run trained on it, and its model as Hugging Face and Meta directories."""
    folder = tmp_path_factory.mktemp("made")
    for i in range(20):
        text = "".join(f"document {i} line {j} of {i * j}\n" for j in range(80))
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{i}.txt").write_text(text)
    tokenizer, dataset = folder / "tokenizer.json", folder / "dataset"
    invoke("data", "train-tokenizer", folder / "text", "--output", tokenizer, "--vocab-size", 300)
    invoke("data", "prepare", folder / "text", "--output", dataset, "--tokenizer", tokenizer)
    sets = (f"data.sources='{dataset}'", "model.vocab_size=300", "train.horizon=2 steps")
    Runs(folder, folder / "cache").train("run", *sets, "checkpoint.every=2 steps")
    newest = folder / "run" / "checkpoints" / "step-00000002"
    shutil.copytree(newest, folder / "checkpoint")
    for kind in ("hf", "meta"):
        assert (
            invoke("ckpt", "convert", newest, folder / kind, "--to", kind, "--shard-size", "100KB").exit_code
            == 0
        )
    (folder / "meta" / "model.toml").unlink()
    return folder


def positions(value, path=()):
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(parts)[:40]:
        yield from positions(part, (*path, key))


def replaced(document, path, value):
    if not path:
        return value
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return document


def as_toml(document):
    if not isinstance(document, dict):
        return b"x = 1"
    lines = (f"{key} = {toml_value(value)}" for key, value in document.items() if value is not None)
    return "\n".join(lines).encode()


def as_json(document):
    return json.dumps(document).encode()


def damaged(raw, is_toml):
    """Yield the file with a fixed sample of values replaced, then truncated, emptied and overwritten."""
    document = tomllib.loads(raw.decode()) if is_toml else json.loads(raw)
    # TOML has no null
    absurd = [value for value in ABSURD if not (is_toml and value is None)]
    cases = [(path, value) for path in positions(document) for value in absurd]
    for path, value in random.Random(1).sample(cases, min(TRIED, len(cases))):
        yield f"{path} = {value!r}", (as_toml if is_toml else as_json)(replaced(document, path, value))
    for end in (0, 1, len(raw) // 2, len(raw) - 3):
        yield f"the first {end} bytes", raw[:end]
    yield "bytes that are not text", b"\xff\xfe\x00" * 50
    yield "brackets without end", b"[" * 100_000


VERBS = {
    "run/ledger.json": lambda at: [("data", "audit", at), ("data", "show", at), ("report", at)],
    "run/plan.json": lambda at: [("report", at)],
    "run/run.toml": lambda at: [("data", "audit", at), ("config", "show", at / "run.toml")],
    "dataset/manifest.json": lambda at: [("data", "inspect", at), ("data", "verify", at)],
    "checkpoint/tokenizer.json": lambda at: [("ckpt", "convert", at, at / "out", "--to", "hf")],
    "checkpoint/manifest.json": lambda at: [("ckpt", "verify", at), ("ckpt", "inspect", at)],
    "hf/config.json": lambda at: [("ckpt", "convert", at, at / "out", "--to", "torch")],
    "hf/model.safetensors.index.json": lambda at: [("ckpt", "convert", at, at / "out", "--to", "torch")],
    "meta/params.json": lambda at: [("ckpt", "convert", at, at / "out", "--to", "torch")],
}


@pytest.mark.parametrize("file", VERBS)
def test_a_damaged_file_never_ends_in_a_traceback(file, made, tmp_path):
    folder, name = file.split("/")
    at = tmp_path / folder
    shutil.copytree(made / folder, at)
    for what, content in damaged((made / file).read_bytes(), name.endswith(".toml")):
        (at / name).write_bytes(content)
        for arguments in VERBS[file](at):
            shutil.rmtree(at / "out", ignore_errors=True)
            error = invoke(*arguments).exception
            clean = isinstance(error, UserError | None) or (
                isinstance(error, SystemExit) and error.code in (0, 1, 2)
            )
            assert clean, f"{file} with {what}: {arguments[:2]} raised {error!r}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("order",), None),
        (("order", "order"), "x"),
        (("order", "weights"), []),
        (("order", "sources"), [{}]),
        (("batch_sequences",), [4]),
        (("stretches", 0, "end"), 10**30),
        (("stretches", 0, "first"), -1),
    ],
)
def test_a_ledger_with_wrong_types_is_rejected(key, value, made, tmp_path):
    document = json.loads((made / "run" / "ledger.json").read_bytes())
    (tmp_path / "ledger.json").write_bytes(as_json(replaced(document, key, value)))
    with pytest.raises(UserError, match=r"ledger\.json is damaged \("):
        read_ledger(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        (("about",), "x", "about"),
        (("about", "separators"), {}, "about.separators.bos"),
        (("eos_id",), 300, "below vocab_size, 300"),
        (("eos_id",), -1, "eos_id"),
        (("vocab_size",), 1.5, "vocab_size"),
        (("dtype",), [], "dtype"),
        (("tokenizer",), "tokenizer.json", "tokenizer"),
        (("shards", "name"), [1], "names of 'shards'"),
        (("shards", "name"), [], "differ in length"),
        (("shards", "name"), ["\0"], "names of 'shards'"),
        (("shards", "tokens"), [10**18 * 9], "impossible count"),
    ],
)
def test_a_dataset_manifest_with_wrong_types_names_the_key(key, value, named, made, tmp_path):
    document = json.loads((made / "dataset" / "manifest.json").read_bytes())
    (tmp_path / "manifest.json").write_bytes(as_json(replaced(document, key, value)))
    with pytest.raises(UserError, match=r"manifest\.json is damaged") as refused:
        TokenStore.open(tmp_path)
    assert named in str(refused.value)
    # the layout that arriero writes is parsed by other code than plain JSON
    (tmp_path / "manifest.json").write_bytes(manifest_text(replaced(document, key, value)))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        TokenStore.open(tmp_path)


def test_absurd_dimensions_are_rejected():
    fields = {"vocab_size": 96, "dim": 64, "layers": 2, "heads": 8, "ffn": 176, "max_seq_len": 4096}
    for name in fields:
        with pytest.raises(UserError, match=f"{name} must be at most"):
            ModelSpec.from_dict(fields | {name: 10**30})
    with pytest.raises(UserError, match="rope_theta must be finite"):
        ModelSpec.from_dict(fields | {"rope_theta": 10**400})


def test_a_damaged_tokenizer_is_rejected_before_weights_are_written(made, tmp_path):
    source = shutil.copytree(made / "checkpoint", tmp_path / "source")
    (source / "tokenizer.json").write_text('{"model": 1}')
    refused = invoke("ckpt", "convert", source, tmp_path / "out", "--to", "hf").exception
    assert isinstance(refused, UserError)
    assert str(source / "tokenizer.json") in refused.what
    assert not (tmp_path / "out").exists()


def test_a_symlink_loop_among_sources_is_reported_as_a_broken_link(made, tmp_path):
    source = shutil.copytree(made / "text", tmp_path / "text")
    (source / "up").symlink_to(source)
    (source / "loop.txt").symlink_to("loop.txt")
    tail = ("--output", tmp_path / "out", "--tokenizer", made / "tokenizer.json")
    for named in (source, source / "loop.txt", source / "*.txt"):
        refused = invoke("data", "prepare", named, *tail).exception
        assert isinstance(refused, UserError)
        assert "loop.txt is a broken link" in refused.what
    assert invoke("data", "prepare", source, *tail, "--skip-bad").exit_code == 0
    assert TokenStore.open(tmp_path / "out").documents == 20


def test_a_read_error_of_a_checkpoint_index_is_not_reported_as_damage(tmp_path):
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(UserError, match=rf"cannot be read \({os.strerror(21)}\)"):
        SafeDcpReader(tmp_path).read_metadata()
