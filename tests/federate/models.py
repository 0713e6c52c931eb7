"""Tiny models as global models and members, without training."""

from dataclasses import replace

import torch

from arriero.checkpoint.formats.model_reader import ModelReader
from arriero.federate.members import MemberManifest, publish_first_model, write_member
from arriero.federate.outer import OuterOptimizer
from arriero.model.family import build_model
from arriero.model.name_maps import own_tensors
from arriero.model.spec import ModelSpec

SPEC = ModelSpec.from_dict(
    {"vocab_size": 300, "dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 24}
    | {"max_seq_len": 32, "rope_theta": 1e4, "norm_eps": 1e-5, "tied": False}
)
FEDAVG = OuterOptimizer("fedavg", lr=1.0, momentum=0.0)
DILOCO = OuterOptimizer("nesterov", lr=0.7, momentum=0.9)


def weights(seed, spec=SPEC):
    model = build_model(spec)
    model.init_weights(seed)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def reader(state, spec=SPEC):
    tensors = {name: t.to(state[name].dtype) for name, t in own_tensors(spec).items()}
    return ModelReader("memory", "a model", spec, tensors, state.__getitem__)


def first_model(folder, seed=0, optimizer=FEDAVG, spec=SPEC):
    path = folder / "global-0"
    publish_first_model(reader(weights(seed, spec), spec), path, optimizer)
    return path


def moved(state, seed, size=1e-2):
    """Return weights as after some training."""
    generator = torch.Generator().manual_seed(seed)
    return {name: t + size * torch.randn(t.shape, generator=generator) for name, t in state.items()}


def member(base, state, target, site, codec="fp32", tokens=1000, number=0, spec=SPEC, **fields):
    about = MemberManifest(site, number, "", codec, tokens, number * 10, number * 10 + 10, {}, **fields)

    def describe(model, files, size):
        return replace(about, base=model, files=files, bytes=size)

    write_member(base, reader(state, spec), target, codec, describe)
    return target
