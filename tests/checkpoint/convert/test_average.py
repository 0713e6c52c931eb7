"""The mean of models, and the two verbs as a user types them."""

import pytest
import torch
from models import in_memory, spec_of

from arriero.checkpoint.convert import average, convert, open_model
from arriero.errors import UserError

SPEC = spec_of("llama3, tied")


def states(count):
    return [in_memory(SPEC, seed) for seed in range(1, count + 1)]


def test_the_mean_is_weighted_and_exact_in_any_mix_of_formats(folder):
    sources = states(4)
    kinds = ("dcp", "hf", "meta", "torch")
    for kind, source in zip(kinds, sources, strict=True):
        convert(source, folder / kind, kind)
    weights = [1.0, 2.0, 3.0, 4.0]
    convert(average([open_model(folder / kind) for kind in kinds], weights), folder / "out", "hf")
    found = open_model(folder / "out")
    for name in found.tensors:
        wanted = sum(w / 10 * s.load(name).double() for w, s in zip(weights, sources, strict=True))
        assert (found.load(name) - wanted).abs().max() < 1e-7 and found.load(name).dtype == torch.float32


def test_a_model_averaged_with_itself_is_itself_bit_for_bit():
    source = in_memory(SPEC, dtype=torch.bfloat16)
    mean = average([source] * 3, [0.2, 0.5, 0.3])
    assert all(torch.equal(mean.load(name), source.load(name)) for name in source.tensors)


def test_different_models_are_refused_by_what_differs():
    with pytest.raises(
        UserError, match=r"different models: .*kv_heads 4 and 8.*rope_theta 500000\.0 and 10000\.0"
    ):
        average([in_memory(SPEC), in_memory(spec_of("llama2"))])
    with pytest.raises(UserError, match="3 weights for 2 models"):
        average(states(2), [1.0, 2.0, 3.0])
    with pytest.raises(UserError, match="no mean"):
        average(states(2), [0.0, 0.0])
    with pytest.raises(UserError, match="at least two"):
        average(states(1))


def test_average_on_the_command_line(folder, arriero):
    first, second = states(2)
    convert(first, folder / "a", "dcp")
    convert(second, folder / "b", "hf")
    made = arriero("ckpt", "convert", folder / "a", folder / "a-hf", "--to", "hf", "--dtype", "bf16")
    assert made.returncode == 0 and "bfloat16" in made.stdout, made.stderr
    assert made.stderr == ""
    result = arriero(
        "ckpt", "average", folder / "a", folder / "b", "--weights", "0.3", "0.7", "-o", folder / "mean"
    )
    assert result.returncode == 0, result.stderr
    mean = open_model(folder / "mean")
    assert mean.format == "dcp"
    wanted = 0.3 * first.load("norm.weight").double() + 0.7 * second.load("norm.weight").double()
    assert (mean.load("norm.weight") - wanted).abs().max() < 1e-7
