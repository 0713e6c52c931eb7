"""Damaged, foreign or dangerous files are rejected with an error, and no partial output stays behind."""

import json
import os
import pickle
import re
import signal
import zipfile
from dataclasses import replace

import pytest
import torch
from models import BASE, equal, in_memory, spec_of
from torch.distributed.checkpoint.api import CheckpointException

from arriero.checkpoint.convert import convert, open_model
from arriero.errors import UserError
from arriero.model.description import model_at
from arriero.model.spec import ModelSpec

SPEC = spec_of("llama2")


class Bomb:
    def __init__(self, fuse):
        self.fuse = fuse

    def __reduce__(self):
        return os.mkdir, (str(self.fuse),)


def test_a_pickle_with_code_in_it_is_refused_and_not_run(folder):
    convert(in_memory(SPEC), folder / "torch", "torch")
    convert(in_memory(SPEC), folder / "meta", "meta")
    for path in (folder / "torch" / "model.pt", folder / "meta" / "consolidated.00.pth"):
        torch.save({"embedding.weight": Bomb(folder / "boom")}, path)
        with pytest.raises(UserError, match=rf"{re.escape(str(path))} is a pickle with more than tensors"):
            open_model(path.parent)
        path.write_bytes(pickle.dumps(Bomb(folder / "boom")))
        with pytest.raises(UserError, match=r"cannot be read as a file of torch\.save"):
            open_model(path.parent)
    convert(in_memory(SPEC), folder / "dcp", "dcp")
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb(folder / "boom")))
    with pytest.raises(UserError, match=r"\.metadata is not opened: .*mkdir"):
        open_model(folder / "dcp")
    assert not (folder / "boom").exists()
    pickle.loads(pickle.dumps(Bomb(folder / "boom")))
    assert (folder / "boom").exists()


def test_truncated_files_are_named(folder):
    victims = {
        "hf": "model.safetensors",
        "torch": "model.pt",
        "meta": "consolidated.00.pth",
        "dcp": ".metadata",
    }
    for kind, name in victims.items():
        convert(in_memory(SPEC), folder / kind, kind)
        path = folder / kind / name
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(UserError, match=re.escape(str(path))):
            open_model(folder / kind)


def test_a_truncated_shard_of_dcp_is_noticed_while_reading(folder):
    convert(in_memory(SPEC), folder / "dcp", "dcp")
    for path in (folder / "dcp").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    source = open_model(folder / "dcp")
    with pytest.raises(UserError, match=r"dcp: .* cannot be read"):
        convert(source, folder / "out", "hf")
    assert sorted(path.name for path in folder.iterdir()) == ["dcp"]


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf", "meta"])
def test_tensors_that_do_not_fit_are_listed(kind, folder):
    convert(in_memory(SPEC), folder / "out", kind)
    description = {"hf": "config.json", "meta": "params.json"}.get(kind, "model.toml")
    path = folder / "out" / description
    deeper = {
        "hf": ('"num_hidden_layers": 2', '"num_hidden_layers": 3'),
        "meta": ('"n_layers": 2', '"n_layers": 3'),
    }
    path.write_text(path.read_text().replace(*deeper.get(kind, ("layers = 2", "layers = 3"))))
    if kind == "meta":
        (folder / "out" / "model.toml").unlink()
    with pytest.raises(UserError, match=r"9 missing \(.*\.2\..*norm\.weight"):
        open_model(folder / "out")


def test_unexpected_and_misshapen_tensors_are_listed(folder):
    convert(in_memory(SPEC), folder / "out", "torch")
    state = torch.load(folder / "out" / "model.pt")
    torch.save({**state, "extra": torch.ones(1), "norm.weight": torch.ones(3)}, folder / "out" / "model.pt")
    with pytest.raises(
        UserError, match=r"1 unexpected \(extra\); 1 of another shape \(norm\.weight is 3, not 64\)"
    ):
        open_model(folder / "out")


