"""Tensor parallelism with sequence parallelism: matrices are split over ranks, and so are the tokens between.

Which module is split in which way is data of the model family (`Family.placements`).
"""

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from arriero.model.attention_prompts import Prefix, Prompt
from arriero.model.family import Placement, family_of
from arriero.model.language_model import LanguageModel
from arriero.model.layers import Head
from arriero.model.lora import LoraLinear
from arriero.model.quantized import QuantizedLinear, packed_linear


class _VocabularyHead(ParallelStyle):
    """Split the head by rows of the vocabulary; the gradient of its input is a partial sum on each rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head)
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)]))
        module.register_forward_pre_hook(partial(_gather_tokens, device_mesh))
        return module


def _gather_tokens(mesh: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x_BTD, *rest = inputs
    own = DTensor.from_local(x_BTD, mesh, [Shard(1)], run_check=False)
    whole = own.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()]), *rest


class _GatherSequence(PrepareModuleInput):
    """All-gather the first argument over the sequence; pass the others through."""

    def __init__(self) -> None:
        super().__init__(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        x, *rest = inputs
        return *super()._prepare_input_fn((x,), device_mesh), *rest


class _Copied(ParallelStyle):
    """Keep a whole linear layer on each rank, where its results are used for this rank's heads only."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        # the gradient of a result is a partial sum on each rank
        module.register_forward_hook(lambda _, __, y: y.to_local(grad_placements=[Partial()]))
        return module


class _Rowwise(RowwiseParallel):
    """Split a linear layer along its input, a quantised one by blocks."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if not isinstance(module, QuantizedLinear):
            super()._partition_linear_fn(name, module, device_mesh)
            return
        for own, place in (("packed", Shard(1)), ("bias", Replicate())):
            if (parameter := getattr(module, own)) is not None:
                setattr(module, own, _placed(parameter, device_mesh, place))


class _OwnParameters(ParallelStyle):
    """Split or copy the parameters of a module that reads them by `local`, and sums over the ranks what it
    averages over its whole width."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self._place = Shard(0) if split else Replicate()
        self._gradient = Shard(0) if split else Partial()

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, self._place)
        module.local = partial(DTensor.to_local, grad_placements=[self._gradient])
        if hasattr(module, "mean_square"):
            module.mean_square = partial(_mean_square, device_mesh)
        return module


def _distribute(module: nn.Module, mesh: DeviceMesh, place: Any) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, _placed(parameter, mesh, place))


def _placed(parameter: Tensor, mesh: DeviceMesh, place: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter, mesh, [place]), requires_grad=parameter.requires_grad)


