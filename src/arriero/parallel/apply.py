"""THE order in which a plain model becomes a rank's part of a parallel one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from arriero.config.schema import MemorySection, PrecisionSection
from arriero.kernels import kernels, usable_on
from arriero.kernels.float8 import computes_float8
from arriero.model.family import build_model
from arriero.model.language_model import LanguageModel
from arriero.model.layers import Block, Gelu, HeadLoss, by_one_matmul
from arriero.model.spec import ModelSpec
from arriero.parallel.activation_checkpointing import apply_remat
from arriero.parallel.context import apply_context
from arriero.parallel.dtensor import local_shard
from arriero.parallel.fsdp import Sharding, shard_weights
from arriero.parallel.mesh import Mesh
from arriero.parallel.precision import Float8Layers, apply_float8, joined_layers
from arriero.parallel.tensor import split_layers, use_async_tensor_parallel


@dataclass(frozen=True)
class Recipe:
    """What is to be done to the model, all of it decided. `weights` is the type they are kept in;
    `splits_backward` says that states and weights have their gradients computed apart, `widths_vary` that
    batches are as wide as their longest sample."""

    sharding: Sharding
    compiled: bool
    async_tp: bool
    memory: MemorySection
    precision: PrecisionSection
    loss: HeadLoss
    weights: torch.dtype
    splits_backward: bool
    widths_vary: bool
    seed: int

    @property
    def dynamic(self) -> bool | None:
        """As the compiler asks. Where sizes of batches are few, each has its own compilation: after an
        evaluation in smaller ones the training step would be compiled for any size, and be slower."""
        return None if self.widths_vary else False


def parallelize(
    spec: ModelSpec, stages: Sequence[range], mesh: Mesh, recipe: Recipe, device: torch.device
) -> tuple[list[LanguageModel], Float8Layers]:
    """This rank's parts, with their first weights; no rank ever holds more than its own."""
    made = [_part(spec, blocks, mesh, recipe, device) for blocks in stages]
    return [part for part, _ in made], joined_layers([layers for _, layers in made])


def _part(
    spec: ModelSpec, blocks: range, mesh: Mesh, recipe: Recipe, device: torch.device
) -> tuple[LanguageModel, Float8Layers]:
    with torch.device("meta"):
        model = build_model(spec).to(recipe.weights)
    model.keep(blocks)
    if model.head is not None:
        model.head.loss = recipe.loss
    float8 = recipe.precision.float8 != "off"
    if device.type == "cuda" and mesh.layout.tp == 1 and not mesh.shards and not float8:
        # where weights are whole anyway: the copy of them outlives the forward pass
        for block in model.blocks.values():
            cast(Block, block).attention.project = by_one_matmul
    if usable_on(device) and mesh.layout.tp == 1:
        _use_kernels(model, device, recipe)
    # makes new modules: whatever hooks into modules must come after
    emulate = not computes_float8(device)
    layers = apply_float8(model, recipe.precision, emulate, mesh.layout.tp, mesh.shards)
    if mesh.layout.tp > 1:
        # what follows sees one rank's slice of each layer
        split_layers(model, mesh.tp)
        if recipe.async_tp:
            use_async_tensor_parallel(mesh.tp)
    if mesh.layout.cp > 1:
        # attention over the heads that are left here
        apply_context(model, mesh.group("ring"), mesh.group("ulysses"))
    if recipe.memory.ffn_tile:
        # before blocks are compiled: tiles part them in two
        _cut_into_tiles(model, recipe)
    # only the compiler can keep some of a compiled block's results; whole blocks it need not see recomputed,
    # and torch 2.13 cannot compile that together with tensor parallelism
    sees_remat = recipe.memory.remat.keeps_some
    if recipe.compiled and not sees_remat:
        _compile(model, recipe)
    apply_remat(model, recipe.memory.remat, spec.layers, recipe.compiled, recipe.memory.offload_activations)
    if recipe.compiled and sees_remat:
        _compile(model, recipe)
    if mesh.shards:
        # what is gathered is what all of the above computes with
        shard_weights(model, mesh, recipe.sharding, device.type == "cuda")
    offloaded = mesh.shards and recipe.sharding.offload
    model.to_empty(device="cpu" if offloaded else device)
    for module in model.modules():
        # weights may wait in host memory; what is computed with as it is may not
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    model.init_weights(recipe.seed, lambda parameter: [local_shard(parameter)])
    return model, layers


def _use_kernels(model: LanguageModel, device: torch.device, recipe: Recipe) -> None:
    """Norms and activations, for weights that are plain tensors while they are computed with."""
    remat = recipe.memory.remat
    if recipe.compiled and (remat.keeps_some or remat.kind == "budget"):
        # a compiler that chooses what to compute again cannot look into kernels
        return
    # one for all: the compiler would take another function for another kind of block
    normed = kernels("norm").normed_on(device)
    for block in map(partial(cast, Block), model.blocks.values()):
        # torch 2.11, going backward twice, mixes up the gradients of two results
        if not recipe.splits_backward:
            block.normed = normed
        if isinstance(block.ffn, Gelu) and recipe.precision.float8 == "off":
            block.ffn.activated = kernels("gelu").gelu_of


def _cut_into_tiles(model: LanguageModel, recipe: Recipe) -> None:
    for block in map(partial(cast, Block), model.blocks.values()):
        block.tile = recipe.memory.ffn_tile
        if recipe.compiled:
            block.feed_forward = torch.compile(block.feed_forward, dynamic=recipe.dynamic)


def _compile(model: LanguageModel, recipe: Recipe) -> None:
    """Block by block: they are alike, so one compilation serves them all."""
    for block in model.blocks.values():
        block.compile(dynamic=recipe.dynamic)
