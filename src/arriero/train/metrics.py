"""What is measured at a logged step, and the stopwatch that measures it."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from arriero.parallel.mesh import Mesh
from arriero.train.device import Device


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Rates are means over the steps since the line before."""

    step: int
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_s: float
    data_wait: float
    peak_mem_gib: float
    mfu: float | None
    flops_per_token: float = 0.0
    skipped: int = 0
    eval_loss: float | None = None
    save_s: float | None = None

    def line(self) -> dict[str, Any]:
        """Without keys of what did not happen at this step; `save_s` is how long training waited for a save.

        A loss or norm that is not finite, of a skipped update, is null: JSON has no infinity.
        """
        optional = ("eval_loss", "save_s")
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
            if value is not None or name not in optional
        }


class Stopwatch:
    """Time of the steps since the last lap; evaluation and other pauses do not count.

    Tokens, FLOPs and `peak_flops` are those of all ranks, peak memory is that of the rank that uses most. MFU
    is None where the peak for the precision in use is not known.
    """

    def __init__(self, device: Device, peak_flops: float | None, mesh: Mesh) -> None:
        self._mesh = mesh
        self._device = device
        self._peak_flops = peak_flops
        self._reset()

    def _reset(self) -> None:
        self._start = time.perf_counter()
        self._paused = 0.0
        self._waited = 0.0
        self._steps = 0
        self._tokens = 0
        self._flops = 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._device.synchronize()
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def count(self, tokens: int, flops: float) -> None:
        """A step of so many real tokens and so much work was done."""
        self._steps += 1
        self._tokens += tokens
        self._flops += flops

    def lap(self, global_values: Sequence[torch.Tensor] = ()) -> tuple[dict[str, Any], list[float]]:
        """Called by all ranks together: one collective on the device and one copy to the host.

        `global_values` are scalars on the device, alike on all ranks; they come back as numbers.
        """
        counts = (self._tokens, self._flops) if self._mesh.counts_batch else (0, 0)
        device = self._device.torch_device
        own = torch.tensor([*counts, self._device.peak_memory()], dtype=torch.float64, device=device)
        given = [value.detach().to(device, torch.float64).reshape(1) for value in global_values]
        ranks = self._mesh.gathered(torch.cat([own, *given])).cpu()
        tokens, flops = ranks[:, :2].sum(dim=0).tolist()
        seconds = time.perf_counter() - self._start - self._paused
        lap = {
            "tokens_per_s": tokens / seconds,
            "step_s": seconds / self._steps,
            "data_wait": self._waited / seconds,
            "peak_mem_gib": ranks[:, 2].max().item() / 2**30,
            "mfu": flops / seconds / self._peak_flops if self._peak_flops else None,
            "flops_per_token": flops / tokens,
        }
        self._reset()
        return lap, ranks[0, 3:].tolist()