def _mean_square(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Return the mean of squares over the last dimension, which is divided over the ranks."""
    total = _SumOverRanks.apply(x.square().sum(-1, keepdim=True), mesh)
    return total / (x.shape[-1] * mesh.size())


class _SumOverRanks(torch.autograd.Function):
    """All-reduce of a sum that every rank uses: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return funcol.all_reduce(x, "sum", mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return funcol.all_reduce(grads[0].contiguous(), "sum", ctx.mesh), None


# where the ranks do not divide the groups of the module around, each rank computes them all
_BY_GROUPS: dict[Placement, tuple[Any, Any]] = {
    "column-wise groups": (ColwiseParallel, _Copied),
    "own groups": (partial(_OwnParameters, split=True), partial(_OwnParameters, split=False)),
}
_STYLES: dict[Placement, Any] = {
    "sequence parallel": partial(SequenceParallel, use_local_output=True),
    "gather sequence": _GatherSequence,
    "column-wise": ColwiseParallel,
    "row-wise": partial(_Rowwise, output_layouts=Shard(1)),
    # norms of single heads, whose inputs are this rank's heads: (B, T, H, E)
    "per head": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
    "own rows": partial(_OwnParameters, split=True),
    "vocabulary embedding": partial(RowwiseParallel, input_layouts=Replicate(), output_layouts=Shard(1)),
    "position embedding": partial(ColwiseParallel, output_layouts=Shard(1)),
    "vocabulary head": _VocabularyHead,
}


def split_layers(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Split the modules over the ranks of `mesh` as the placements of the model's family say."""
    placements = family_of(model.spec.family).placements
    assert placements, f"the family {model.spec.family} has no tensor-parallel placements"
    for name, module in list(model.named_modules()):
        for pattern, style in placements.items():
            if fnmatchcase(name, pattern) and name.count(".") == pattern.count("."):
                parent = model.get_submodule(name.rpartition(".")[0])
                kind = _style(style, parent, mesh.size())
                parallelize_module(module, mesh, kind())
                if isinstance(module, QuantizedLinear):
                    # placements of the gradient of the input, and of the result
                    row_wise = (None, Partial()) if style == "row-wise" else (Partial(), Shard(-1))
                    places = (Replicate(), Replicate()) if kind is _Copied else row_wise
                    module.multiply = partial(_multiply_locally, mesh, *places)
                if isinstance(module, LoraLinear) and kind is not _Copied:
                    _split_adapter(module, style, mesh)
        if isinstance(module, Prefix | Prompt):
            _split_prompts(module, mesh)
    model.tie()
    _keep_embedding_gradient(model)


def _multiply_locally(mesh: DeviceMesh, x_grad: Any, y_place: Any, x: DTensor, packed: DTensor) -> Tensor:
    """Multiply the local parts of an input and a quantised weight."""
    local = x.to_local(grad_placements=None if x_grad is None else [x_grad])
    y = packed_linear(local, packed.to_local())
    return DTensor.from_local(y, mesh, [y_place], run_check=False)


def _style(style: Placement, parent: nn.Module, ranks: int) -> Any:
    if style not in _BY_GROUPS:
        return _STYLES[style]
    split, copied = _BY_GROUPS[style]
    groups: Any = parent.groups
    return copied if groups % ranks else split


def _split_adapter(layer: LoraLinear, style: Placement, mesh: DeviceMesh) -> None:
    """Split an adapter along the dimension of its layer that is split; the rank is whole on each rank."""
    by_column = style != "row-wise"
    places = {
        "lora_a": Replicate() if by_column else Shard(1),
        "lora_b": Shard(0) if by_column else Replicate(),
    }
    for name, place in places.items():
        whole = getattr(layer, name)
        empty = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        setattr(layer, name, nn.Parameter(distribute_tensor(empty, mesh, [place])))
    layer.drop = _drop_locally


def _split_prompts(module: Prefix | Prompt, mesh: DeviceMesh) -> None:
    """Split a prefix by heads; prompts and their gate are whole on each rank, which has some of the heads."""
    if isinstance(module, Prefix):
        _distribute(module, mesh, Shard(1))
        module.register_forward_hook(_to_local)
    else:
        _distribute(module, mesh, Replicate())
        module.register_forward_hook(_to_local_prompts)


def _to_local(_: nn.Module, __: Any, outputs: tuple[DTensor, ...]) -> tuple[Tensor, ...]:
    return tuple(output.to_local() for output in outputs)


def _to_local_prompts(_: nn.Module, __: Any, outputs: tuple[DTensor, DTensor]) -> tuple[Tensor, Tensor]:
    vectors, gate = outputs
    # column-wise layers sum the gradient of the prompts over the ranks; that of the gate is a partial sum
    return vectors.to_local(), gate.to_local(grad_placements=[Partial()])


def _drop_locally(x: Tensor, share: float, training: bool) -> Tensor:
    """Apply dropout to the local part of a tensor, with this rank's random numbers."""
    assert isinstance(x, DTensor)
    local = F.dropout(x.to_local(), share, training)
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)


def _keep_embedding_gradient(model: LanguageModel) -> None:
    """Work around torch 2.13: a compiled block whose input is a collective's result loses the gradient
    before it. An operation in between keeps it."""
    for module in (model.embedding, getattr(model, "positions", None)):
        if module is not None:
            module.register_forward_hook(_times_one)


def _times_one(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 1.0


def use_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Overlap all-gathers and reduce-scatters with matmuls (async TP; compiled blocks on NVLink)."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True  # type: ignore[attr-defined]
    enable_symm_mem_for_group(mesh.get_group().group_name)
