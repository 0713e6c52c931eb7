"""Tensor parallelism with sequence parallelism: matrices are split over ranks, and so are the tokens between.

Which module is split in which way is data of the model family (`Family.placements`).
"""

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
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

from arriero.model.family import Placement, family_of
from arriero.model.language_model import LanguageModel
from arriero.model.layers import Head
from arriero.model.lora import LoraLinear


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


_STYLES: dict[Placement, Any] = {
    "sequence parallel": partial(SequenceParallel, use_local_output=True),
    "gather sequence": _GatherSequence,
    "column-wise": ColwiseParallel,
    "row-wise": partial(RowwiseParallel, output_layouts=Shard(1)),
    # norms of single heads, whose inputs are this rank's heads: (B, T, H, E)
    "per head": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
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
                parallelize_module(module, mesh, _STYLES[style]())
                if isinstance(module, LoraLinear):
                    _split_adapter(module, style, mesh)
    model.tie()
    _keep_embedding_gradient(model)


def _split_adapter(layer: LoraLinear, style: Placement, mesh: DeviceMesh) -> None:
    """Split an adapter along the dimension of its layer that is split; the rank is whole on each rank."""
    by_column = style == "column-wise"
    places = {
        "lora_a": Replicate() if by_column else Shard(1),
        "lora_b": Shard(0) if by_column else Replicate(),
    }
    for name, place in places.items():
        whole = getattr(layer, name)
        empty = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        setattr(layer, name, nn.Parameter(distribute_tensor(empty, mesh, [place])))
    layer.drop = _drop_locally


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
