"""Tiny models as global models and members, without training."""

import math

import torch

from arriero.checkpoint.formats.model_reader import ModelReader
from arriero.federate.members import publish_first_model, write_member
from arriero.federate.outer import OuterOptimizer, Part, outer_step, pseudo_gradient
from arriero.federate.site import run_round
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
    about = {"site": site, "round": number, "tokens": tokens, "first_step": number * 10}
    write_member(base, reader(state, spec), target, codec, **about, step=number * 10 + 10, **fields)
    return target


def outer_update(base, members, state, optimizer):
    """Aggregate whole state dicts of local weights: the reference for the streaming aggregation of files.

    `state` and the returned state map the optimizer's state names to tensors by parameter name.
    """
    total = math.fsum(weight for weight, _ in members)
    weights, kept = {}, {name: {} for name in optimizer.state_names}
    for name, tensor in base.items():
        parts = [Part(weight, local[name], True) for weight, local in members]
        known = {kind: tensors[name] for kind, tensors in state.items() if name in tensors}
        weights[name], new = outer_step(tensor, pseudo_gradient(tensor, parts, total), known, optimizer)
        for kind, values in new.items():
            kept[kind][name] = values
    return weights, kept


def play_round(coordinator):
    """Play one round in this process, site after site."""
    for name, order in coordinator.assign_idle().items():
        paths = coordinator.paths(coordinator.config.site(name), order)
        paths.work.mkdir(parents=True, exist_ok=True)
        run_round(order, paths)
    return coordinator.rounds.try_to_close(coordinator.names)
