"""Tensor parallelism: each layer's matrices split over ranks, activations between blocks split by sequence.

What goes where is the table below: a new model brings a table, not code.
"""

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

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

from arriero.model.language_model import LanguageModel
from arriero.model.layers import Head

_BLOCK = {
    "blocks.*.attention_norm": "own tokens",
    "blocks.*.attention": "all tokens in",
    "blocks.*.attention.q": "columns",
    "blocks.*.attention.k": "columns",
    "blocks.*.attention.v": "columns",
    "blocks.*.attention.o": "rows",
    "blocks.*.ffn_norm": "own tokens",
    "blocks.*.ffn": "all tokens in",
    "blocks.*.ffn.up": "columns",
    "blocks.*.ffn.down": "rows",
}
_ENDS = {"embedding": "vocabulary rows", "norm": "own tokens", "head": "vocabulary loss"}

PLACEMENTS: dict[str, dict[str, str]] = {
    "llama": _BLOCK | {"blocks.*.ffn.gate": "columns"} | _ENDS,
    "gpt2": _BLOCK | {"positions": "embedding columns"} | _ENDS,
}


class _VocabularyHead(ParallelStyle):
    """Each rank holds some rows of the head, sees all tokens, and gives its part of their gradient."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head)
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)]))
        module.register_forward_pre_hook(partial(_all_tokens, device_mesh))
        return module


def _all_tokens(mesh: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x_BTD, *rest = inputs
    own = DTensor.from_local(x_BTD, mesh, [Shard(1)], run_check=False)
    whole = own.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()]), *rest


class _AllTokensIn(PrepareModuleInput):
    """The first argument, a rank's own tokens, becomes all of them; the others pass as they are."""

    def __init__(self) -> None:
        super().__init__(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        x, *rest = inputs
        return *super()._prepare_input_fn((x,), device_mesh), *rest


_STYLES: dict[str, Any] = {
    "own tokens": partial(SequenceParallel, use_local_output=True),
    "all tokens in": _AllTokensIn,
    "columns": ColwiseParallel,
    "rows": partial(RowwiseParallel, output_layouts=Shard(1)),
    "vocabulary rows": partial(RowwiseParallel, input_layouts=Replicate(), output_layouts=Shard(1)),
    "embedding columns": partial(ColwiseParallel, output_layouts=Shard(1)),
    "vocabulary loss": _VocabularyHead,
}


def split_layers(model: LanguageModel, mesh: DeviceMesh) -> None:
    for name, module in list(model.named_modules()):
        for pattern, style in PLACEMENTS[model.spec.family].items():
            if fnmatchcase(name, pattern) and name.count(".") == pattern.count("."):
                parallelize_module(module, mesh, _STYLES[style]())
    model.tie()
    _cure_embedding_gradient(model)


def _cure_embedding_gradient(model: LanguageModel) -> None:
    """A compiled block that is fed a collective's result directly loses the gradient behind it (torch 2.13);
    an operation between them keeps it."""
    for module in (model.embedding, getattr(model, "positions", None)):
        if module is not None:
            module.register_forward_hook(_times_one)


def _times_one(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 1.0


def use_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Overlap gathers and scatters with the matmuls beside them: compiled code on NVLink only."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True  # type: ignore[attr-defined]
    enable_symm_mem_for_group(mesh.get_group().group_name)
