"""The memory of each choice of precision, optimizer state and recomputation, beside the plan's arithmetic."""

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arriero.bench.cost_sizes import Place, recorded
from arriero.bench.cost_steps import untrained
from arriero.bench.costs_result import Cost, Row
from arriero.config.schema import RunConfig
from arriero.parallel.world import World
from arriero.plan.memory import need_of
from arriero.train.arrange import arrange
from arriero.train.device import choose_device

PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "fp32": {"precision.compute": "fp32"},
    "bf16 beside fp32 masters": {"precision.compute": "bf16"},
    "bf16 weights": {"precision.compute": "bf16", "precision.master": "bf16"},
}
STATES = ("fp32", "bf16", "int8")
REMATS = ("none", "full", "selective", "attention")
_MIB = 2**20


class Gauge(Protocol):
    def now(self) -> int: ...

    def peak(self) -> int: ...


class LiveTensors(TorchDispatchMode):
    """Bytes of the tensors that are there, as every operation of this thread leaves them. What an operation
    takes for itself while it runs is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, int] = {}
        self._live = self._most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._see(leaf.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self._live += storage.nbytes()
        self._most = max(self._most, self._live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._live -= self._known.pop(key)

    def now(self) -> int:
        return self._live

    def peak(self) -> int:
        return self._most


class Allocator:
    """What torch has allocated of the GPU, less what was there before."""

    def __init__(self) -> None:
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def now(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before


@contextmanager
def gauge(on_gpu: bool) -> Iterator[Gauge]:
    gc.collect()
    if on_gpu:
        yield Allocator()
        return
    with LiveTensors() as live:
        yield live


@dataclass(frozen=True)
class Held:
    """Bytes: weights, gradients and moments, and the most there ever was."""

    state: int
    peak: int


def memory(place: Place) -> Cost:
    on_gpu = choose_device(place.device).is_gpu
    rows = [
        beside_the_plan(place, f"{precision}, AdamW in {state}, remat {remat}", sets, on_gpu)
        for precision, kinds in PRECISIONS.items()
        for state in STATES
        for remat in REMATS
        for sets in [{**kinds, "optim.state": state, "memory.remat": remat}]
    ]
    seen = "what torch has allocated of the GPU" if on_gpu else "all tensors alive, seen at each operation"
    return Cost(
        name="memory",
        explanation="What plan/memory.py says beside what was measured in two steps of one micro-batch, "
        f"not compiled: {seen}. State is weights, gradients and moments, before an update; the peak is "
        "of the whole, from the first weight on. Ratios are measured by planned.",
        settings=recorded(place.sizes.kept),
        rows=tuple(rows),
    )


def beside_the_plan(place: Place, what: str, sets: Mapping[str, str], on_gpu: bool) -> Row:
    config = place.run(2, {**place.sizes.kept, **sets, "observe.tensorboard": False})
    rows = config.train.batch.amount // config.data.seq_len
    config = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": rows})})
    plan = arrange(config, World())
    need = need_of(config, plan.spec, plan.layout, plan.compute.itemsize, plan.loss_chunk, on_gpu)
    held, predicted = held_by(config, on_gpu), need.bytes(rows)
    return Row(
        what=what,
        values={
            "state: MiB by plan": need.state / _MIB,
            "measured": held.state / _MIB,
            "ratio": held.state / need.state,
            "peak: MiB by plan": predicted / _MIB,
            "peak measured": held.peak / _MIB,
            "peak ratio": held.peak / predicted,
        },
    )


def held_by(config: RunConfig, on_gpu: bool, steps: int = 2) -> Held:
    """Two steps: gradients and temporaries of the second meet all that the first left."""
    state = 0
    with gauge(on_gpu) as measured, untrained(config) as session:
        for _ in range(steps):
            session.passes.gradients(next(session.loader), session.optimizer.loss_scale)
            state = measured.now()
            session.optimizer.step(session.config.optim.lr)
        return Held(state, measured.peak())
