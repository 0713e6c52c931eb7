"""The order of the transformations that turn a plain model into a rank's part of a parallel one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from arriero.config.schema import MemorySection, PrecisionSection, SpeculatorSection
from arriero.kernels import kernels, usable_on
from arriero.kernels.float8 import computes_float8
from arriero.model.adapters import AdapterSettings, is_adapter
from arriero.model.family import build_model
from arriero.model.language_model import LanguageModel
from arriero.model.layers import MLP, Attention, Block, FusedQKVAttention, Head, TiledBlock, converted
from arriero.model.quantized import quantize_layers
from arriero.model.spec import ModelSpec
from arriero.model.speculator.module import SpeculatorHead, add_speculator
from arriero.parallel.activation_checkpointing import apply_activation_checkpointing
from arriero.parallel.context import apply_context_parallel
from arriero.parallel.dtensor import local_shard
from arriero.parallel.fsdp import Sharding, shard_weights
from arriero.parallel.loss import ChunkedLossHead, LossOptions, chunked_loss
from arriero.parallel.mesh import Mesh
from arriero.parallel.precision import Float8Layers, apply_float8
from arriero.parallel.tensor import split_layers, use_async_tensor_parallel


@dataclass(frozen=True)
class ModelOptions:
    """How a model is transformed, with every choice made.

    `weights` is the dtype of the parameters. `splits_backward` says that a pipeline schedule computes the
    gradients of states and weights separately, `widths_vary` that sequences are padded to varying lengths.
    """

    sharding: Sharding
    compiled: bool
    async_tp: bool
    memory: MemorySection
    precision: PrecisionSection
    loss: LossOptions
    weights: torch.dtype
    splits_backward: bool
    widths_vary: bool
    seed: int
    adapter: AdapterSettings | None = None
    speculator: SpeculatorSection | None = None

    @property
    def dynamic(self) -> bool | None:
        """The option of torch.compile. With few batch shapes, each has its own compilation: after an
        evaluation with smaller batches, torch would else recompile the training step for any shape."""
        return None if self.widths_vary else False


def parallelize(
    spec: ModelSpec, stages: Sequence[range], mesh: Mesh, options: ModelOptions, device: torch.device
) -> tuple[list[LanguageModel], Float8Layers]:
    """Return this rank's pipeline stages with initial weights; no rank ever holds more than its own part."""
    made = [_stage(spec, blocks, mesh, options, device) for blocks in stages]
    return [stage for stage, _ in made], Float8Layers.of_stages([layers for _, layers in made])


def _stage(
    spec: ModelSpec, blocks: range, mesh: Mesh, options: ModelOptions, device: torch.device
) -> tuple[LanguageModel, Float8Layers]:
    model, float8 = transform_stage(spec, blocks, mesh, options, device)
    # weights get storage when each rank's shard is known
    _allocate(model, device, offloaded=mesh.shards and options.sharding.offload)
    model.init_weights(options.seed, local_shard)
    return model, float8


def transform_stage(
    spec: ModelSpec, blocks: range, mesh: Mesh, options: ModelOptions, device: torch.device
) -> tuple[LanguageModel, Float8Layers]:
    """Return a pipeline stage with every transformation applied and without storage, on the meta device."""
    tp, cp, memory = mesh.layout.tp, mesh.layout.cp, options.memory
    # on meta, so that no rank allocates weights that it will not hold
    with torch.device("meta"):
        model = build_model(spec).to(options.weights)
    # pipeline parallelism: only this stage's blocks are transformed
    model.keep(blocks)
    # modules are replaced first: everything after this adds hooks to them
    if options.adapter is not None:
        options.adapter.add(model, spec.layers)
        model.offset = options.adapter.offset
        _use_small_base(model, options)
    if options.speculator is not None:
        model.head = add_speculator(model.head, options.speculator, spec)
        model.to(options.weights)
    _use_chunked_loss(model, options)
    _use_fused_projections(model, mesh, options, device)
    _use_kernels(model, mesh, options, device)
    # float8 before tensor parallelism: it makes new modules, without the hooks of the old ones
    float8 = apply_float8(model, options.precision, not computes_float8(device), tp, mesh.shards)
    # tensor and sequence parallelism: what follows sees one rank's slice of each layer
    if tp > 1:
        split_layers(model, mesh.tp)
        if options.async_tp:
            use_async_tensor_parallel(mesh.tp)
    # context parallelism after tensor parallelism: it divides the heads that are left on this rank
    if cp > 1:
        apply_context_parallel(model, mesh.group("ring"), mesh.group("ulysses"))
    # tiles before compilation: a tiled block is compiled in two parts
    _use_tiles(model, options)
    # compilation inside activation checkpointing, except where the compiler must see it
    _compile(model, spec, options, selective=False)
    apply_activation_checkpointing(
        model,
        memory.activation_checkpointing,
        spec.layers,
        float(memory.offload_activations),
        keeps_rng=options.adapter is not None and options.adapter.dropout > 0,
    )
    _compile(model, spec, options, selective=True)
    # FSDP (HSDP with dp_replicate) last: it gathers the weights that all of the above computes with
    if mesh.shards:
        shard_weights(model, mesh, options.sharding, device.type == "cuda")
    return model, float8


