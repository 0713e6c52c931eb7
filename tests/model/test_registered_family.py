"""A model family that is defined outside the package trains, resumes and exports like the built-in ones."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import arriero
from arriero.errors import UserError
from arriero.model import family as registry
from arriero.model.family import build_model, families
from arriero.model.llama.family import LLAMA
from arriero.model.llama.hf_names import NAMES
from arriero.model.llama.module import Llama
from arriero.model.presets import resolve

ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}
SMALL = {
    "model.preset": "llama-test",
    "model.family": "gated",
    "model.extra": {"activation": "relu"},
    "model.layers": 2,
    "model.vocab_size": 4096,
    "data.seq_len": 64,
    "train.batch": "512 tok",
    "train.horizon": "4 steps",
    "schedule.warmup": "1 step",
    "eval.heldout": "2k tok",
    "observe.log_every": 1,
    "observe.tensorboard": False,
    "observe.sample": False,
    "run.device": "cpu",
}


class GatedModel(Llama):
    """Llama with another activation and scaled embeddings."""

    def __init__(self, spec):
        super().__init__(spec)
        for block in self.blocks.values():
            block.ffn.activation = ACTIVATIONS[spec.extra["activation"]]()

    def embed(self, tokens_BT, positions):
        return super().embed(tokens_BT, positions) * self.spec.extra["embedding_scale"]


GATED = replace(
    LLAMA,
    name="gated",
    build=GatedModel,
    extra={"activation": "gelu", "embedding_scale": 4.0},
    hf=lambda: replace(NAMES, model_type="gated", fixed={"hidden_act": "relu"}),
    meta=None,
    presets=None,
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(families()))
    arriero.register_model(GATED)
    arriero.register_model(replace(GATED, name="unmapped", hf=None, placements={}))


@pytest.fixture
def config(corpus_cache, tmp_path):
    def made(name, **more):
        changes = {key.replace("__", "."): value for key, value in more.items()}
        own = {"run.name": name, "run.dir": str(tmp_path), "data.cache": str(corpus_cache)}
        return arriero.load_config(None, SMALL | own | changes)

    return made


def losses(tmp_path, name):
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_it_has_the_losses_of_one_process_in_every_layout(config, tmp_path):
    arriero.run(config("one"), nproc=1)
    arriero.run(config("tensor", parallel__tp=2), nproc=2)
    arriero.run(config("pipeline", parallel__pp=2), nproc=2)
    arriero.run(config("plain", model__family="llama", model__extra={}), nproc=1)
    expected = losses(tmp_path, "one")
    assert len(expected) == 4
    assert losses(tmp_path, "plain") != pytest.approx(expected, rel=1e-4)
    for name in ("tensor", "pipeline"):
        assert losses(tmp_path, name) == pytest.approx(expected, rel=1e-5)


def test_it_is_saved_and_resumed_bit_for_bit(config, tmp_path):
    arriero.run(config("straight"), nproc=1)
    steady = {"schedule__horizon": "4 steps"}
    arriero.run(config("resumed", train__horizon="2 steps", **steady), nproc=1)
    arriero.run(config("resumed", **steady), nproc=1)
    assert losses(tmp_path, "resumed") == losses(tmp_path, "straight")


def test_it_is_exported_by_its_name_map_and_read_back(config, tmp_path):
    arriero.run(config("exported"), nproc=1)
    written = json.loads((tmp_path / "exported" / "model" / "config.json").read_text())
    assert written["model_type"] == "gated" and written["hidden_act"] == "relu"
    checkpoint = arriero.load_model(tmp_path / "exported")
    assert type(checkpoint) is GatedModel
    assert checkpoint.spec.extra == {"activation": "relu", "embedding_scale": 4.0}


def test_what_a_family_lacks_is_reported_before_training(config):
    with pytest.raises(UserError, match="family 'unmapped' has no Hugging Face name map"):
        arriero.run(config("lacking", model__family="unmapped"), nproc=1)
    with pytest.raises(UserError, match="family 'unmapped' has no tensor-parallel placements"):
        arriero.run(config("split", model__family="unmapped", parallel__tp=2), nproc=2)
    result = arriero.run(config("alone", model__family="unmapped", checkpoint__export=False), nproc=1)
    assert result is not None


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (
            {"activaton": "relu"},
            "extra.activaton is not a field of .* .did you mean activation",
        ),
        ({"embedding_scale": "wide"}, "extra.embedding_scale must be of type float"),
    ],
)
def test_its_own_fields_are_checked(extra, problem):
    with pytest.raises(UserError, match=problem):
        resolve("llama-test", {"family": "gated", "extra": extra})


def test_a_family_of_the_same_name_is_refused():
    with pytest.raises(ValueError, match="already a model family named 'llama'"):
        arriero.register_model(replace(GATED, name="llama"))


def test_defaults_of_its_own_fields_are_filled_in():
    spec = resolve("llama-test", {"family": "gated"})
    assert spec.extra == {"activation": "gelu", "embedding_scale": 4.0}
    with torch.device("meta"):
        model = build_model(spec)
    assert isinstance(model.blocks["0"].ffn.activation, nn.GELU)
