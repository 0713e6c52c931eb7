"""Measure the memory of a training step and compare it with the prediction of plan/memory.py."""

import gc
import weakref
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arriero.parallel.world import World
from arriero.train.build import arrange
from arriero.train.run import open_session


class LiveTensors(TorchDispatchMode):
    """Count the bytes of all live CPU tensors after each operation of this thread.

    Temporary buffers inside one operation are not counted.
    """

    def __init__(self):
        super().__init__()
        self._sizes = {}
        self._live = self._peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage):
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._live += storage.nbytes()
            self._peak = max(self._peak, self._live)
            weakref.finalize(storage, self._remove, key)

    def _remove(self, key):
        self._live -= self._sizes.pop(key)

    def now(self):
        return self._live

    def peak(self):
        return self._peak


class CudaAllocator:
    """Count the bytes that torch has allocated on the GPU since this object was created."""

    def __init__(self):
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def now(self):
        return torch.cuda.memory_allocated() - self._before

    def peak(self):
        return torch.cuda.max_memory_allocated() - self._before


@contextmanager
def gauge(on_gpu):
    gc.collect()
    if on_gpu:
        yield CudaAllocator()
    else:
        with LiveTensors() as live:
            yield live


class Bytes(NamedTuple):
    """`state` is weights, gradients and optimizer state; `peak` is the maximum over two steps."""

    state: int
    peak: int


def measured_bytes(config, on_gpu):
    """Take two steps: the gradients and temporaries of the second are added to what the first left."""
    state = 0
    with gauge(on_gpu) as memory, open_session(config) as session:
        for _ in range(2):
            session.passes.gradients(next(session.data.loader), session.optimizer.loss_scale)
            state = memory.now()
            session.optimizer.step(config.optim.lr)
        return Bytes(state, memory.peak())


def predicted_bytes(config):
    """Predict the same two numbers for a step of one micro-batch."""
    need = arrange(config, World()).resolved.estimates[0]
    return Bytes(need.state, need.bytes(config.train.batch.amount // config.data.seq_len))
