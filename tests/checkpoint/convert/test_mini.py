"""`arriero ckpt mini` writes a model with fewer blocks."""

import pytest
import torch

from arriero.checkpoint.convert import convert, open_model
from arriero.checkpoint.formats.model_reader import ModelReader
from arriero.model.family import build_model
from arriero.model.presets import resolve


@pytest.fixture
def model(folder):
    spec = resolve("llama-test", {"layers": 5, "tied": True})
    made = build_model(spec)
    made.init_weights(1)
    state = {name: tensor for name, tensor in made.state_dict().items() if name != "head.weight"}
    tensors = {name: tensor.to("meta") for name, tensor in state.items()}
    convert(ModelReader("memory", "a model", spec, tensors, state.__getitem__), folder / "model", "hf")
    return folder / "model"


@pytest.mark.parametrize(
    ("options", "blocks"),
    [(["--layers", "2"], [0, 1]), (["--blocks", "4,0,2"], [4, 0, 2]), ([], [0, 1, 2, 3])],
)
def test_the_chosen_blocks_are_kept_and_numbered_anew(command, model, folder, options, blocks):
    result = command("ckpt", "mini", model, folder / "mini", *options)
    assert result.returncode == 0, result.stderr
    whole, cut = open_model(model), open_model(folder / "mini")
    assert cut.format == "hf" and cut.spec.layers == len(blocks) and cut.spec.dim == whole.spec.dim
    for name in cut.tensors:
        parts = name.split(".")
        if parts[0] == "blocks":
            parts[1] = str(blocks[int(parts[1])])
        assert torch.equal(cut.load(name), whole.load(".".join(parts))), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "6"], "has blocks 0 to 4"),
        (["--blocks", "0,9"], "has blocks 0 to 4"),
        (["--blocks", "x"], "not a list of numbers"),
        (["--blocks", "0", "--layers", "1"], "both choose blocks"),
    ],
)
def test_a_mistake_ends_in_one_line(command, model, folder, options, words):
    result = command("ckpt", "mini", model, folder / "mini", *options)
    assert result.returncode == 2 and words in result.stderr
    assert not (folder / "mini").exists()