def test_other_dtypes_than_fp32_bf16_and_fp16_are_rejected(folder):
    convert(in_memory(SPEC), folder / "out", "torch")
    state = torch.load(folder / "out" / "model.pt")
    torch.save({**state, "norm.weight": torch.ones(64, dtype=torch.int8)}, folder / "out" / "model.pt")
    with pytest.raises(UserError, match=r"norm\.weight of int8"):
        open_model(folder / "out")


def test_an_unknown_directory_is_rejected_with_the_files_that_were_looked_for(folder):
    with pytest.raises(UserError, match=r"config\.json .* params\.json .* \.metadata .* model\.pt"):
        open_model(folder)
    with pytest.raises(UserError, match="does not exist"):
        open_model(folder / "nowhere")
    (folder / "run" / "model").mkdir(parents=True)
    (folder / "run" / "run.toml").write_text("")
    with pytest.raises(UserError, match=r"is a run, not a model; give .*run/model"):
        open_model(folder / "run")
    convert(in_memory(SPEC), folder / "out", "torch")
    (folder / "out" / "model.toml").unlink()
    with pytest.raises(UserError, match=r"neither model\.toml nor run\.toml"):
        open_model(folder / "out" / "model.pt")


def test_a_destination_that_exists_is_refused_and_left_alone(folder):
    (folder / "there").mkdir()
    with pytest.raises(UserError, match="there exists already"):
        convert(in_memory(SPEC), folder / "there", "hf")
    assert not list((folder / "there").iterdir())
    with pytest.raises(UserError, match="looks like a file"):
        convert(in_memory(SPEC), folder / "model.pt", "torch")


@pytest.mark.parametrize("kind", ["hf", "meta", "dcp", "torch"])
def test_an_interrupted_conversion_leaves_nothing(kind, folder):
    source = in_memory(SPEC)

    def interrupted(name):
        if name == "norm.weight":
            raise KeyboardInterrupt
        return source.load(name)

    with pytest.raises((KeyboardInterrupt, CheckpointException)):
        convert(replace(source, load=interrupted), folder / "out", kind)
    assert not list(folder.iterdir())


def test_a_killed_conversion_leaves_nothing_that_looks_finished(folder, start_arriero, tmp_path):
    convert(in_memory(SPEC), folder / "from", "hf")
    code = (
        "import os, signal, sys; from dataclasses import replace; from pathlib import Path\n"
        "from arriero.checkpoint.convert import convert, open_model\n"
        "source = open_model(Path(sys.argv[1]))\n"
        "die = lambda n: os.kill(os.getpid(), signal.SIGKILL) if 'blocks.1' in n else source.load(n)\n"
        "convert(replace(source, load=die), Path(sys.argv[2]), 'meta')"
    )
    killed = start_arriero(folder / "from", folder / "out", cwd=tmp_path, code=code).wait()
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (folder / "out").exists()
    assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == ["from"]
    convert(open_model(folder / "from"), folder / "out", "meta")
    assert equal(open_model(folder / "out"), in_memory(SPEC))


def test_a_disk_without_room_is_noticed_before_writing(folder, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"total": 1 << 40, "free": 10}))
    with pytest.raises(UserError, match=r"needs .* has 10 B free"):
        convert(in_memory(SPEC), folder / "out", "hf")


def test_torch_files_are_valid_zip_files(folder):
    spec = ModelSpec.from_dict({**BASE, "layers": 1})
    convert(in_memory(spec), folder / "out", "torch")
    assert zipfile.ZipFile(folder / "out" / "model.pt").testzip() is None


@pytest.mark.parametrize("read", [open_model, lambda path: model_at(path, {})])
def test_an_adapter_of_an_adapter_is_refused(read, folder):
    config = {"base_model_name_or_path": str(folder), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="as its base, which is an adapter too"):
        read(folder)


def test_another_layout_of_config_is_refused_by_name(folder):
    convert(in_memory(SPEC), folder / "out", "hf")
    path = folder / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mamba"}))
    with pytest.raises(UserError, match="mamba"):
        open_model(folder / "out")