def _use_small_base(model: LanguageModel, options: ModelOptions) -> None:
    """Store the weights that an adapter leaves frozen in fewer bits, without master weights."""
    base = options.precision.base_weights
    if base == "master":
        return
    if base != "compute":
        quantize_layers(model.blocks, base)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not is_adapter(name):
            parameter.data = parameter.data.to(options.sharding.compute)


def _use_chunked_loss(model: LanguageModel, options: ModelOptions) -> None:
    if type(model.head) is Head:
        model.head = ChunkedLossHead.of(model.head, options.loss)
    elif isinstance(model.head, SpeculatorHead):
        model.head.loss = partial(chunked_loss, options=options.loss)


def _use_fused_projections(
    model: LanguageModel, mesh: Mesh, options: ModelOptions, device: torch.device
) -> None:
    """Compute q, k and v in one matmul on a GPU that holds whole weights in bf16 or fp32.

    Under FSDP the concatenated copy would outlive the gathered weights until backward.
    """
    plain = mesh.layout.tp == 1 and not mesh.shards and options.precision.float8 == "off"
    if device.type != "cuda" or not plain:
        return
    for block in model.blocks.values():
        own = block.attention if isinstance(block, Block) else None
        if type(own) is Attention and {type(own.q), type(own.k), type(own.v)} == {nn.Linear}:
            block.attention = converted(own, FusedQKVAttention)


def _use_kernels(model: LanguageModel, mesh: Mesh, options: ModelOptions, device: torch.device) -> None:
    """Replace LayerNorm and GELU by kernels, for weights that are plain tensors in the forward pass."""
    checkpointing = options.memory.activation_checkpointing
    # where the compiler chooses what to recompute, it cannot see into kernels
    hidden = options.compiled and (checkpointing.is_selective or checkpointing.kind == "budget")
    blocks = [block for block in model.blocks.values() if isinstance(block, Block)]
    if hidden or not usable_on(device) or mesh.layout.tp > 1 or not any(map(_has_kernels, blocks)):
        return
    elementwise = kernels("elementwise")
    # one object for all blocks, or each block would be compiled again
    processors = elementwise.Processors.of(device)
    for block in blocks:
        # torch 2.11 confuses the gradients of two results when backward runs twice
        for name in () if options.splits_backward else ("attention_norm", "ffn_norm"):
            norm = getattr(block, name)
            if _is_layer_norm(norm):
                setattr(block, name, converted(norm, elementwise.ResidualLayerNorm))
                getattr(block, name).processors = processors
        ffn = block.ffn
        if isinstance(ffn, MLP) and _is_gelu(ffn) and options.precision.float8 == "off":
            ffn.up, ffn.activation = converted(ffn.up, elementwise.LinearGelu), nn.Identity()


def _has_kernels(block: Block) -> bool:
    return _is_layer_norm(block.attention_norm) or _is_layer_norm(block.ffn_norm) or _is_gelu(block.ffn)


def _is_layer_norm(norm: nn.Module) -> bool:
    return type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None


def _is_gelu(ffn: nn.Module) -> bool:
    return (
        type(ffn) is MLP
        and type(ffn.up) is nn.Linear
        and isinstance(ffn.activation, nn.GELU)
        and ffn.activation.approximate == "tanh"
    )


def _use_tiles(model: LanguageModel, options: ModelOptions) -> None:
    if not options.memory.ffn_tile:
        return

    def compiler(function):
        return torch.compile(function, dynamic=options.dynamic)

    for name, block in model.blocks.items():
        if isinstance(block, Block) and block.ffn is not None:
            tiled = TiledBlock.of(block, options.memory.ffn_tile, compiler if options.compiled else None)
            model.blocks[name] = tiled


def _compile(model: LanguageModel, spec: ModelSpec, options: ModelOptions, selective: bool) -> None:
    """Compile those blocks that keep a part of their activations, or the others; equal blocks share one
    compilation.

    The compiler must see what a selective block recomputes. Recomputation of whole blocks is hidden from it:
    torch 2.13 cannot compile it with tensor parallelism.
    """
    modes = options.memory.activation_checkpointing.modes(spec.layers)
    for name, block in model.blocks.items() if options.compiled else ():
        if (modes[int(name)] in ("selective", "attention")) == selective:
            block.compile(dynamic=options.dynamic)


def _allocate(model: LanguageModel, device: torch.device, offloaded: bool) -> None:
    model.to_empty(device="cpu" if offloaded else device)
    for module in model.modules():
        # FSDP moves offloaded parameters to the GPU for computation, but not buffers
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
