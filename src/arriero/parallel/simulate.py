"""Run the real transformations of one rank of any world in one process, without weights or other ranks.

The process group is torch's fake one, and tensors have no storage (FakeTensorMode): collectives are counted,
not performed. Blocks are not compiled. Private torch APIs, tested with 2.11 and 2.13:
`testing._internal.distributed.fake_pg`, `_subclasses`, `_python_dispatch`, `_cdata`,
`_resolve_process_group`.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

from arriero.model.costs import Mode
from arriero.model.language_model import LanguageModel
from arriero.parallel.apply import ModelOptions, transform_stage
from arriero.parallel.dtensor import local_part
from arriero.parallel.fsdp import synchronize_gradients
from arriero.parallel.mesh import make_mesh
from arriero.parallel.world import World
from arriero.plan.resolve import Resolved

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in groups of one size: how many per step, and the bytes of their results."""

    kind: str
    group: int
    count: int
    bytes: int


@dataclass(frozen=True)
class Simulation:
    """One step of a rank. `peak` is in bytes, with optimizer state, which is predicted and not simulated.

    `predicted` is the estimate for the same, uncompiled step; None for a pipeline stage, of which one
    micro-batch is simulated.
    """

    rank: int
    ranks: int
    layout: str
    peak: int
    predicted: int | None
    parameters: int
    collectives: tuple[Collective, ...]


class _Recorder(DispatchMode):
    """Count the live bytes of all storages, and collectives by kind and group size."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.live = self.peak = 0
        # how many micro-batches the current one stands for
        self.times = 1
        self.counts: Counter[tuple[str, int]] = Counter()
        self.moved: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            # it runs operators on its local parts, which come back here
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        library, _, name = func.name().partition("::")
        # a fake collective and its wait return two tensors, where real ones return one
        if library != "_c10d_functional" or name.startswith("wait_tensor"):
            for tensor in _tensors(result):
                self.add(tensor)
        if library in ("c10d", "_c10d_functional"):
            self._count(name.strip("_"), args, result)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def _count(self, name: str, args: Sequence[Any], result: Any) -> None:
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
        if kind is None:
            return
        size = next((found for each in args if (found := _group_size(each))), dist.get_world_size())
        # operators of c10d write to their first argument
        outputs = list(_tensors(args[0] if name.endswith("_") or "base" in name else result))
        outputs = outputs or list(_tensors(args[0]))
        self.counts[kind, size] += self.times
        self.moved[kind, size] += self.times * sum(each.nbytes for each in outputs)


def _group_size(value: Any) -> int | None:
    if isinstance(value, str) and value not in ("sum", "avg"):
        name: Any = value
        return _resolve_process_group(name).size()
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value).size()
        except RuntimeError:
            # a reduction operator
            return None
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    # a DTensor has no storage of its own
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


@contextmanager
def _fake_world(world: World) -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("a simulation needs a process without a process group")
    if world.size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulate_step(resolved: Resolved, options: ModelOptions, rank: int = 0) -> Simulation:
    """Run one training step of a rank: all micro-batches that differ, forward and backward.

    A pipeline stage runs one micro-batch. The optimizer is not run; its state is added by the estimate.
    """
    layout, spec, cpu = resolved.layout, resolved.spec, torch.device("cpu")
    world = World(rank, layout.ranks)
    options = replace(options, compiled=False, async_tp=False)
    recorder = _Recorder()
    with _fake_world(world):
        mesh = make_mesh(layout, world, resolved.ulysses, cpu)
        # sharding thousands of ways is fast on the meta device only
        stages = [transform_stage(spec, blocks, mesh, options, cpu)[0] for blocks in resolved.stages_of(rank)]
        tokens = resolved.config.data.seq_len // layout.cp
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            for stage in stages:
                stage.to_empty(device=cpu)
            # the first pass allocates what DTensor and FSDP keep for ever
            for measured in (False, True):
                with recorder if measured else fake:
                    for stage in stages:
                        for parameter in stage.parameters():
                            if measured:
                                recorder.add(local_part(parameter.detach()))
                        _passes(stage, resolved, recorder, tokens)
                for stage in stages:
                    stage.zero_grad()
        parameters = sum(local_part(p).numel() for stage in stages for p in stage.parameters())
    moments = resolved.estimates[0].state_parts["optimizer state"]
    found = [Collective(*key, count, recorder.moved[key]) for key, count in sorted(recorder.counts.items())]
    mode = Mode(compiled=False, element=resolved.estimates[0].mode.element, on_gpu=False)
    alike = replace(resolved.estimates[0], mode=mode)
    predicted = alike.bytes(resolved.micro_batch) if layout.pp == 1 else None
    peak = recorder.peak + round(moments)
    return Simulation(rank, layout.ranks, str(layout), peak, predicted, parameters, tuple(found))


def _passes(stage: LanguageModel, resolved: Resolved, recorder: _Recorder, tokens: int) -> None:
    """Run the micro-batches of a step; the second stands for all between the first and the last."""
    count = resolved.shares[0].gradient_accumulation if resolved.layout.pp == 1 else 1
    rows, layout = resolved.micro_batch, resolved.layout
    for number in sorted({0, min(1, count - 1), count - 1}):
        recorder.times = count - 2 if 0 < number < count - 1 else 1
        keeps = resolved.reshard is False
        synchronize_gradients(stage, number == count - 1, resolved.sync == "each", keeps)
        positions = torch.arange(tokens).expand(rows, tokens)
        labels = torch.zeros(rows, tokens, dtype=torch.int64)
        x = labels
        if stage.embedding is None:
            shape = (rows, tokens // layout.tp, resolved.spec.dim)
            x = torch.zeros(shape, dtype=_TYPES[resolved.compute], requires_grad=True)
        out = stage(x, positions, None, labels)
        out.backward(torch.ones_like(out))
