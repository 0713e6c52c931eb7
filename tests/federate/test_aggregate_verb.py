"""`arriero fed aggregate` on models of any format and on members."""

import json

import pytest
import torch

from arriero.checkpoint.convert import convert, open_model
from arriero.checkpoint.formats.model_reader import Adapter, WriteOptions
from arriero.checkpoint.formats.peft_directory import with_adapter, write_peft
from arriero.model.lora import LoraSettings
from federate.models import first_model, member, moved, reader, weights

STATE = weights(0)


@pytest.fixture
def models(tmp_path):
    found = {"a": (moved(STATE, 1), "hf"), "b": (moved(STATE, 2), "torch"), "c": (moved(STATE, 3), "dcp")}
    for name, (state, kind) in found.items():
        convert(reader(state), tmp_path / name, kind)
    return {name: state for name, (state, _) in found.items()}


def loaded(path):
    source = open_model(path)
    return {name: source.load(name) for name in source.tensors}


def test_models_of_different_formats_have_a_weighted_mean(models, command, tmp_path):
    done = command("fed", "aggregate", "a", "b", "c", "-o", "out", "--weights", "2", "1", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["cosines"]) == 3
    for name, found in loaded(tmp_path / "out").items():
        a, b, c = (models[each][name].double() for each in "abc")
        assert torch.equal(found, ((2 * a + b + c) / 4).float())


@pytest.mark.usefixtures("models")
def test_the_order_of_arguments_does_not_change_a_bit(command):
    hashes = set()
    for number, order in enumerate((("a", "b", "c"), ("c", "a", "b"))):
        done = command("fed", "aggregate", *order, "-o", f"out-{number}", "--json")
        hashes.add(json.loads(done.stdout)["sha256"])
    assert len(hashes) == 1


def test_members_and_the_outer_state_continue_from_one_aggregation_to_the_next(tmp_path, command):
    base = first_model(tmp_path)
    ahead = moved(STATE, 1)
    member(base, ahead, tmp_path / "m0", "site")
    options = ("--optimizer", "nesterov", "--lr", "0.5", "--momentum", "0.5")
    assert command("fed", "aggregate", "m0", "--base", base, "-o", "g1", *options).returncode == 0
    member(tmp_path / "g1", loaded(tmp_path / "g1"), tmp_path / "m1", "site", number=1)
    assert command("fed", "aggregate", "m1", "--base", "g1", "-o", "g2", *options).returncode == 0
    one, two = loaded(tmp_path / "g1"), loaded(tmp_path / "g2")
    name = "blocks.0.ffn.down.weight"
    delta = STATE[name] - ahead[name]
    torch.testing.assert_close(one[name], STATE[name] - 0.5 * 1.5 * delta)
    # a member without training leaves only the momentum of the last round
    torch.testing.assert_close(two[name], one[name] - 0.5 * 0.5 * 0.5 * delta)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a", "b", "-o", "out", "--weights", "1"), "1 weights for 2 models"),
        (("a", "b", "-o", "out", "--optimizer", "nesterov"), "give it with --base"),
        (("a", "nothing", "-o", "out"), "nothing"),
        (("a", "b", "-o", "a"), "exists already"),
    ],
)
@pytest.mark.usefixtures("models")
def test_mistakes_are_answered_with_a_sentence(command, arguments, said):
    done = command("fed", "aggregate", *arguments)
    assert done.returncode == 2 and said in done.stderr


def adapter_of(base, folder, seed, alpha=8.0):
    """Write a PEFT directory with an adapter of rank 2 for the attention of a model."""
    settings = LoraSettings(2, alpha, targets=("blocks.*.attention.*",))
    source = open_model(base)
    tensors = settings.tensors(source.tensors)
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    with_one = with_adapter(source, Adapter(settings, tensors, state.__getitem__, str(base)))
    folder.mkdir()
    write_peft(with_one, folder, WriteOptions())
    return {name: state[name] for name in tensors}


def test_adapters_are_aggregated_alone(models, tmp_path, command):
    states = [adapter_of(tmp_path / "a", tmp_path / f"adapter-{i}", i) for i in range(2)]
    done = command("fed", "aggregate", "adapter-0", "adapter-1", "-o", "out", "--weights", "3", "1")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == [
        "adapter_model.safetensors"
    ]
    found = open_model(tmp_path / "out").adapter
    for name in states[0]:
        expected = (3 * states[0][name].double() + states[1][name].double()) / 4
        assert torch.equal(found.load(name), expected.float())
    base = open_model(tmp_path / "a")
    assert all(torch.equal(base.load(name), tensor) for name, tensor in models["a"].items()), "frozen"


@pytest.mark.usefixtures("models")
def test_adapters_of_other_base_weights_are_rejected(tmp_path, command):
    """Two base models of equal dimensions are told apart by the checksum of their weights."""
    adapter_of(tmp_path / "a", tmp_path / "adapter-0", 0)
    convert(reader(moved(STATE, 9)), tmp_path / "other", "hf")
    adapter_of(tmp_path / "other", tmp_path / "adapter-1", 1)
    done = command("fed", "aggregate", "adapter-0", "adapter-1", "-o", "out")
    assert done.returncode == 2 and "base model" in done.stderr
    done = command("fed", "aggregate", "adapter-0", "a", "-o", "out")
    assert done.returncode == 2 and "is an adapter" in done.stderr
